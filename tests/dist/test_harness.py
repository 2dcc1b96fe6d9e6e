"""The harness itself: results in rank order, every traceback shown, hangs and crashes end fast, the pool recovers."""

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from glob import glob
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepspeed.tools.verify import ranks
from tests.harness.patience import slowdown, too_long
from tests.harness.pool import RankFailure, RankPool
from tests.harness.spy import CollectiveSpy
from tests.mutants.__main__ import KILLED, SURVIVED, UNDECIDED, replay
from tests.mutants.faults import chosen
from tests.mutants.mutant import ROOT


def _sum_of_ranks(offset: int) -> tuple[int, float]:
    value = torch.tensor(float(dist.get_rank() + offset))
    dist.all_reduce(value)
    return dist.get_rank(), float(value)


def _raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"rank {rank} says no")


def _hang_on(rank: int) -> None:
    if dist.get_rank() != rank:
        dist.barrier()


def _die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_results_come_in_rank_order_and_a_traceback_names_its_rank(pool2: RankPool) -> None:
    assert pool2.run(_sum_of_ranks, 1) == [(0, 3.0), (1, 3.0)]
    with pytest.raises(RankFailure) as failure:
        pool2.run(_raise_on, 1)
    assert failure.value.types == {1: "ValueError"}
    assert "rank 1 says no" in str(failure.value)
    assert pool2.run(_sum_of_ranks, 0) == [(0, 1.0), (1, 1.0)]


def test_an_interrupt_while_ranks_start_leaves_none_of_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = set(multiprocessing.active_children())
    started: list[Any] = []
    process = type(ranks.rank_context()).Process
    begin = process.start

    def start(self: Any) -> None:
        begin(self)
        started.append(self)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    monkeypatch.setattr(process, "start", start)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        RankPool(2).start()
    assert len(started) == 2 and set(multiprocessing.active_children()) <= before
    assert not list(tmp_path.rglob("ds_verify_*"))
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_killed_command_leaves_neither_ranks_nor_files(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "deepspeed.tools.verify.cli", "lr"]
    quiet, env = subprocess.DEVNULL, os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=quiet, stderr=quiet, env=env) as process:
        while not list(tmp_path.rglob("rank0.log")):
            assert process.poll() is None
            time.sleep(0.05)
        process.kill()
    end = time.monotonic() + 20
    # unlike pathlib before Python 3.12, glob does not mind folders that go while it looks
    while (left := glob(f"{tmp_path}/**/ds_verify_*", recursive=True)) and time.monotonic() < end:
        time.sleep(0.1)
    assert not left


def test_a_hang_and_a_killed_rank_are_named_and_the_pool_goes_on() -> None:
    with RankPool(2) as pool:
        pool.run(_sum_of_ranks, 0)
        started = time.monotonic()
        with pytest.raises(RankFailure) as failure:
            pool.run(_hang_on, 1, time_limit=2 * slowdown())  # enough for the rank that answers
        assert not too_long(started, 30)
        assert failure.value.types == {0: "hung"}
        assert "_hang_on" in str(failure.value), "and shows the stack"
        with pytest.raises(RankFailure) as failure:
            pool.run(_die_on, 0)
        assert failure.value.types[0] == "died"
        assert "exit code -9" in str(failure.value)
        assert pool.run(_sum_of_ranks, 0)[0] == (0, 1.0)


def _spied() -> list[tuple[str, int, str, int]]:
    with CollectiveSpy() as spy:
        out = torch.empty(8)
        dist.all_gather_into_tensor(out, torch.ones(4))
        dist.reduce_scatter_tensor(torch.empty(4, dtype=torch.float64), torch.ones(8, dtype=torch.float64))
        dist.all_reduce(torch.ones(3), async_op=True).wait()
        dist.broadcast(torch.ones(2), src=0)
    dist.all_reduce(torch.ones(3))
    return [(call.name, call.nbytes, str(call.dtype), call.group_size) for call in spy.calls]


def test_spy_records_name_bytes_dtype_and_group(pool2: RankPool) -> None:
    assert pool2.run(_spied)[0] == [
        ("all_gather_into_tensor", 32, "torch.float32", 2),
        ("reduce_scatter_tensor", 64, "torch.float64", 2),
        ("all_reduce", 12, "torch.float32", 2),
        ("broadcast", 8, "torch.float32", 2),
    ]


# -- planted faults ----------------------------------------------------------------------------------------------

in_a_repository = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="the copy is of what git knows")
_FAST = ("tests/pure/test_schedule.py", "-k", "empty_phase")


@pytest.mark.exhaustive
@in_a_repository
def test_a_planted_fault_is_killed_or_survives_in_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (killed,) = chosen("C2")
    survivor = replace(killed, id="Z1", new="if now.seen != []:")
    homeless = replace(killed, id="Z2", tests=("tests/pure/test_schedule.py::test_that_is_not_there",))
    before = (ROOT / killed.file).read_bytes()
    mutants = [replace(each, tests=_FAST) for each in (killed, survivor)] + [homeless]
    assert replay(mutants, jobs=2, limit_s=100, check=True) == {"C2": KILLED, "Z1": SURVIVED, "Z2": UNDECIDED}
    assert replay([killed], jobs=1, limit_s=0.1, check=False) == {"C2": UNDECIDED}
    assert (ROOT / killed.file).read_bytes() == before and not list(tmp_path.iterdir())


@in_a_repository
def test_an_interrupted_replay_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.mutants", "--only", "C2,H2"]
    # A shell may have left SIGINT ignored for background jobs.
    begin = lambda: signal.signal(signal.SIGINT, signal.default_int_handler)  # noqa: E731
    replaying = subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, "TMPDIR": str(tmp_path)}, preexec_fn=begin, stderr=subprocess.PIPE
    )
    begun = time.monotonic()
    while not list(tmp_path.glob("mutants_*/tree0.log")):
        assert replaying.poll() is None and not too_long(begun, 30)
        time.sleep(0.01)
    replaying.send_signal(signal.SIGINT)
    _, err = replaying.communicate(timeout=60)
    assert replaying.returncode == 128 + signal.SIGINT and b"Traceback" not in err, err
    assert not list(tmp_path.iterdir())
