"""What a report says of a job that stands still, from what each rank says of itself."""

import gc
import itertools
import json
import os
import queue
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import asdict
from types import FrameType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from deepspeed.accelerator.device import Accelerator, NullEvent, set_accelerator
from deepspeed.comm.hang.explain import LEFT, RAISED, RUNS, SILENT, RankReport, explain
from deepspeed.comm.hang.ledger import Ledger
from deepspeed.comm.hang.stacks import COLLECTIVE, Failure, Spot, _chain, failure_of, outwards, spot_of, spots
from deepspeed.comm.hang.watch import NOTICE, VARIABLE, HangWatch, seconds_of
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.tier.store import Landing
from deepspeed.zero.update.result import norm_of


def waits(rank: int, what: str = "all_gather", *, number: int = 5, step: int = 3, group: str = "default") -> RankReport:
    return RankReport(rank, state=COLLECTIVE, what=what, group=group, step=step, numbers={"default": number})


def test_ranks_that_are_alike_share_a_line_and_the_cause_comes_first() -> None:
    culprit = RankReport(7, "node1", 42, RUNS, module="layers.3.mlp", line="user.py:41 in spin", step=3)
    lines = explain([*map(waits, range(7)), culprit, waits(9)], 5).splitlines()
    assert lines[1:3] == [
        "  rank 7 (pid 42 on node1) runs code outside collectives in layers.3.mlp (user.py:41 in spin), step 3",
        "  ranks 0-6, 9 wait in all_gather, step 3",
    ]


def test_the_error_of_the_rank_that_failed_first_is_last() -> None:
    """One that was told of it, or failed later, comes after it."""
    told = RankReport(0, state=RAISED, error="RankFailedError: rank 2 failed", trace="told", still_s=9.0)
    later = RankReport(1, state=RAISED, error="KeyError: 'x'", trace="later", still_s=5.0)
    first = RankReport(2, state=RAISED, error="ValueError: bad", trace="Traceback ...\nValueError: bad", still_s=6.0)
    text = explain([told, later, first], 5)
    assert text.endswith("The error of rank 2:\nTraceback ...\nValueError: bad\n")


class _Wordless(Exception):
    """Of a user whose ``__str__`` has a fault of its own."""

    def __str__(self) -> str:
        return None  # type: ignore[return-value]


def _fails(first: Exception, then: Exception | None) -> Failure:
    try:
        try:
            raise first
        except Exception as error:
            if then is not None:
                raise then from error
            raise
    except Exception:
        return failure_of(threading.get_ident(), {}, ends=False)


def test_the_first_error_is_named_unless_it_has_no_words() -> None:
    died = RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly")
    assert _fails(ValueError("bad"), died).text == "ValueError: bad"
    assert _fails(queue.Empty(), died).text == "RuntimeError: DataLoader worker (pid(s) 7) exited unexpectedly"
    assert _fails(AssertionError(), None).text == "AssertionError"
    assert _fails(_Wordless(), None).text == "_Wordless"
    assert _fails(_Wordless(), died).text == "RuntimeError: DataLoader worker (pid(s) 7) exited unexpectedly"


def test_what_from_none_hides_is_not_named() -> None:
    try:
        try:
            raise KeyError("foo")
        except KeyError:
            raise ValueError("unknown data set 'foo'") from None
    except ValueError:
        assert failure_of(threading.get_ident(), {}, ends=False).text == "ValueError: unknown data set 'foo'"


def test_errors_that_name_each_other_as_the_cause_end() -> None:
    first, second = ValueError("a"), RuntimeError("b")
    first.__cause__, second.__cause__ = second, first
    assert list(itertools.islice(_chain(first), 9)) == [first, second]
    assert _fails(first, second).text in ("ValueError: a", "RuntimeError: b")


def test_on_the_cpu_a_collective_has_ended_when_the_host_has_waited_and_one_that_raised_is_forgotten() -> None:
    ledger = Ledger()
    begin = ledger.listener("job")
    end = begin("all_gather", 10, torch.float32, 2)
    assert end is not None and ledger.waiting is not None
    end()
    assert ledger.waiting is None
    begin("all_reduce", 1, torch.float32, 2)  # and never ends
    for _ in range(100):
        end = begin("broadcast", 1, torch.float32, 2)
        assert end is not None
        end()
    assert ledger.waiting is None


def test_a_rank_that_has_not_issued_what_others_wait_in_is_behind() -> None:
    behind = RankReport(1, state=COLLECTIVE, what="barrier", group="control", step=3, numbers={"default": 3})
    text = explain([waits(0), behind], 5)
    assert "rank 1 waits in barrier, step 3; 2 behind rank 0 on the group 'default', whose collective 5" in text
    assert "different collectives, so each waits for another" in text


def test_different_orders_and_different_numbers_of_steps_are_sentences() -> None:
    text = explain([waits(0), waits(1, "barrier")], 5)
    assert "number 5 of the group 'default' is rank 0: all_gather; rank 1: barrier" in text
    assert "different numbers of steps (rank 1: 2; rank 0: 3)" in explain([waits(0), waits(1, step=2)], 5)


def test_silent_and_gone_ranks_come_before_those_that_wait() -> None:
    silent = RankReport(3, state=SILENT, what="is stopped (SIGSTOP)")
    left = RankReport(2, state=LEFT, what="its script has ended")
    lines = explain([waits(0), left, silent], 5).splitlines()
    assert [line.split()[1] for line in lines[1:4]] == ["3", "2", "0"]


def test_a_report_survives_the_store() -> None:
    report = RankReport(1, "h", 2, RAISED, stack=("a", "b"), calls=("c",), numbers={"default": 4}, error="E", trace="t")
    assert RankReport.from_values(json.loads(json.dumps(asdict(report)))) == report


def test_many_different_ranks_do_not_fill_the_screen() -> None:
    reports = [RankReport(rank, state=RUNS, line=f"a.py:{rank}") for rank in range(500)]
    assert len(explain(reports, 5).splitlines()) < 60


def test_a_limit_that_is_no_time_is_refused_and_a_notice_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("0", "-3", "soon", "nan"):
        monkeypatch.setenv(VARIABLE, text)
        with pytest.raises(DeepSpeedConfigError, match=VARIABLE):
            seconds_of(VARIABLE, None)
    monkeypatch.setenv(NOTICE, "0")
    assert seconds_of(NOTICE, 60.0, least=0.0) == 0.0


def test_the_launchers_word_counts_before_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "7.5")
    assert seconds_of(VARIABLE, 30.0) == 7.5
    monkeypatch.delenv(VARIABLE)
    assert (seconds_of(VARIABLE, 30.0), seconds_of(VARIABLE, None)) == (30.0, None)


def test_a_rank_alone_in_a_call_of_all_ranks_is_told_so() -> None:
    alone = RankReport(0, state=COLLECTIVE, what="all_gather", call="save_checkpoint", line="train.py:9 in main")
    others = [RankReport(rank, state=RUNS, line="train.py:11 in main") for rank in (1, 2)]
    lines = explain([alone, *others], 60, ends=False).splitlines()
    said = "no rank has made progress for 60 s (nothing is ended: hang_timeout does that)"
    assert lines[0] == f"the job stands still: {said}"
    assert lines[1] == "  every rank must call save_checkpoint(): rank 0 did, ranks 1, 2 did not"
    assert lines[2:] == [
        "  ranks 1, 2 run code outside collectives (train.py:11 in main)",
        "  rank 0 waits in all_gather (train.py:9 in main)",
    ], "one line for each, and no stack"
    together = [RankReport(rank, state=COLLECTIVE, what="all_gather", call="save_checkpoint") for rank in range(3)]
    assert "must call" not in explain(together, 60)
    assert "must call" not in explain([alone, RankReport(1, state=SILENT, what="is stopped (SIGSTOP)")], 60)


def test_a_look_at_a_thread_keeps_nothing_of_it_alive() -> None:
    """As a collection that would free it may come late in a long computation, of which each look kept the tensors."""
    main = threading.get_ident()

    def look() -> weakref.ref[Any]:
        value = torch.zeros(3)
        thread = threading.Thread(target=spots, args=(main, {}))
        thread.start()
        thread.join()
        return weakref.ref(value)

    gc.collect()
    gc.disable()
    try:
        assert look()() is None
    finally:
        gc.enable()


# -- hang device ----------------------------------------------------------------------------------------------------
Frames = list[FrameType]


def _of_torch(function: str) -> Callable[..., Any]:
    """A function whose frame is in a file of torch's, as the Python part of torch's events is."""
    names: dict[str, Any] = {"sys": sys, "outwards": outwards}
    file = os.path.join(os.path.dirname(torch.__file__), "cuda", "streams.py")
    exec(compile(function, file, "exec"), names)
    made: Callable[..., Any] = names["wait"]
    return made


class _Waits:
    """A tensor or an event: to read it is to wait, and where ``frames`` are seen, the innermost first."""

    def __init__(self) -> None:
        self.frames: Frames = []
        self.spots: list[Spot] = []

    def _look(self, frames: Frames) -> list[float]:
        self.spots = [spot_of(frames, {}, busy=busy) for busy in (True, False)]
        return [4.0, 0.0, 0.0]

    tolist = synchronize = _of_torch("def wait(self):\n    return self._look(list(outwards(sys._getframe())))\n")


def _norm(device: Any) -> None:
    norm_of(device)


def _landing(device: Any) -> None:
    landing = Landing(4)
    landing._event = device
    landing.wait()


@pytest.mark.parametrize(("wait", "words"), [(_norm, "sums.tolist()"), (_landing, "event.synchronize()")])
def test_a_wait_of_ours_for_the_device_is_one_in_the_collective_under_way(
    wait: Callable[[Any], None], words: str
) -> None:
    wait(device := _Waits())
    behind, alone = device.spots
    assert behind.kind == COLLECTIVE
    assert behind.waits == words if sys.version_info >= (3, 11) else words in behind.waits  # 3.10 knows the line alone
    assert (alone.kind, alone.waits) == ("", "")


def test_a_call_through_the_device_layer_is_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    device = _Waits()
    monkeypatch.setattr(Accelerator, "_module", property(lambda self: mock.Mock(synchronize=device.synchronize)))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    Accelerator("cuda").synchronize()
    assert device.spots[0].kind == COLLECTIVE and ".synchronize()" in device.spots[0].waits


class _Late(Accelerator):
    """A device that has not done what it was given, until ``done``."""

    def __init__(self) -> None:
        super().__init__("cuda")
        self.done = 0
        self.made = 0
        self.asked_on: list[int | None] = []

    def is_synchronized_device(self) -> bool:
        return False

    def current_device(self) -> int:
        return 3

    def device(self, device_index: Any = None) -> Any:
        self.asked_on.append(device_index)
        return mock.MagicMock()

    def Event(self, **_: Any) -> Any:
        self.made += 1
        event, number = NullEvent(), self.made
        event.query = lambda: number <= self.done  # type: ignore[method-assign]
        return event


@pytest.fixture
def late() -> Any:
    set_accelerator(device := _Late())
    yield device
    set_accelerator(None)


def test_a_collective_is_under_way_until_the_device_has_done_it(late: Any) -> None:
    ledger = Ledger()
    begin = ledger.listener("zero")
    ends = [begin("all_gather", numel, torch.float32, 2) for numel in (10, 20)]
    for end in ends:
        assert end is not None
        end()  # the host has waited: nccl has ordered its stream, no more
    assert ledger.waiting is not None and ledger.waiting.numel == 10 and set(late.asked_on) == {3}
    late.done = 1
    assert ledger.waiting is not None and ledger.waiting.numel == 20
    late.done = 2
    assert ledger.waiting is None


def _spots(*_: Any, busy: bool, **__: Any) -> Spot:
    return Spot(COLLECTIVE, "sums.tolist()") if busy else Spot()


def test_a_store_that_is_gone_is_not_asked_again() -> None:
    channel = mock.Mock()
    channel.apart.return_value = channel
    channel.put.side_effect = [None, dist.DistNetworkError("failed to recv, got 0 bytes"), None]
    with (
        mock.patch("deepspeed.comm.hang.watch.job_channel", return_value=channel),
        mock.patch("deepspeed.comm.hang.watch.dist.get_rank", lambda: 1),
        mock.patch("deepspeed.comm.hang.watch.dist.get_world_size", lambda: 2),
    ):
        watch = HangWatch(0.1, "test")
    watch._pulse()
    watch._talk()  # ends
    assert channel.put.call_count == 2 and not watch.ended


def test_the_report_names_the_collective_that_the_device_is_in(late: Any) -> None:
    with (
        mock.patch("deepspeed.comm.hang.watch.job_channel"),
        mock.patch("deepspeed.comm.hang.watch.dist.get_rank", lambda: 0),
        mock.patch("deepspeed.comm.hang.watch.dist.get_world_size", lambda: 2),
        mock.patch("deepspeed.comm.hang.watch.torch_numbers", dict),
        mock.patch("deepspeed.comm.hang.watch.spots", _spots),
    ):
        watch = HangWatch(10.0, "test")
        assert watch._report().state == RUNS
        end = watch.ledger.listener("zero")("reduce_scatter", 4096, torch.bfloat16, 2)
        assert end is not None
        end()
        report = watch._report()
    assert (report.state, report.what) == (COLLECTIVE, "reduce_scatter of 4096 bfloat16 on zero")
