"""Checkpoints written by DeepSpeed 0.19.8 are read exactly, in any range, or refused with the name of what is wrong."""

import functools
import json
import shutil
import subprocess
import tarfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deepspeed.checkpoint.foreign.legacy import ReferenceSource, open_reference
from deepspeed.checkpoint.foreign.rewrite import write_checkpoint
from deepspeed.checkpoint.foreign.unpickle import load_restricted, materialize
from deepspeed.checkpoint.load.source import Key, whole
from deepspeed.errors import CheckpointError
from deepspeed.tools.checkpoint.cli import main
from tests.harness.warm import Warm

ARCHIVE = Path(__file__).parents[1] / "data" / "reference_checkpoints.tar.xz"
with tarfile.open(ARCHIVE) as _archive:
    CASES = sorted({Path(member.name).parts[0] for member in _archive})
GROUPS = [["embed.weight", "body.weight"], ["scale", "body.bias", "norm.weight", "norm.bias"]]
TAG = "global_step3"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reference")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


@functools.cache
def expected(root: Path, case: str) -> tuple[dict[Key, torch.Tensor], dict[str, Any]]:
    facts = json.loads((root / case / "expected.json").read_text())
    tensors = {}
    for key, array in np.load(root / case / "expected.npz").items():
        state, _, name = key.partition("|")
        value = torch.from_numpy(np.asarray(array))
        tensors[state, name] = (
            value.view(torch.bfloat16) if name in facts["bf16_names"] and value.dtype == torch.int16 else value
        )
    if facts["case"].get("exclude"):
        tensors = {k: v for k, v in tensors.items() if k[0] != "param"}
    return tensors, facts


def groups_of(case: str) -> list[list[str]]:
    return [sum(GROUPS, [])] if "fused" in case else GROUPS


def opened(root: Path, case: str, suffix: str = "") -> ReferenceSource:
    return open_reference(root / case / "saved" / f"{TAG}{suffix}").with_groups(groups_of(case))


def agree(source: ReferenceSource, wanted: dict[Key, torch.Tensor]) -> None:
    assert source.entries.keys() == wanted.keys()
    for key, value in wanted.items():
        found = whole(source, key)
        assert found.dtype == value.dtype, key
        assert found.shape == value.shape, key
        assert torch.equal(found.view(-1).view(torch.uint8), value.contiguous().view(-1).view(torch.uint8)), key


@pytest.mark.parametrize("case", CASES)
def test_tensors_and_facts_are_those_of_the_training(root: Path, case: str) -> None:
    source, (tensors, wanted) = opened(root, case), expected(root, case)
    assert source.kind == "deepspeed-0.19"
    agree(source, tensors)
    counters_agree(source.facts, wanted)
    optimizer_agrees(source.facts, wanted, case)


def counters_agree(facts: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Compare counters, schedule and client state."""
    assert facts["engine"] == {k: wanted[k] for k in ("global_steps", "global_samples", "skipped_steps", "micro_steps")}
    assert facts["lr_scheduler"] == wanted["lr_scheduler"]
    assert facts["shared"] == {"head.weight": "embed.weight"}
    assert facts["world"] == {"size": wanted["case"]["ranks"]}
    assert facts["config"]["gradient_clipping"] == 1.0
    client = facts["client_state"]
    assert list(client) == ["epoch", "history", "mask", "numbers", "best", "args"]
    assert client["epoch"] == 2 and client["history"] == [0.5, (1, "x"), None]
    assert torch.equal(client["mask"], torch.arange(5)) and np.array_equal(client["numbers"], np.arange(3.0))
    assert type(client["best"]) is np.float32
    assert client["args"] == Namespace(lr=0.1, dtype=torch.bfloat16, size=torch.Size([2, 3]))


def optimizer_agrees(facts: dict[str, Any], wanted: dict[str, Any], case: str) -> None:
    """Compare the optimizer, which is known by the names of parameters."""
    groups, trained = facts["optimizer"]["groups"], wanted["case"]
    names = [group["names"] for group in groups]
    assert [sorted(group) for group in names] == [sorted(group) for group in groups_of(case)]
    if "elastic" not in case:
        assert [group["options"]["lr"] for group in groups] == wanted["lr"]
        assert all("params" not in group["options"] for group in groups)
    steps = {name: float(slots["step"]) for name, slots in facts["optimizer"]["scalars"].items()}
    # The wrapper of unsharded low precision takes a step with zero gradients when it is made.
    extra = trained["stage"] == 0 and trained["dtype"] != "fp32"
    taken = wanted["global_steps"] - wanted["skipped_steps"] + extra
    assert steps == ({} if "sgd" in case else {name: taken for group in names for name in group})
    if trained["dtype"] == "fp16":
        scaler = facts["loss_scaler"]
        assert scaler["dynamic"] is True
        assert scaler["cur_scale"] == wanted["loss_scale"] == 32.0
        assert (scaler["cur_iter"], scaler["last_overflow_iter"], scaler["scale_window"]) == (3, 1, 2)


def converted() -> list[str]:
    with tarfile.open(ARCHIVE) as archive:
        return sorted(
            {Path(m.name).parts[0] for m in archive if m.name.endswith("_universal")} - {"s2_bf16_r2_round_robin"}
        )


@pytest.mark.parametrize("case", converted())
def test_universal_folders_hold_the_same(root: Path, case: str) -> None:
    source = opened(root, case, "_universal")
    assert source.kind == "universal"
    agree(source, expected(root, case)[0])
    plain = opened(root, case).facts
    for fact in ("engine", "optimizer", "lr_scheduler", "shared", "config", "world"):
        assert source.facts[fact] == plain[fact], fact
    wrapped = "wrapper" in case
    assert source.facts["loss_scaler"] == (None if wrapped else plain["loss_scaler"])


def test_a_conversion_that_mixed_parameters_up_is_refused(root: Path) -> None:
    with pytest.raises(CheckpointError, match="round_robin_gradients.*mixes parameters up"):
        opened(root, "s2_bf16_r2_round_robin", "_universal")


@pytest.mark.parametrize("case", ["s0_bf16_r2", "s1_fp32_r2", "s2_fp32_r4", "s3_bf16_r4", "s3_fp32_r2_subgroups"])
def test_any_range_equals_the_slice(root: Path, case: str) -> None:
    source = opened(root, case)
    for key, value in expected(root, case)[0].items():
        flat = value.reshape(-1)
        for start in range(0, flat.numel(), 5):
            for length in (1, 4, 11, 50):
                out = torch.empty(min(length, flat.numel() - start), dtype=flat.dtype)
                source.read(key, out, start=start)
                assert torch.equal(out, flat[start : start + length]), (key, start, length)
        with pytest.raises(ValueError, match=f"is {flat.numel()} elements"):
            source.read(key, torch.empty(2, dtype=flat.dtype), start=flat.numel() - 1)
    with pytest.raises(CheckpointError, match="has no master of nothing"):
        source.read(("master", "nothing"), torch.empty(1))


def test_unsharded_masters_are_named_by_their_values(root: Path) -> None:
    for case in ("s0_bf16_r1", "s0_bf16_r2", "s0_fp16_r2", "s0_bf16_r1_sgd", "s0_fp16_r1_fused"):
        agree(open_reference(root / case / "saved" / TAG), expected(root, case)[0])


def test_unsharded_state_without_a_sure_name_is_never_given_one(root: Path) -> None:
    found = open_reference(root / "s0_fp32_r2" / "saved" / TAG)
    states = {name for state, name in found.entries if state == "optim.exp_avg"}
    assert states == {f"unnamed parameter {i} of group {g}" for g, i in [(0, 0), (0, 1), *((1, i) for i in range(4))]}
    assert states == set(found.unnamed)
    weights = {name for state, name in found.entries if state in ("master", "param")}
    assert weights == {*sum(GROUPS, []), "base.weight", "base.bias"}
    with pytest.raises(CheckpointError, match=r"groups of \[2, 4\] parameters, this optimizer of \[6\]"):
        found.with_groups([sum(GROUPS, [])])
    with pytest.raises(CheckpointError, match=r"scale is \(1,\), and parameter 0 of optimizer group 0 is \(13, 7\)"):
        found.with_groups([["scale", "body.weight"], GROUPS[1]])


def test_state_without_names_is_not_imported(root: Path, tmp_path: Path) -> None:
    found = open_reference(root / "s0_fp32_r2" / "saved" / TAG)
    told = r"numbers its optimizer state .*engine\.load_checkpoint, which knows them"
    with pytest.raises(CheckpointError, match=told):
        write_checkpoint(found, tmp_path, "t")
    assert not list(tmp_path.iterdir())
    assert (write_checkpoint(found.with_groups(GROUPS), tmp_path, "t") / "manifest.json").is_file()


@pytest.mark.parametrize("form", ["dcp", "deepspeed"])
def test_state_without_names_is_not_exported(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    assert main(["export", str(root / "s0_fp32_r2" / "saved" / TAG), str(tmp_path / "out"), "--format", form]) == 2
    assert "no names for optimizer state" in capsys.readouterr().err and not list(tmp_path.iterdir())


def unsharded(folder: Path, module: dict[str, torch.Tensor], optimizer: dict[str, Any] | None) -> Path:
    """Write a checkpoint whose one file holds this model and optimizer."""
    state = {"module": module, "buffer_names": [], "optimizer": optimizer, "global_steps": 1, "param_shapes": None}
    torch.save(state, folder / "mp_rank_00_model_states.pt")
    return folder


def test_a_whole_model_in_one_group_is_named_by_its_order(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    source = open_reference(unsharded(tmp_path, model.state_dict(), optimizer.state_dict()))
    for name, p in model.named_parameters():
        assert torch.equal(whole(source, ("master", name)), p)
        assert torch.equal(whole(source, ("optim.exp_avg", name)), optimizer.state[p]["exp_avg"])


def test_masters_in_another_order_than_the_module_are_named_by_their_values(tmp_path: Path) -> None:
    first, second = torch.full((2,), 1.0), torch.full((2,), 2.0)
    slots = {i: {"exp_avg": torch.full((2,), 10.0 * v)} for i, v in enumerate((2, 1))}
    inner = {"state": slots, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}
    optimizer = {"fp32_groups": [[second, first]], "optimizer_state_dict": inner}
    source = open_reference(unsharded(tmp_path, {"a": first.bfloat16(), "b": second.bfloat16()}, optimizer))
    for name, value in {"a": first, "b": second}.items():
        assert torch.equal(whole(source, ("master", name)), value)
        assert torch.equal(whole(source, ("optim.exp_avg", name)), 10 * value)


@pytest.mark.parametrize("groups", [None, [sum(GROUPS, [])]], ids=["by value", "by name"])
def test_flat_unsharded_groups_are_cut(root: Path, tmp_path: Path, groups: list[list[str]] | None) -> None:
    """The wrapper of fused optimizers keeps one flat master per group; a real file is rewritten that way."""
    tensors, _ = expected(root, "s0_bf16_r1")
    state = materialize(load_restricted(root / "s0_bf16_r1" / "saved" / TAG / "mp_rank_00_model_states.pt"))
    del state["optimizer"]["fp32_groups"]
    names = sum(GROUPS, [])
    states = ("master", "optim.exp_avg", "optim.exp_avg_sq")
    flat = {s: torch.cat([*(tensors[s, n].flatten() for n in names), torch.zeros(3)]) for s in states}
    state["optimizer"]["fp32_groups_flat"] = [flat["master"]]
    slots = {"step": torch.tensor(3.0), "exp_avg": flat["optim.exp_avg"], "exp_avg_sq": flat["optim.exp_avg_sq"]}
    state["optimizer"]["optimizer_state_dict"] = {"state": {0: slots}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    torch.save(state, tmp_path / "mp_rank_00_model_states.pt")
    source = open_reference(tmp_path, groups=groups)
    agree(source, tensors)
    assert sorted(source.facts["optimizer"]["groups"][0]["names"]) == sorted(names)
    with pytest.raises(CheckpointError, match="optimizer group 0 has nothing, and the checkpoint no weight"):
        open_reference(tmp_path, groups=[["nothing"]])
    with pytest.raises(CheckpointError, match="elements where master of base.weight needs 211"):
        open_reference(tmp_path, groups=[[*names, "base.weight"]])


# -- damage ------------------------------------------------------------------------------------------------------


@pytest.fixture
def copy(root: Path, tmp_path: Path) -> Any:
    def make(case: str, suffix: str = "") -> Path:
        return Path(shutil.copytree(root / case / "saved" / f"{TAG}{suffix}", tmp_path / "copy"))

    return make


@pytest.mark.parametrize("case", ["s1_fp32_r2", "s2_fp32_r4", "s3_fp32_r3", "s3_bf16_r4"])
def test_a_missing_rank_is_named(copy: Any, case: str) -> None:
    folder = copy(case)
    files = sorted(folder.glob("*optim_states.pt"))
    files[0].rename(folder / "kept")
    with pytest.raises(CheckpointError, match=r"lacks the optimizer state file of rank\(s\) 0"):
        open_reference(folder)
    (folder / "kept").rename(files[0])
    files[-1].unlink()
    told = f"has {len(files) - 1} optimizer state files, but was written by {len(files)} ranks"
    with pytest.raises(CheckpointError, match=told):
        open_reference(folder)
    for file in files[:-1]:
        file.unlink()
    with pytest.raises(CheckpointError, match="has no optimizer state files"):
        open_reference(folder)


def test_a_missing_model_file_is_named(copy: Any) -> None:
    folder = copy("s3_fp32_r3")
    (folder / "zero_pp_rank_2_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(CheckpointError, match="has 2 model state files, but was written by 3 ranks"):
        open_reference(folder)
    for file in folder.glob("*model_states.pt"):
        file.unlink()
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        open_reference(folder)


@pytest.mark.parametrize("case", ["s0_bf16_r2", "s1_fp32_r2", "s3_fp32_r3"])
def test_a_file_cut_at_any_place_is_refused_by_name(copy: Any, case: str) -> None:
    folder = copy(case)
    for file in sorted(folder.iterdir()):
        content = file.read_bytes()
        for length in (0, 1, 3, 30, len(content) // 3, len(content) // 2, len(content) - 1):
            file.write_bytes(content[:length])
            with pytest.raises(CheckpointError, match=file.name):
                open_reference(folder)
        file.write_bytes(content)


@pytest.mark.parametrize("case", ["s0_bf16_r2", "s1_fp32_r2", "s3_bf16_r2"])
def test_a_changed_byte_is_refused_by_name_or_changes_nothing(copy: Any, root: Path, case: str) -> None:
    """Bytes all over every file; those that zip does not use may change."""
    folder, wanted = copy(case), expected(root, case)[0]
    silent = 0
    for file in sorted(folder.iterdir()):
        content = file.read_bytes()
        for at in range(7, len(content), 13 * 29):
            file.write_bytes(content[:at] + bytes([content[at] ^ 0x41]) + content[at + 1 :])
            try:
                agree(open_reference(folder, groups=GROUPS), wanted)
                silent += 1
            except CheckpointError as error:
                assert file.name in str(error) or folder.name in str(error)
        file.write_bytes(content)
    assert silent < 200


def rewrite(path: Path, change: Any) -> None:
    state = materialize(load_restricted(path))
    state.get("optimizer_state_dict", {}).pop("loss_scaler", None)  # stand-ins are not for writing
    state.get("optimizer_state_dict", {}).pop("param_slice_mappings", None)
    change(state)
    torch.save(state, path)


def test_sizes_that_do_not_fit_are_named(copy: Any) -> None:
    folder = copy("s1_fp32_r2")
    model, optim = folder / "mp_rank_00_model_states.pt", folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    before = model.read_bytes()

    def grow(state: Any) -> None:
        state["param_shapes"][0]["body.weight"] = torch.Size([7, 70])

    rewrite(model, grow)
    told = "group 0 has 140 elements in its optimizer state files, its parameters 581"
    with pytest.raises(CheckpointError, match=told):
        open_reference(folder)
    model.write_bytes(before)

    def shorten(state: Any) -> None:
        slots = state["optimizer_state_dict"]["base_optimizer_state"]["state"][0]
        slots["exp_avg"] = slots["exp_avg"][:-1].clone()

    rewrite(optim, shorten)
    told = rf"{optim.name} has optim.exp_avg of (embed|body).weight of shape \(69,\)"
    with pytest.raises(CheckpointError, match=told):
        open_reference(folder)


def test_frozen_parameters_without_a_slice_are_named(copy: Any) -> None:
    folder = copy("s3_fp32_r3")
    file = folder / "zero_pp_rank_1_mp_rank_00_model_states.pt"
    rewrite(file, lambda state: state["frozen_param_fragments"].pop("base.weight"))
    with pytest.raises(CheckpointError, match="32 of the 49 elements of param of base.weight"):
        open_reference(folder)


def test_missing_files_of_a_universal_folder_are_named(copy: Any) -> None:
    folder = copy("s2_fp32_r2", "_universal")
    (folder / "zero" / "norm.bias" / "exp_avg.pt").unlink()
    with pytest.raises(CheckpointError, match=r"lacks optim.exp_avg of norm.bias"):
        open_reference(folder)
    shutil.rmtree(folder / "zero" / "norm.bias")
    with pytest.raises(CheckpointError, match="trained parameter norm.bias is missing"):
        open_reference(folder)
    shutil.rmtree(folder / "zero")
    with pytest.raises(CheckpointError, match="has no optimizer state files"):
        open_reference(folder)


def test_layouts_that_are_not_read_are_said(copy: Any) -> None:
    folder = copy("s1_fp32_r2")
    for name, words in {
        "layer_00-model_states.pt": "layer_00-model_states.pt cannot be read",
        "layer_0_expert_3_mp_rank_00_model_states.pt": "layer_0_expert_3_mp_rank_00_model_states.pt cannot be read",
        "mp_rank_02_model_states.pt": r"no file \*mp_rank_01_model_states.pt",
        "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt": "for the same rank",
    }.items():
        (folder / name).touch()
        with pytest.raises(CheckpointError, match=words):
            open_reference(folder)
        (folder / name).unlink()
    open_reference(folder)
    (folder / "offloaded_tensors").mkdir()
    with pytest.raises(CheckpointError, match="swap files"):
        open_reference(folder)


def test_other_files_of_torch_are_no_checkpoint(tmp_path: Path) -> None:
    without_steps, odd_module = {"module": {}}, {"module": 3, "global_steps": 1}
    for content in ({}, [], without_steps, odd_module, {"module": {}, "global_steps": "x"}, torch.ones(2)):
        torch.save(content, tmp_path / "mp_rank_00_model_states.pt")
        with pytest.raises(CheckpointError):
            open_reference(tmp_path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        open_reference(tmp_path / "nothing")


@pytest.mark.parametrize("kind", ["model", "optim"])
def test_a_file_that_holds_no_state_is_named(copy: Any, kind: str) -> None:
    folder = copy("s2_fp32_r4")
    file = next(folder.glob(f"*_{kind}_states.pt"))
    torch.save([1], file)
    with pytest.raises(CheckpointError, match=f"{file} holds a list, not the state of"):
        open_reference(folder)


READ_ENDS = """
import sys
from pathlib import Path
import torch
from deepspeed.checkpoint.foreign.legacy import open_reference

def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024

before = peak()
source = open_reference(Path(sys.argv[1]))
for key, described in source.entries.items():
    out = torch.empty(1000)
    source.read(key, out, start=described.shape[0] - 1000)
    assert out.sum() == 1000
sys.stdout.write(str(peak() - before))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks Linux for the peak of a process")
def test_reading_needs_memory_for_what_is_asked_only(tmp_path: Path, warm: Warm) -> None:
    unsharded(tmp_path, {f"layer{i}.weight": torch.ones(1 << 22) for i in range(8)}, None)
    call = [warm.python, "-c", READ_ENDS, str(tmp_path)]
    done = subprocess.run(call, capture_output=True, text=True, timeout=100, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 40 << 20  # of 128 MB
