"""``deepspeed.utils.zero_to_fp32`` and the script beside the checkpoints: plain weights from either layout."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from deepspeed.checkpoint import get_layer_ckpt_name_for_rank, get_model_ckpt_name_for_rank, get_zero_ckpt_name_for_rank
from deepspeed.checkpoint.ds_to_universal import main as to_universal, parse_arguments
from deepspeed.checkpoint.save.client_files import SCRIPT_TEXT, copy_for_later
from deepspeed.errors import CheckpointError
from deepspeed.monitor.log import logger
from deepspeed.tools.checkpoint.cli import main as tool
from deepspeed.utils.zero_to_fp32 import (
    convert_zero_checkpoint_to_fp32_state_dict,
    convert_zero_checkpoint_to_state_dict,
    get_checkpoint_files,
    get_fp32_state_dict_from_zero_checkpoint,
    get_model_state_file,
    get_model_state_files,
    get_optim_files,
    load_state_dict_from_zero_checkpoint,
    main,
)
from tests.harness.warm import Warm
from tests.pure.checkpoint_samples import SHAPES, checkpoint, sample

ROOT = Path(__file__).parents[2]


def wanted() -> dict[str, torch.Tensor]:
    tensors = sample().tensors
    found = {n: t for (s, n), t in tensors.items() if s in ("master", "buffer")}
    return found | {"frozen.weight": tensors["param", "frozen.weight"], "head.weight": found["emb.weight"]}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


def own(folder: Path) -> Path:
    checkpoint(folder)
    return folder


def reference(level: int) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        checkpoint(folder / "own")
        words = f"--format deepspeed --stage {level} --world 3".split()
        assert tool(["export", str(folder / "own"), str(folder / "ref"), *words]) == 0
        return folder / "ref"

    return make


@pytest.mark.parametrize("make", [own, reference(2), reference(3)], ids=["own", "level 2", "level 3"])
def test_the_state_dict_is_the_masters_in_fp32(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    folder = make(tmp_path)
    for path, tag in ((folder, None), (folder, "global_step3"), (folder / "global_step3", None)):
        state = get_fp32_state_dict_from_zero_checkpoint(path, tag)
        assert_same(state, wanted())
        assert state["head.weight"].data_ptr() == state["emb.weight"].data_ptr(), "tied names share their memory"
    without = get_fp32_state_dict_from_zero_checkpoint(str(folder), exclude_frozen_parameters=True)
    assert_same(without, {n: t for n, t in wanted().items() if n != "frozen.weight"})


def test_lazy_values_are_read_when_asked_for(tmp_path: Path) -> None:
    state = get_fp32_state_dict_from_zero_checkpoint(own(tmp_path), lazy_mode=True)
    for name, value in wanted().items():
        assert (state[name].shape, state[name].dtype, state[name].numel()) == (value.shape, value.dtype, value.numel())
        assert torch.equal(state[name].contiguous(), value)


def test_conversion_to_torch_files(tmp_path: Path) -> None:
    folder = own(tmp_path / "a")
    convert_zero_checkpoint_to_fp32_state_dict(folder, tmp_path / "one")
    assert [p.name for p in (tmp_path / "one").iterdir()] == ["pytorch_model.bin"]
    assert_same(torch.load(tmp_path / "one" / "pytorch_model.bin", weights_only=True), wanted())
    # Another dtype casts frozen weights too and rounds no buffer.
    convert_zero_checkpoint_to_state_dict(folder, tmp_path / "half", dtype=torch.float16)
    expected = {n: t if n in ("scale", "count") else t.half() for n, t in wanted().items()}
    assert_same(torch.load(tmp_path / "half" / "pytorch_model.bin", weights_only=True), expected)


def test_conversion_to_shards_needs_no_other_package(tmp_path: Path) -> None:
    convert_zero_checkpoint_to_fp32_state_dict(own(tmp_path / "a"), tmp_path / "many", "300B", safe_serialization=True)
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    from safetensors.torch import load_file

    found = {n: t for f in set(index["weight_map"].values()) for n, t in load_file(tmp_path / "many" / f).items()}
    assert_same(found, {n: t for n, t in wanted().items() if n != "head.weight"})


def test_a_model_gets_the_weights(tmp_path: Path) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l1 = torch.nn.Linear(6, 7)
            self.other = torch.nn.Linear(2, 2)

    model = load_state_dict_from_zero_checkpoint(Model(), own(tmp_path))
    assert torch.equal(model.l1.weight, wanted()["l1.weight"]) and torch.equal(model.l1.bias, wanted()["l1.bias"])


def test_sharded_parameters_become_plain_ones_and_tied_ones_stay_tied(tmp_path: Path) -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = torch.nn.Embedding(*wanted()["emb.weight"].shape)
            self.head = torch.nn.Linear(*reversed(self.emb.weight.shape), bias=False)
            self.head.weight = self.emb.weight
            self.elsewhere = torch.nn.Parameter(torch.ones(3))

    model = Tied()
    for number, param in enumerate(model.parameters()):
        param.ds_id = number  # what tells a sharded one
    rest, folder = model.elsewhere, own(tmp_path)
    with torch.device("meta"):  # of new tensors, which the model is not to get
        load_state_dict_from_zero_checkpoint(model, folder)
    assert torch.equal(model.emb.weight, wanted()["emb.weight"]) and model.head.weight is model.emb.weight
    assert not hasattr(model.emb.weight, "ds_id") and model.emb.weight.requires_grad
    assert model.elsewhere is rest, "nothing is known of it"


def test_the_script_in_the_folder_runs_as_a_program(tmp_path: Path, warm: Warm) -> None:
    folder = own(tmp_path / "a")
    script = folder / "zero_to_fp32.py"
    assert script.read_text() == SCRIPT_TEXT and os.access(script, os.X_OK)
    (tmp_path / "python3").symlink_to(warm.python)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run([script, folder, tmp_path / "out"], capture_output=True, text=True, timeout=90, env=env)
    assert done.returncode == 0, done.stderr
    assert_same(torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True), wanted())


def test_the_command_line_takes_every_option_of_the_original(tmp_path: Path) -> None:
    folder = own(tmp_path / "a")
    words = ["--max_shard_size", "300B", "--safe_serialization", "-t", "global_step3", "--exclude_frozen_parameters"]
    assert main([str(folder), str(tmp_path / "o"), *words]) == 0
    index = json.loads((tmp_path / "o" / "model.safetensors.index.json").read_text())
    assert "frozen.weight" not in index["weight_map"] and set(SHAPES) <= set(index["weight_map"])


def test_wrong_input_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logger, "setLevel", lambda _level: None)
    (tmp_path / "empty").mkdir()
    for args in (
        [str(tmp_path / "missing"), "o"],
        [str(tmp_path / "empty"), "o"],
        [str(own(tmp_path / "a")), "o", "--max_shard_size", "x"],
    ):
        assert main(args) == 2
        assert capsys.readouterr().err.count("\n") == 1
        with pytest.raises((CheckpointError, ValueError, OSError)):  # where it comes from
            main([*args, "-d"])
    with pytest.raises(FileNotFoundError):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path / "missing")
    with pytest.raises(CheckpointError):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path / "a", "global_step9")


def test_it_is_a_program_under_the_name_that_clients_import(tmp_path: Path, warm: Warm) -> None:
    command = [warm.python, "-m", "deepspeed.utils.zero_to_fp32", str(own(tmp_path / "a")), str(tmp_path / "o")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    assert (tmp_path / "o" / "pytorch_model.bin").exists() and "RuntimeWarning" not in done.stderr


def test_damage_is_refused(tmp_path: Path) -> None:
    folder = own(tmp_path)
    data = folder / "global_step3" / "rank_00000.bin"
    content = bytearray(data.read_bytes())
    content[70] ^= 1
    data.write_bytes(content)
    with pytest.raises(CheckpointError, match=data.name):
        get_fp32_state_dict_from_zero_checkpoint(folder)


# --- names that clients use ---


def test_file_lookups_by_rank(tmp_path: Path) -> None:
    folder = tmp_path / "t[1]"  # no pattern
    folder.mkdir()
    for rank in (10, 9, 0):
        (folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").touch()
    (folder / "mp_rank_00_model_states.pt").touch()
    assert [Path(p).name.split("_")[4] for p in get_optim_files(folder)] == ["0", "9", "10"]
    assert get_model_state_file(folder, 2) == str(folder / "mp_rank_00_model_states.pt")
    assert get_model_state_files(folder) == [str(folder / "mp_rank_00_model_states.pt")]
    assert get_checkpoint_files(folder, "*_model_states.pt") == get_model_state_files(folder)
    for missing in (
        lambda: get_model_state_file(folder, 3),
        lambda: get_optim_files(tmp_path),
        lambda: get_model_state_files(tmp_path),
        lambda: get_model_state_file("nowhere", 0),
    ):
        with pytest.raises(FileNotFoundError):
            missing()


def test_stubs_of_a_checkpoint_answer_the_lookups(tmp_path: Path) -> None:
    folder = own(tmp_path) / "global_step3"
    assert torch.load(get_model_state_file(folder, 2), weights_only=True)["global_steps"] == 3
    levels = [torch.load(p, weights_only=True)["optimizer_state_dict"]["zero_stage"] for p in get_optim_files(folder)]
    assert levels == [2, 2]


def test_stubs_hold_the_client_state_without_what_needs_code_to_load() -> None:
    big = torch.zeros(5 << 20)
    hyper = {"rate": 0.1, "to": Path("x"), "deep": {"a": range(2)}}
    state = {"epoch": 2, "best": torch.ones(2), "hyper": hyper, "when": {1, range(3)}}
    found = copy_for_later({**state, "big": big, "list": [1, Path("y")]})
    assert torch.equal(found.pop("best"), torch.ones(2))
    assert found == {"epoch": 2, "hyper": {"rate": 0.1, "deep": {}}}


def test_a_small_view_of_large_storage_is_not_copied_for_the_stubs(monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[object] = []
    monkeypatch.setattr(torch, "save", lambda value, _: saved.append(value))
    assert copy_for_later({"view": torch.zeros(5 << 20)[:2]}) == {} and not saved


def test_names_of_files() -> None:
    assert get_model_ckpt_name_for_rank("d", "00") == os.path.join("d", "mp_rank_00_model_states.pt")
    assert get_zero_ckpt_name_for_rank("d", 3, 1) == os.path.join("d", "zero_pp_rank_3_mp_rank_01_optim_states.pt")
    assert get_layer_ckpt_name_for_rank("d", 2, 0) == os.path.join("d", "layer_02-model_00-model_states.pt")


@pytest.mark.parametrize("make", [own, reference(3)], ids=["own", "level 3"])
def test_ds_to_universal_writes_a_checkpoint_that_loads_anywhere(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    folder = make(tmp_path)
    before = (folder / "latest").read_text()
    words = ["--input_folder", str(folder / "global_step3"), "--output_folder", str(folder / "universal")]
    to_universal(parse_arguments(words))
    assert (folder / "latest_universal").read_text() == "universal" and (folder / "latest").read_text() == before
    assert_same(get_fp32_state_dict_from_zero_checkpoint(folder, "universal"), wanted())
