"""Several processes that convert or export one checkpoint into one folder at the same time all succeed, and leave whole
files only.
"""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from deepspeed.checkpoint.format.folders import temporary_for, write_atomically
from deepspeed.client.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict
from deepspeed.tools.checkpoint.cli import main as tool
from tests.harness.pool import RankPool
from tests.pure.checkpoint_samples import checkpoint

pytestmark = pytest.mark.timeout(60)


def _convert(folder: str, out: str, rounds: int) -> None:
    for _ in range(rounds):
        dist.barrier()
        convert_zero_checkpoint_to_fp32_state_dict(folder, out, max_shard_size="200B")


def test_conversion_by_all_ranks_into_one_folder(pool4: RankPool, tmp_path: Path) -> None:
    folder, out = checkpoint(tmp_path / "c"), tmp_path / "out"
    pool4.run(_convert, str(folder), str(out), 4)
    assert not [p.name for p in out.iterdir() if p.name.startswith(".")]
    found = {name: value for path in out.glob("*.bin") for name, value in torch.load(path).items()}
    alone = tmp_path / "alone"
    convert_zero_checkpoint_to_fp32_state_dict(folder, alone)
    expected = torch.load(alone / "pytorch_model.bin")
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def _export(folder: str, out: str) -> int:
    dist.barrier()
    return tool(["export", folder, out, "--format", "torch", "--overwrite"])


def test_export_by_all_ranks_into_one_folder(pool4: RankPool, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "c")
    for number in range(3):
        assert pool4.run(_export, str(folder), str(tmp_path / f"out{number}")) == [0] * 4
    assert not [p.name for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_what_a_dead_process_left_of_a_file_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    with temporary_for(path) as own:
        own.write_bytes(b"half")
        dead = path.with_name(own.name.replace(f"-{os.getpid()}-", "-4194305-"))
        other = tmp_path / dead.name.replace("model", "other")
        dead.write_bytes(b"half")
        other.write_bytes(b"half")
        write_atomically(path, b"whole")
        assert sorted(tmp_path.iterdir()) == sorted([path, own, other])
    assert sorted(tmp_path.iterdir()) == sorted([path, other])
