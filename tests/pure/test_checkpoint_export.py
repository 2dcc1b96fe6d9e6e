"""``ds_checkpoint export``: what other programs read is exactly what was trained, in bounded memory, whole or
absent.
"""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import weakref
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed.checkpoint.foreign.optimizer_state import Slice, column_width, columns, row_width, rows, sub_groups
from deepspeed.checkpoint.foreign.rewrite import write_checkpoint
from deepspeed.checkpoint.foreign.unpickle import load_restricted
from deepspeed.checkpoint.foreign.weights import Stream, stream, write_weights
from deepspeed.checkpoint.load.reader import find_and_open
from deepspeed.checkpoint.load.source import whole
from deepspeed.reallocate.flow import plan_shards
from deepspeed.tools.checkpoint import export
from deepspeed.tools.checkpoint.cli import FORMATS, main
from deepspeed.tools.checkpoint.export import appearing
from tests.pure.checkpoint_samples import SHAPES, Memory, checkpoint, sample

ROOT = Path(__file__).parents[2]


def exported(tmp_path: Path, *options: str, **kwargs: object) -> Path:
    checkpoint(tmp_path / "ckpt", **kwargs)
    assert main(["export", str(tmp_path / "ckpt"), str(tmp_path / "out"), *options]) == 0
    return tmp_path / "out"


def expected(dtype: torch.dtype | None, *, frozen: bool = True) -> dict[str, torch.Tensor]:
    tensors = sample().tensors
    found = {n: t.to(dtype or torch.bfloat16) for (s, n), t in tensors.items() if s == "master"}
    found |= {n: t for (s, n), t in tensors.items() if s == "buffer"}  # not one is rounded
    return found | {n: t.to(dtype or t.dtype) for (s, n), t in tensors.items() if s == "param" and frozen}


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype and found[name].shape == value.shape
        assert torch.equal(found[name], value), name


# --- Hugging Face ---


@pytest.mark.parametrize("dtype", ["keep", "bf16", "fp16", "fp32"])
def test_safetensors_read_by_the_original_library(tmp_path: Path, dtype: str) -> None:
    from safetensors import safe_open
    from safetensors.torch import load_file

    out = exported(tmp_path, "--format", "hf", "--dtype", dtype)
    assert_same(load_file(out / "model.safetensors"), expected(export.CHOICES[dtype]))
    with safe_open(out / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_8_bit_floats_stay_the_codes_they_are_in_every_dtype(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    source, codes = sample(), torch.arange(16, dtype=torch.uint8).view(torch.float8_e4m3fn)
    source.tensors["param", "codes"] = codes
    write_checkpoint(source, tmp_path / "ckpt", "t")
    for dtype in ("keep", "bf16", "fp32"):
        assert main(["export", str(tmp_path / "ckpt"), str(tmp_path / dtype), "--format", "hf", "--dtype", dtype]) == 0
        found = load_file(tmp_path / dtype / "model.safetensors")["codes"]
        assert found.dtype == codes.dtype and torch.equal(found.view(torch.uint8), codes.view(torch.uint8))


def test_shards_have_an_index_that_accounts_for_every_byte(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    out = exported(tmp_path, "--format", "hf", "--max-shard-size", "180B", "--exclude-frozen")
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    total = len(files)
    assert total > 2 and files == [f"model-{i:05d}-of-{total:05d}.safetensors" for i in range(1, total + 1)]
    loaded = {name: load_file(out / name) for name in files}
    wanted = expected(None, frozen=False)
    assert_same({n: t for part in loaded.values() for n, t in part.items()}, wanted)
    assert all(name in loaded[file] for name, file in index["weight_map"].items())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in wanted.values())
    assert {p.name for p in out.iterdir()} == {*files, "model.safetensors.index.json"}


def test_tied_weights_are_written_once_for_safetensors_and_shared_in_torch_files(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    out = exported(tmp_path, "--format", "hf")
    assert "head.weight" not in load_file(out / "model.safetensors")
    assert main(["export", str(tmp_path / "ckpt"), str(tmp_path / "bin"), "--format", "torch"]) == 0
    state = torch.load(tmp_path / "bin" / "pytorch_model.bin", weights_only=True)
    assert state["head.weight"].data_ptr() == state["emb.weight"].data_ptr()


def test_fp32_torch_files_in_shards_index_tied_names_too(tmp_path: Path) -> None:
    out = exported(tmp_path, "--format", "fp32", "--max-shard-size", "400B")
    index = json.loads((out / "pytorch_model.bin.index.json").read_text())
    state = {n: t for f in set(index["weight_map"].values()) for n, t in torch.load(out / f, weights_only=True).items()}
    wanted = expected(torch.float32)
    assert_same(state, {**wanted, "head.weight": wanted["emb.weight"]})
    assert index["weight_map"]["head.weight"] == index["weight_map"]["emb.weight"]


@pytest.mark.parametrize("form", ["hf", "fp32", "torch"])
def test_diff_agrees_that_an_export_equals_its_checkpoint(tmp_path: Path, form: str) -> None:
    out = exported(tmp_path, "--format", form, "--max-shard-size", "300B")
    assert main(["diff", str(tmp_path / "ckpt"), str(out), "-q"]) == 0


def test_diff_finds_one_changed_bit_of_an_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = exported(tmp_path, "--format", "hf") / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-3] ^= 0x40
    weights.write_bytes(content)
    assert main(["diff", str(tmp_path / "ckpt"), str(weights.parent), "-q"]) == 1
    assert "different " in capsys.readouterr().out


def test_export_into_a_folder_with_files_needs_a_word(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = exported(tmp_path, "--format", "hf", "--max-shard-size", "200B")
    (out / "config.json").write_text("{}")
    assert main(["export", str(tmp_path / "ckpt"), str(out), "--format", "hf"]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "ckpt"), str(out), "--format", "hf", "--overwrite"]) == 0
    assert {p.name for p in out.iterdir()} == {"config.json", "model.safetensors"}


def test_float64_weights_stay_as_they_are_trained(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    source = sample(config={})
    source.tensors["master", "one"] = source.tensors["master", "one"].double() / 3
    write_checkpoint(source, tmp_path / "own", "t")
    assert main(["export", str(tmp_path / "own"), str(tmp_path / "out"), "--format", "hf"]) == 0
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["one"], source.tensors["master", "one"])


def test_an_export_into_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint(tmp_path / "ckpt")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert main(["export", str(tmp_path / "ckpt"), ".", "--format", "dcp"]) == 0
    assert (tmp_path / "here" / ".metadata").is_file()


def test_a_folder_that_is_being_written_never_shows_half_of_itself(tmp_path: Path) -> None:
    for there in (False, True):
        out = tmp_path / f"out{there}"
        if there:
            out.mkdir()
        with pytest.raises(KeyboardInterrupt), appearing(out) as hidden:
            (hidden / "file").write_text("half")
            raise KeyboardInterrupt
        assert out.exists() == there and not any(p.name.startswith(".") for p in tmp_path.iterdir())
        with appearing(out) as hidden:
            (hidden / "file").write_text("whole")
        assert [p.name for p in out.iterdir()] == ["file"]


def test_a_folder_that_cannot_appear_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename, out = os.rename, tmp_path / "out"

    def refused(source: Path, target: Path) -> None:
        if target == out:
            raise PermissionError("no renaming here")
        rename(source, target)

    def late(source: Path, target: Path) -> None:
        if target == out:
            out.mkdir()  # another process was faster
            (out / "theirs").touch()
        rename(source, target)

    monkeypatch.setattr(os, "rename", refused)
    with pytest.raises(PermissionError, match="no renaming here"), appearing(out) as hidden:
        (hidden / "file").write_text("whole")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(os, "rename", late)
    with appearing(out) as hidden:
        (hidden / "file").write_text("whole")
    assert sorted(p.name for p in out.iterdir()) == ["file", "theirs"] and list(tmp_path.iterdir()) == [out]


def test_equal_weights_make_equal_files_wherever_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = sample()
    contents = set()
    for host in ("one.example.org", "two"):
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        streams = [stream(source, k) for k in source.entries if k[0] == "master"]
        (path,) = write_weights(streams, tmp_path / host, safetensors=False, max_shard_size=None)
        contents.add(path.read_bytes())
    assert len(contents) == 1 and b".saving-" not in contents.pop()


class _Broken(Memory):
    """Fails in the middle."""

    def read(self, key: tuple[str, str], out: torch.Tensor, **kwargs: Any) -> None:
        if key[1] == "l2.weight":
            raise KeyboardInterrupt
        super().read(key, out, **kwargs)


def test_an_interrupted_export_leaves_the_older_files_and_nothing_half_written(tmp_path: Path) -> None:
    good, bad = sample(), _Broken(sample().tensors, sample().facts)
    for safetensors in (True, False):
        streams = [stream(good, k) for k in good.entries if k[0] == "master"]
        write_weights(streams, tmp_path, safetensors=safetensors, max_shard_size=200)
        before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
        streams = [stream(bad, k) for k in bad.entries if k[0] == "master"]
        with pytest.raises(KeyboardInterrupt):
            write_weights(streams, tmp_path, safetensors=safetensors, max_shard_size=None)
        assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


@pytest.mark.parametrize("limit", [1, 100, 1000, None])
def test_shards_keep_order_and_respect_the_limit(limit: int | None) -> None:
    streams = [Stream(str(i), torch.float32, (n,), lambda start, out: None) for i, n in enumerate((3, 50, 0, 7, 25, 1))]
    shards = plan_shards(streams, limit)
    assert [s.name for shard in shards for s in shard] == [s.name for s in streams]
    assert all(len(shard) == 1 or sum(s.nbytes for s in shard) <= (limit or 10**9) for shard in shards)
    assert limit is not None or len(shards) == 1


def test_chunks_of_a_stream_join_to_the_tensor() -> None:
    values = torch.arange(1000.0)
    source = Memory({("master", "w"): values.view(10, 100)}, {})
    found = stream(source, ("master", "w"), dtype=torch.float64)
    assert torch.equal(torch.cat([c.clone() for c in found.chunks(8 * 77)]), values.double())
    assert torch.equal(found.whole(), values.double().view(10, 100))


# --- torch.distributed.checkpoint ---


def test_dcp_is_read_back_by_torch(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    out = exported(tmp_path, "--format", "dcp", "--dtype", "fp32")
    dcp_to_torch_save(out, tmp_path / "all.pt")
    state = torch.load(tmp_path / "all.pt", weights_only=False)
    wanted = expected(torch.float32)
    assert_same(state["model"], {**wanted, "head.weight": wanted["emb.weight"]})
    tensors = sample().tensors
    for name in SHAPES:
        assert torch.equal(state["optim"]["state"][name]["exp_avg"], tensors["optim.exp_avg", name])
        assert state["optim"]["state"][name]["step"] == 3.0
    assert [g["params"] for g in state["optim"]["param_groups"]] == [
        ["emb.weight", "l1.weight"],
        ["l1.bias", "l2.weight", "one"],
    ]
    assert state["engine"]["global_steps"] == 3
    target = {"model": {"l1.weight": torch.zeros(7, 6)}}
    with pytest.warns(UserWarning, match="torch.distributed"):
        dcp.load(target, checkpoint_id=out, no_dist=True)
    assert torch.equal(target["model"]["l1.weight"], tensors["master", "l1.weight"])


# --- DeepSpeed's layout ---


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("numels", [[5], [13, 1, 7, 0, 40], [1, 1, 1], [64, 64]])
def test_cuts_cover_every_element_once_and_padding_is_at_the_end(world: int, numels: list[int]) -> None:
    members = [(f"p{i}", n) for i, n in enumerate(numels)]
    width, total = column_width(members, world), sum(numels)
    assert width * world % (2 * world) == 0 and total <= width * world < total + 2 * world
    each = {
        width: list(columns(members, 0, width=width, world=world)),
        sum(row_width(n, world) for n in numels): list(rows(members, 0, world)),
    }
    for length, slices in each.items():
        for name, numel in members:
            spans = sorted((s.lo, s.hi) for s in slices if s.name == name)
            assert [i for lo, hi in spans for i in range(lo, hi)] == list(range(numel))
        for rank in range(world):
            taken = [i for s in slices if s.rank == rank for i in range(s.at, s.at + s.hi - s.lo)]
            assert len(set(taken)) == len(taken) and all(i < length for i in taken)


def test_the_worked_example_of_117_elements() -> None:
    assert column_width([("w", 117)], 2) == 60
    wanted = [Slice("w", 0, 60, 0, 0, 0), Slice("w", 60, 117, 1, 0, 0)]
    assert list(columns([("w", 117)], 0, width=60, world=2)) == wanted


def test_sub_groups_end_when_they_reach_the_limit() -> None:
    members = [("a", 78), ("b", 42), ("c", 42)]
    assert [[n for n, _ in run] for run in sub_groups(members, 2, 40)] == [["a", "b"], ["c"]]
    assert [[n for n, _ in run] for run in sub_groups(members, 2, 39)] == [["a"], ["b", "c"]]


@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_what_goes_to_the_reference_layout_comes_back_bit_for_bit(
    tmp_path: Path, level: int, world: int, dtype: str
) -> None:
    config = {"zero_optimization": {"stage": level, "sub_group_size": 20}, "bf16": {"enabled": dtype == "bf16"}}
    out = exported(tmp_path, "--format", "deepspeed", "--stage", str(level), "--world", str(world), config=config)
    before = sample(config=config)
    lost = {("param", "frozen.weight")} if level == 1 else set()  # that layout keeps frozen weights in the module only
    if level == 0:  # torch's own state dict does not tell a tensor without dimensions from a number
        lost = {("optim.exp_avg", "one"), ("optim.exp_avg_sq", "one")}
    with contextlib.closing(find_and_open(out)) as source:
        assert source.kind == "deepspeed-0.19"
        assert set(before.entries) - set(source.entries) <= lost
        for key in set(before.entries) - lost:
            wanted = before.tensors[key]
            assert torch.equal(whole(source, key), wanted), key
        facts = source.facts
        for name in ("global_steps", "global_samples", "skipped_steps"):
            assert facts["engine"][name] == before.facts["engine"][name]
        assert facts["client_state"]["mine"] == 5 and torch.equal(facts["client_state"]["values"], torch.arange(4))
        assert [set(g["names"]) for g in facts["optimizer"]["groups"]] == [
            set(g["names"]) for g in before.facts["optimizer"]["groups"]
        ]
        assert facts["optimizer"]["groups"][0]["options"]["weight_decay"] == 0.1
        assert all(float(facts["optimizer"]["scalars"][name]["step"]) == 3.0 for name in SHAPES)


OPTIM = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"


@pytest.mark.parametrize(
    ("level", "world", "names"),
    [
        (0, 2, ["mp_rank_00_model_states.pt"]),
        (2, 2, [OPTIM.format(0), OPTIM.format(1), "mp_rank_00_model_states.pt"]),
        (3, 1, [OPTIM.format(0), "zero_pp_rank_0_mp_rank_00_model_states.pt"]),
    ],
)
def test_file_names_are_those_of_the_reference(tmp_path: Path, level: int, world: int, names: list[str]) -> None:
    out = exported(tmp_path, "--format", "deepspeed", "--stage", str(level), "--world", str(world))
    assert sorted(p.name for p in (out / "global_step3").iterdir()) == names
    assert (out / "latest").read_text() == "global_step3" and os.access(out / "zero_to_fp32.py", os.X_OK)


def test_state_that_the_reference_layout_cannot_hold_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the order of round robin it does not say enough, weights alone have no optimizer, and of updates a flat tensor
    has one count.
    """
    unknown, alone, unlike = sample(), sample(), sample()
    unknown.tensors["optim.row", "l1.weight"] = torch.zeros(7)
    unlike.facts["optimizer"]["scalars"]["l1.bias"] = {"step": torch.tensor(1.0)}  # it was frozen for a while
    alone.facts["optimizer"] = {}
    robin = sample(config={"zero_optimization": {"stage": 2, "round_robin_gradients": True}})
    cases = {"optim.row of l1.weight": unknown, "round_robin_gradients": robin, "no optimizer": alone}
    cases["step of l2.weight (and 1 more)"] = unlike
    for words, source in cases.items():
        write_checkpoint(source, tmp_path / words, "t")
        assert main(["export", str(tmp_path / words), str(tmp_path / "out"), "--format", "deepspeed"]) == 2
        assert words in capsys.readouterr().err and not (tmp_path / "out").exists()
    whole_tensors = ["export", str(tmp_path / words), str(tmp_path / "out"), "--format", "deepspeed", "--stage", "0"]
    assert main(whole_tensors) == 0
    with contextlib.closing(find_and_open(tmp_path / "out")) as source:
        assert source.facts["optimizer"]["scalars"]["l1.bias"]["step"] == 1.0


def test_state_that_no_layout_can_hold_is_refused_or_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = sample()
    source.facts["extra_state"] = {"l1": 3}
    source.tensors |= {("opaque.odd", "u0:0:0-72/72"): torch.zeros(3), ("grad", "l1.bias"): torch.zeros(7)}
    write_checkpoint(source, tmp_path / "own", "t")
    arguments = ["export", str(tmp_path / "own"), str(tmp_path / "out"), "--format"]
    assert main([*arguments, "deepspeed", "--stage", "0"]) == 2
    assert "opaque.odd of u0:0:0-72/72" in capsys.readouterr().err and not (tmp_path / "out").exists()
    assert main([*arguments, "dcp"]) == 0
    assert "no place for it in --format dcp: extra_state, grad, opaque.odd\n" in capsys.readouterr().out
    assert main(["export", str(tmp_path / "own"), str(tmp_path / "torch"), "--format", "torch"]) == 0
    assert "no place for it in --format torch: extra_state\n" in capsys.readouterr().out


@pytest.mark.parametrize("level", [0, 2, 3])
def test_extra_states_of_modules_and_no_clipping_go_to_the_reference_layout(tmp_path: Path, level: int) -> None:
    source = sample(config={"zero_optimization": {"stage": level}, "gradient_clipping": 0.0})
    source.facts["extra_state"] = {"": [1], "l1": {"scale": torch.ones(2)}}
    write_checkpoint(source, tmp_path / "own", "t")
    assert main(["export", str(tmp_path / "own"), str(tmp_path / "out"), "--format", "deepspeed"]) == 0
    with contextlib.closing(find_and_open(tmp_path / "out")) as found:
        extra = found.facts["extra_state"]
        assert extra[""] == [1] and torch.equal(extra["l1"]["scale"], torch.ones(2))
    states = [load_restricted(path)["optimizer_state_dict"] for path in tmp_path.glob("out/t/*optim_states.pt")]
    assert [state.get("clip_grad") for state in states] == {0: [], 2: [0.0, 0.0], 3: [None, None]}[level]


def test_a_wrong_shard_size_is_refused_at_once_whatever_the_format(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for form in FORMATS:
        with pytest.raises(SystemExit, match="2"):
            main(["export", str(tmp_path), str(tmp_path / "out"), "--format", form, "--max-shard-size", "5XB"])
        assert re.search(r"--max-shard-size: must be .*, not '5XB'\n", capsys.readouterr().err)


# --- memory ---


class _Counting(Memory):
    """Knows how many of the tensors that it was asked to fill are alive."""

    most, living = 0, list["weakref.ref[torch.Tensor]"]()

    def read(self, key: tuple[str, str], out: torch.Tensor, **kwargs: Any) -> None:
        self.living = [*(ref for ref in self.living if ref() is not None), weakref.ref(out)]
        self.most = max(self.most, len(self.living))
        super().read(key, out, **kwargs)


def test_the_reference_layout_holds_one_tensor_in_the_dtype_it_is_stored_in(tmp_path: Path) -> None:
    source = _Counting({}, sample().facts)
    source.path = Path("t")
    source.tensors = {key: t.bfloat16() if key[0] != "buffer" else t for key, t in sample().tensors.items()}
    export.reference_layout.write(source, tmp_path, level=2, world=1, exclude_frozen=True)
    assert source.most == 1


# One interpreter for all exports: importing torch costs more than exporting. What is freed goes back to the system at
# once (see the environment below), so that each is measured from where it starts.
MEMORY = """
import gc, sys
from deepspeed.tools.checkpoint import cli
from deepspeed.tools.checkpoint import dcp  # its imports are no matter of this checkpoint
import numpy
def peak():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) * 1024
for arguments in eval(sys.argv[1]):
    gc.collect()
    open("/proc/self/clear_refs", "w").write("5")
    before = peak()
    status = cli.main(arguments)
    sys.stdout.write(f"PEAK {peak() - before}\\n")
    if status:
        sys.exit(status)
"""
TENSORS, ROWS = 12, 1024  # 12 tensors of 4 MiB in fp32 and their moments: 144 MiB, and a large one


def _write_large(folder: Path) -> None:
    source = sample(config={"zero_optimization": {"stage": 2}})
    shapes = {f"w{i}": (ROWS, 1024) for i in range(TENSORS)} | {"big": (4 * ROWS, 1024)}
    source.tensors.clear()
    for name, shape in shapes.items():
        for state in ("master", "optim.exp_avg", "optim.exp_avg_sq"):
            source.tensors[state, name] = torch.full(shape, 0.5)
    options = {"lr": 0.1}
    source.facts["optimizer"] |= {"groups": [{"names": list(shapes), "options": options}], "scalars": {}}
    source.facts["shared"] = {}
    write_checkpoint(source, folder, "t")


BIG = 4 * ROWS * 1024 * 4
TOTAL = (TENSORS + 4) * ROWS * 1024 * 4
SLACK = 24 << 20  # the reader's window of 32 MiB is not full, allocator and interpreter


EXPORTS: list[tuple[list[str], int]] = [
    (["--format", "hf"], 0),
    (["--format", "hf", "--dtype", "bf16", "--max-shard-size", "8MB"], 0),
    (["--format", "torch", "--max-shard-size", "17MB"], 17 * 10**6),
    (["--format", "dcp"], BIG),
    (["--format", "deepspeed", "--stage", "3", "--world", "8"], prod((3, TOTAL)) // 8),
]


def test_export_holds_at_most_two_tensors_and_a_shard(tmp_path: Path) -> None:
    large = tmp_path / "large"
    _write_large(large)
    arguments = [["export", str(large), str(tmp_path / str(at)), *options] for at, (options, _) in enumerate(EXPORTS)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    env |= dict.fromkeys(("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"), "65536")
    command = [sys.executable, "-c", MEMORY, repr(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, env=env)
    assert done.returncode == 0, done.stderr
    peaks = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("PEAK ")]
    limits = [2 * BIG + more + SLACK for _, more in EXPORTS]
    assert all(peak < limit for peak, limit in zip(peaks, limits, strict=True)), (peaks, limits)
