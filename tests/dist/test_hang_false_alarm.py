"""A job that comes further is not ended by the watch over jobs that stand still."""

import contextlib
import os
import signal
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from deepspeed.comm.channel import Heard
from deepspeed.comm.hang import watch as hang
from deepspeed.comm.hang.stacks import process_state
from deepspeed.comm.hang.watch import HangWatch, watch
from deepspeed.tier.aio import AioEngine, DirectFile
from tests.harness.logs import logged
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
            with patch.object(guard, "_ask", wraps=guard._ask) as ask:
                guard._alarm()
            asked += [str(number)] * ask.call_count
        guard._channel.put("done")
    else:
        while not guard._channel.has("done"):
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


def _leads(name: str) -> HangWatch:
    """A watch whose threads do not run, of a rank that has waited for too long."""
    guard = HangWatch(1.0, f"deepspeed/hang/leads/{name}")
    guard._beat_s = 0.1
    guard._waited_s = guard._still_s = 1000.0
    guard._pulse()
    dist.barrier()
    return guard


def _judges_while_another_beats() -> tuple[int, list[list[object]]]:
    """How often rank 0 says that it lives while it asks, and whom it would kill: rank 1 beats and does not answer."""
    guard, ended, pulses = _leads("beats"), list[list[object]](), 0
    pulse, judge, channel = guard._pulse, guard._judge, guard._channel

    def counted() -> None:
        nonlocal pulses
        pulses += 1
        pulse()

    def judged(seen: Any, *rest: Any) -> Any:
        channel.put("judging")  # it was silent until then, as on a busy machine
        while guard._beat_of(1) == seen[1]["beat"]:
            time.sleep(0.01)
        return judge(seen, *rest)

    if dist.get_rank() == 0:
        guard._pulse, guard._judge, guard._end = counted, judged, ended.append  # type: ignore[method-assign]
        guard._say = lambda text: None  # type: ignore[method-assign]
        with patch.object(hang, "_REPORTS_S", 0.5):
            guard._alarm()
        channel.put("done")
    while not channel.has("done"):
        guard._beats += channel.has("judging")
        pulse()
        time.sleep(0.01)
    dist.barrier()
    return pulses, ended


def test_a_rank_that_leads_says_that_it_lives_and_spares_one_that_beats_again(pool2: RankPool) -> None:
    pulses, ended = pool2.run(_judges_while_another_beats)[0]
    assert pulses >= 3, "others take a rank that is silent for stopped, and have it killed"
    assert ended == [[]], "a rank that beats can end by itself"


def _another_leads() -> tuple[list[bool], list[str], list[list[object]]]:
    """Whether rank 1's claim stands, as rank 0 meets it; what rank 0, replaced by it, has said, and how it ended."""
    guard, spoken, ended, stands = _leads("claims"), list[str](), list[list[object]](), list[bool]()
    channel, now = guard._channel, [0.0]
    guard._heard = Heard(lambda: now[0])
    guard._say, guard._end = spoken.append, ended.append  # type: ignore[method-assign]
    if dist.get_rank() == 0:

        def met(claim: list[int], beat: int) -> bool:
            channel.put("pulse/1", channel.get("pulse/0") | {"beat": beat})
            now[0] += 0.1
            return guard._lives(claim)

        stands += [all(met([1, 7], beat) for beat in range(60)), all(met([1, 7], 0) for _ in range(60))]
        stands += [all(met([1, 8], beat) for beat in range(310)), guard._lives([0, 3])]

        def replaced(*_: Any) -> tuple[str, list[Any]]:
            channel.put("leader", [1, 7])
            return "text", []

        guard._judge = replaced  # type: ignore[method-assign]
        guard._alarm()
        assert channel.get("leader") == [1, 7]
        channel.put("order", {"kind": "end", "silent": []})
        guard._pause(0.01)
    dist.barrier()
    return stands, spoken, ended


def test_a_rank_that_leads_is_replaced_when_it_is_silent_and_is_quiet_then(pool2: RankPool) -> None:
    stands, spoken, ended = pool2.run(_another_leads)[0]
    beats, silent, left_behind, own = stands
    assert beats, "a rank that beats may take its time"
    assert not silent and not left_behind and not own
    assert not spoken and ended == [[]], "it ends as the other says"


def _talks_on() -> bool:
    """Whether a watch whose report fails once says afterwards that its rank lives."""
    guard, times = _leads("talks"), 0
    guard._beat_s = 0.01

    def fails_once() -> None:
        nonlocal times
        times += 1
        if times == 1:
            raise TypeError("__str__ returned non-string")
        guard._stopped.set()

    guard._exchange = fails_once  # type: ignore[method-assign]
    guard._talk()
    return times == 2


def test_a_watch_that_meets_a_fault_of_a_user_s_object_talks_on(pool2: RankPool) -> None:
    assert pool2.run(_talks_on) == [True, True]


def _sockets() -> int:
    """How many this process has open."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            count += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return count


def _begun_and_ended() -> tuple[bool, bool, list[str]]:
    """Whether a watch has opened a connection, and closed it; what it says of a backend that counts nothing."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # the ranks have met in a file
    before = _sockets()
    with patch.object(dist.distributed_c10d, "_get_default_store", lambda: store):
        guard = HangWatch(600.0, "deepspeed/hang/connection")
    guard._threads.clear()
    guard.start()
    opened = _sockets() > before
    with logged() as lines:
        for counted in (True, *[False] * 100):
            guard._tell_of_blindness(counted=counted)
    guard.stop()
    end = time.monotonic() + 30
    while _sockets() > before and time.monotonic() < end:  # until the other end has seen it
        time.sleep(0.01)
    return opened, _sockets() == before, [line for line in lines if "has no effect" in line]


def test_a_watch_that_ends_closes_its_connection_and_one_that_cannot_see_says_so(pool2: RankPool) -> None:
    for opened, closed, lines in pool2.run(_begun_and_ended):
        assert opened and closed
        assert len(lines) == 1 and "hang_timeout" in lines[0] and "gloo" in lines[0]


@pytest.mark.exhaustive  # three times a limit; the others stand in for what takes so long
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
        return status, guard._channel.has(f"left/{dist.get_rank()}"), guard.ended


def test_a_child_of_a_rank_that_ends_says_nothing_of_the_rank(pool2: RankPool) -> None:
    """It has the exit handler of its parent, and the same connection to the store, but is no rank."""
    assert pool2.run(_child_ends) == [(0, False, False)] * 2
