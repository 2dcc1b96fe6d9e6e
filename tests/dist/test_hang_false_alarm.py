"""A job that comes further is not ended by the watch over jobs that stand still."""

import contextlib
import os
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from deepspeed.comm.hang.watch import HangWatch, watch
from deepspeed.tier.aio import AioEngine, DirectFile
from tests.harness.patience import slowdown
from tests.harness.pool import RankPool


@contextlib.contextmanager
def _watched(limit_s: float) -> Iterator[HangWatch]:
    guard = watch(limit_s)
    assert guard is not None
    try:
        yield guard
    finally:
        guard.stop()


def _one_writes_while_the_others_wait(folder: str, limit_s: float) -> int:
    """How many pieces this rank has written, in three times the limit."""
    pieces = 0
    with _watched(limit_s):
        if dist.get_rank() == 1:
            begin, piece = time.monotonic(), torch.zeros(4096, dtype=torch.uint8)
            with AioEngine() as engine, DirectFile(Path(folder) / "part", create=True) as file:
                while time.monotonic() - begin < 3 * limit_s:
                    engine.write(file, 4096 * pieces, piece).wait()
                    pieces += 1
                    time.sleep(limit_s / 20)
        dist.barrier()
    return pieces


def test_a_rank_that_writes_its_part_of_a_checkpoint_for_longer_is_no_hang(pool2: RankPool, tmp_path: Path) -> None:
    limit_s = min(slowdown(), 5.0)
    assert pool2.run(_one_writes_while_the_others_wait, str(tmp_path), limit_s)[1] > 1


def _child_ends() -> tuple[int, bool, bool]:
    """Status of a child that runs the exit handler; whether this rank is then said to have left, and still watches."""
    with _watched(600.0) as guard, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork beside threads
        pid = os.fork()
        if pid == 0:
            try:
                guard.stop()
            finally:
                os._exit(0)
        status = os.waitpid(pid, 0)[1]
        return status, guard._store.check([f"left/{dist.get_rank()}"]), guard.ended


def test_a_child_of_a_rank_that_ends_says_nothing_of_the_rank(pool2: RankPool) -> None:
    """It has the exit handler of its parent, and the same connection to the store, but is no rank."""
    assert pool2.run(_child_ends) == [(0, False, False)] * 2
