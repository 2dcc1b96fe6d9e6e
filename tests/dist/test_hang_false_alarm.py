"""A job that comes further is not ended by the watch over jobs that stand still."""

import contextlib
import os
import signal
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from deepspeed.comm.hang.stacks import process_state
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


def _stopped_at_its_start() -> str:
    """What rank 0 knows of rank 1, which is stopped before its watch has looked once."""
    pids: list[int] = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    guard = HangWatch(600.0, "deepspeed/hang/stopped-at-its-start")
    guard._threads.clear()  # neither looks nor talks yet
    guard.start()
    text = ""
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        try:
            end = time.monotonic() + 30
            while "stopped" not in process_state(pids[1]) and time.monotonic() < end:
                time.sleep(0.01)
            text = guard._of_silent(1, guard._pulses()[1]).what
        finally:
            os.kill(pids[1], signal.SIGCONT)
    dist.barrier()
    return text


def test_a_rank_that_is_stopped_as_it_starts_is_named_as_stopped(pool2: RankPool) -> None:
    assert pool2.run(_stopped_at_its_start) == ["is stopped (SIGSTOP)", ""]


def _answers_late(answers: bool) -> tuple[str, set[int]]:
    """What rank 0 says of rank 1, whose watch does not beat, and whom it would kill; ``answers``: only for a while."""
    guard = HangWatch(600.0, f"deepspeed/hang/late/{answers}")
    guard._beat_s = 0.1
    guard._pulse()
    dist.barrier()
    text, silent = "", {1}
    if dist.get_rank() == 0:
        text, _ = guard._judge(guard._pulses(), silent)
    elif answers:
        while not guard._answered:
            time.sleep(0.01)
            guard._exchange()
    dist.barrier()
    return text, silent


def test_a_rank_whose_watch_is_only_slow_says_where_it_is(pool2: RankPool) -> None:
    """As where code of the user's computes without a pause, on a machine that is busy with much else."""
    text, silent = pool2.run(_answers_late, True)[0]
    assert "rank 1 " in text and "does not answer" not in text and "_answers_late" in text and not silent
    text, silent = pool2.run(_answers_late, False)[0]
    assert "does not answer: native code keeps its interpreter" in text and silent == {1}


def _answers_before_it_is_judged() -> tuple[str, set[int]]:
    """What rank 0 says of rank 1, which has answered when the time for that is over, and whom it would kill."""
    guard = HangWatch(600.0, "deepspeed/hang/answered")
    guard._pulse()
    dist.barrier()
    asked = guard._ask() if dist.get_rank() == 0 else ("", 0.0)
    dist.barrier()
    if dist.get_rank() == 1:
        guard._exchange()
    dist.barrier()
    text, silent = "", {1}
    if dist.get_rank() == 0:
        text, _ = guard._judge(guard._pulses(), silent, (asked[0], time.monotonic() - 1.0))
    dist.barrier()
    return text, silent


def test_ranks_that_have_answered_are_heard_where_a_slow_store_has_taken_the_time_for_answers(pool2: RankPool) -> None:
    text, silent = pool2.run(_answers_before_it_is_judged)[0]
    assert "does not answer" not in text and "_answers_before_it_is_judged" in text and not silent


def _alarms_while_another_works() -> list[str]:
    """Which of five alarms of rank 0 have asked for reports, while rank 1 comes further all the time."""
    guard, asked = HangWatch(1.0, "deepspeed/hang/asks"), list[str]()
    guard._beat_s = 0.02
    guard._pulse()
    dist.barrier()
    if dist.get_rank() == 0:
        guard._say = asked.append  # type: ignore[method-assign]
        guard._waited_s = guard._still_s = 1000.0
        for number in range(1, 6):
            guard._answered = ""
            guard._alarm()
            asked += [str(number)] * bool(guard._answered)
        guard._store.set("done", "")
    else:
        while not guard._store.check(["done"]):
            guard._beats += 1
            guard._pulse()
    dist.barrier()
    return asked


def test_few_of_the_alarms_that_come_to_nothing_ask_the_ranks_that_work(pool2: RankPool) -> None:
    """The first one asks as it begins, so that a rank in native code has that time to answer already."""
    assert pool2.run(_alarms_while_another_works)[0] == ["1", "2", "4"]


def _alarms_while_the_job_ends() -> list[int]:
    """How often rank 0 has spoken: as it first sees that rank 1 has ended, later, and after its own end."""
    guard, said, counts = HangWatch(600.0, "deepspeed/hang/at-the-end"), list[str](), list[int]()
    guard._beat_s = 0.05
    guard._threads.clear()
    guard.start()
    dist.barrier()
    if dist.get_rank() == 1:
        guard.stop()
    dist.barrier()
    if dist.get_rank() == 0:
        guard._say, guard._end = said.append, lambda silent: None  # type: ignore[method-assign]
        guard._waited_s = guard._still_s = 1000.0
        for _ in range(2):
            guard._alarm()
            counts.append(len(said))
        guard._stopped.set()
        guard._alarm()
        counts.append(len(said))
    dist.barrier()
    return counts


def test_ranks_that_end_while_one_asks_after_them_have_come_further(pool2: RankPool) -> None:
    assert pool2.run(_alarms_while_the_job_ends)[0] == [0, 1, 1]


def test_a_rank_that_writes_its_part_of_a_checkpoint_for_longer_is_no_hang(pool2: RankPool, tmp_path: Path) -> None:
    limit_s = min(1.5 * slowdown(), 8.0)
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
