"""Checkpoints of DeepSpeed 0.19.8 whose parameters lie in parts are read exactly: experts, stages, tensor parallelism."""

import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deepspeed.checkpoint.foreign import legacy
from deepspeed.checkpoint.foreign.legacy import ReferenceSource, open_reference
from deepspeed.checkpoint.load.source import Key, whole
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


def agree(source: ReferenceSource, wanted: dict[Key, torch.Tensor]) -> None:
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
    assert all(float(values["step"]) == 2 for values in source.facts["optimizer"].get("scalars", {}).values())
