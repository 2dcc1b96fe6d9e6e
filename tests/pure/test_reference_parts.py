"""Checkpoints of DeepSpeed 0.19.8 whose parameters lie in parts are read exactly, or refused with what is wrong."""

import contextlib
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deepspeed.checkpoint.foreign import legacy
from deepspeed.checkpoint.foreign.legacy import ReferenceSource, open_reference
from deepspeed.checkpoint.foreign.parts import by_patterns
from deepspeed.checkpoint.foreign.rewrite import write_checkpoint
from deepspeed.checkpoint.load.reader import open_checkpoint
from deepspeed.checkpoint.load.source import Key, Source, whole
from deepspeed.errors import CheckpointError

ARCHIVE = Path(__file__).parents[1] / "data" / "reference_parts.tar.xz"
TAG = "global_step2"
with tarfile.open(ARCHIVE) as _archive:
    CASES = sorted({Path(member.name).parts[0] for member in _archive})
# Their files number the state within a stage or in the order of AutoEP's own layers, so that only weights have names.
WEIGHTS_ALONE = ("autoep_s0_fp32_r2", "pipe_s0_fp32_r2")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parts")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


def expected(root: Path, case: str) -> dict[Key, torch.Tensor]:
    arrays = np.load(root / case / "expected.npz").items()
    pairs = ((key.partition("|"), torch.from_numpy(np.asarray(array))) for key, array in arrays)
    return {(state, name): value for (state, _, name), value in pairs}


def opened(root: Path, case: str) -> ReferenceSource:
    return open_reference(root / case / "saved" / TAG).with_groups(groups_of(expected(root, case)))


def groups_of(wanted: dict[Key, torch.Tensor]) -> list[list[str]]:
    """Names in the groups of an engine: the experts of ``MoE`` layers in one of their own."""
    names = [name for state, name in wanted if state == "master"]
    experts = [name for name in names if "deepspeed_experts" in name]
    return [[n for n in names if n not in experts], *([experts] if experts else [])]


def agree(source: Source, wanted: dict[Key, torch.Tensor]) -> None:
    assert source.entries.keys() == wanted.keys()
    for key, value in wanted.items():
        found = whole(source, key)
        assert found.shape == value.shape, key
        assert torch.equal(found, value.to(found.dtype)), key


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_is_the_one_that_was_trained(root: Path, case: str) -> None:
    wanted, source = expected(root, case), opened(root, case)
    if case in WEIGHTS_ALONE:
        wanted = {("param", name): value for (state, name), value in wanted.items() if state == "master"}
    if case == "pipe_s0_fp32_r2":  # and a tied weight is where it is used
        wanted["param", "0.weight"] = wanted.pop(("param", "tied_modules.embed.weight"))
    agree(source, wanted)
    assert source.facts["client_state"] == {"epoch": 2}
    assert source.facts["engine"]["global_steps"] == 2
    named = [name for group in source.facts["optimizer"].get("groups", ()) for name in group["names"]]
    assert sorted(named) == sorted({name for state, name in wanted if state == "master"})
    # The wrapper of unsharded low precision takes a step with zero gradients when it is made.
    steps = {float(values["step"]) for values in source.facts["optimizer"].get("scalars", {}).values()}
    assert steps <= {3.0 if case == "moe_s0_bf16_r2" else 2.0}


@pytest.mark.parametrize("case", ["autoep_s2_fp32_r4", "tp_s1_fp32_r4"])
def test_universal_folders_hold_the_same(root: Path, case: str) -> None:
    source = open_reference(root / case / "saved" / f"{TAG}_universal")
    assert source.kind == "universal"
    agree(source, expected(root, case))
    assert source.facts["optimizer"] == opened(root, case).facts["optimizer"]


@pytest.mark.parametrize("case", ["autoep_s2_fp32_r4", "tp_s1_fp32_r4", "moe_s1_fp32_r4"])
def test_any_range_equals_the_slice(root: Path, case: str) -> None:
    source = opened(root, case)
    for key, value in expected(root, case).items():
        flat = value.reshape(-1)
        for start in range(0, flat.numel(), 7):
            out = torch.empty(min(33, flat.numel() - start), dtype=flat.dtype)
            source.read(key, out, start=start)
            assert torch.equal(out, flat[start : start + 33]), (key, start)


@pytest.mark.parametrize("case", ["autoep_s2_fp32_r4", "moe_s1_fp32_r4", "pipe_s1_fp32_r4", "tp_s1_fp32_r4"])
def test_what_is_imported_is_the_same(root: Path, tmp_path: Path, case: str) -> None:
    """As ``ds_checkpoint import`` writes it."""
    folder = write_checkpoint(opened(root, case), tmp_path, "tag")
    with contextlib.closing(open_checkpoint(folder)) as source:
        agree(source, expected(root, case))


def test_tied_weights_of_a_pipeline_have_both_names(root: Path) -> None:
    assert opened(root, "pipe_s1_fp32_r4").facts["shared"] == {"0.weight": "tied_modules.embed.weight"}


def changed(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Let ``change`` edit the contents of each file of model states."""
    load = legacy._load

    def loaded(path: Path) -> dict[str, Any]:
        content = load(path)
        if path.name.endswith("model_states.pt") and "param_shapes" in content:
            change(content)
        return content

    monkeypatch.setattr(legacy, "_load", loaded)


def test_tensor_parallel_parts_are_joined_by_patterns_where_there_is_no_map(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As files of Megatron-DeepSpeed and of earlier releases have them."""
    changed(monkeypatch, lambda content: content["universal_checkpoint_info"].pop("affine_map"))
    for case in ("tp_s1_fp32_r4", "tp_s3_bf16_r4"):
        agree(opened(root, case), expected(root, case))


def test_packed_halves_and_padded_vocabularies_are_joined_by_patterns() -> None:
    halves = {"parameter_with_2_sub_params_cat_dim_0": ["qkv"], "vocabulary_parameter_patterns": ["words"]}
    place = by_patterns({**halves, "original_vocab_size": 7}, 2, Path())
    whole_halves, whole_words = torch.arange(8), torch.arange(7)
    parts = [torch.tensor([0, 1, 4, 5]), torch.tensor([2, 3, 6, 7])], [torch.arange(4), torch.arange(4, 8)]
    for name, value, own in (("qkv", whole_halves, parts[0]), ("words", whole_words, parts[1])):
        found = torch.full_like(value, -1)
        for rank, part in enumerate(own):
            for box in place(name, rank, (4,)).boxes or ():
                (at,), (numel,) = box.where
                found[at : at + numel] = part[box.inside.start[0] :][:numel]
        assert torch.equal(found, value), name


def test_parts_that_nothing_describes_are_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed(monkeypatch, lambda content: content.pop("universal_checkpoint_info"))
    with pytest.raises(CheckpointError, match="2 tensor-parallel ranks cut, and nothing in it tells how"):
        opened(root, "tp_s1_fp32_r4")


def test_a_missing_part_is_named(root: Path, tmp_path: Path) -> None:
    expert = r"lacks expert 2 of 4 .* of model\.layers\.1\.mlp\.experts\.w1"
    state = "has 3 optimizer state files, but was written by 4 ranks"
    for case, file, told in (
        ("autoep_s0_fp32_r2", "layer_1_expert_2_mp_rank_00_model_states.pt", expert),
        ("moe_s1_fp32_r4", "zero_pp_rank_3_mp_rank_00_optim_states.pt", state),
        ("pipe_s1_fp32_r4", "mp_rank_01_model_states.pt", "has state of 1 model-parallel ranks, but was written by 2"),
    ):
        folder = shutil.copytree(root / case / "saved" / TAG, tmp_path / case)
        (folder / file).unlink()
        with pytest.raises(CheckpointError, match=told):
            open_reference(folder)
