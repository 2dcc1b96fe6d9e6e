"""Which failure came first, and when a job of several nodes has come to its verdict."""

import signal
import time
import traceback
from collections.abc import Iterator

import pytest
from torch.distributed import DistBackendError, HashStore

from deepspeed.comm.channel import Channel
from deepspeed.errors import JobHungError, RankFailedError, UsageError
from deepspeed.launcher.job import Job
from deepspeed.launcher.node.hub import Hub
from deepspeed.launcher.node.loop import (
    FAILURE_GRACE_S,
    LOSS_GRACE_S,
    SIGNAL_GRACE_S,
    EventLoop,
    Message,
    silence_limit,
)
from deepspeed.launcher.node.verdict import RankEnd, judge, lost
from deepspeed.zero.sync.failures import RankOutOfMemoryError

KILLED = RankEnd(1, 11, -signal.SIGKILL, 10.0)


def test_cause_comes_before_its_consequences() -> None:
    broken = RankEnd(0, 10, 1, 10.4, raised_at=9.99, traceback="connection closed")
    stopped = RankEnd(2, 12, -signal.SIGTERM, 9.9)
    assert judge([broken, stopped, KILLED], [], show_traceback=True) == KILLED.verdict(show_traceback=True)
    raised = RankEnd(3, 13, 1, 10.5, raised_at=9.7, traceback="the cause")
    assert judge([broken, stopped, KILLED, raised], [], show_traceback=True).text.endswith("the cause")


@pytest.mark.parametrize(
    "error",
    [
        RankFailedError("rank 1 failed (step 9, forward): ValueError: the\ncause"),
        RankOutOfMemoryError("rank 1 failed"),
        RuntimeError("[/src/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:44939"),
        DistBackendError("NCCL communicator was aborted on rank 0"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_rank_that_raises_because_another_has_comes_after_it(error: RuntimeError) -> None:
    """Both raise at once, when all know of it; the traceback to show is the one that leads to the fault."""
    text = "".join(traceback.format_exception(error))
    told = RankEnd(0, 10, 1, 10.4, raised_at=9.9, traceback=text)
    cleaning = RankEnd(2, 12, 1, 10.4, raised_at=9.8, traceback=f"{text}\nDuring handling, another\nKeyError: 'x'\n")
    own = RankEnd(1, 11, 1, 10.5, raised_at=10.0, traceback="ValueError: the\ncause")
    assert judge([told, own, cleaning], [], show_traceback=True) == own.verdict(show_traceback=True)
    assert judge([told], [], show_traceback=True) == told.verdict(show_traceback=True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_rank_that_raised_and_was_then_stopped_counts_with_its_exception(number: signal.Signals) -> None:
    raised = RankEnd(1, 11, -number, 10.5, raised_at=10.0, traceback="the cause", stopped_by_us=True)
    bystander = RankEnd(0, 10, 1, 10.3, raised_at=10.2, traceback="connection closed")
    verdict = judge([bystander, raised], [], show_traceback=True)
    assert verdict.status == 1 and "rank 1 (pid 11) failed first, with exit status 1" in verdict.text
    assert verdict.text.endswith("the cause")


def test_lone_rank_that_somebody_terminated_gives_its_status() -> None:
    assert judge([RankEnd(0, 10, -signal.SIGTERM, 1.0)], [], show_traceback=True).status == 128 + signal.SIGTERM


def test_times_are_put_on_the_clock_of_the_reader() -> None:
    end = RankEnd(3, 13, 1, 100.0, raised_at=99.0).on_another_clock(4900.0, host="b")
    assert (end.ended_at, end.raised_at, end.host) == (5000.0, 4999.0, "b")
    assert KILLED.on_another_clock(0.0, host="") == KILLED


def test_lost_host_is_the_cause_unless_a_rank_failed_before_it_was_last_heard() -> None:
    loss = (10.0, lost("b", 1, "closed its connection"))
    broken = RankEnd(0, 10, 1, 10.5, raised_at=10.1)
    assert judge([broken], [loss], show_traceback=True) == loss[1]
    assert judge([], [loss], show_traceback=True).status == 1
    assert judge([RankEnd(0, 10, 7, 9.0)], [loss], show_traceback=True).status == 7


def test_ranks_that_a_signal_to_all_has_ended_come_after_the_interrupt() -> None:
    """A scheduler signals launcher and ranks at once: their ends must find a job that is being stopped."""

    class Seen(EventLoop):
        def _on_interrupt(self, number: int, immediate: bool) -> None:  # noqa: FBT001
            seen.append(("interrupt", number, immediate))

        def _on_rank(self, exitcode: int) -> None:
            seen.append(("rank", exitcode))

    seen: list[tuple] = []
    loop = Seen()
    for event in (("signal", signal.SIGTERM), ("rank", -signal.SIGTERM), ("signal", signal.SIGTERM)):
        loop.post(*event)
    for _ in range(3):
        loop.handle_next()
    first, again = (("interrupt", signal.SIGTERM, immediate) for immediate in (False, True))
    assert seen == [first, ("rank", -signal.SIGTERM), again]


class Wire:
    """The hub of two nodes; the second is only its messages in the store. ``now``: what the hub's clock shows."""

    def __init__(self) -> None:
        store, self.now = HashStore(), 0.0
        self._channel = Channel(store, "deepspeed/launcher")
        self.told: list[tuple[int, Message]] = []
        job = Job({"a": (0,), "b": (0,)}, "s.py")
        post = lambda kind, message: self.told.append((0, message))  # noqa: E731
        self.hub = Hub(job, store, post, port=29500, clock=lambda: self.now)

    def pass_ticks(self, seconds: float) -> None:
        """Let the hub tick for ``seconds`` of its clock."""
        for _ in range(round(seconds / self.hub.tick_s)):
            self.now += self.hub.tick_s
            self.hub.tick()

    def say(self, kind: str, **rest: object) -> None:
        """A message of node 1, which the hub hears at its next tick."""
        self._channel.push("up", [1, {"kind": kind, **rest}])
        self.hub.tick()

    def report(self, node: int, *ends: RankEnd) -> None:
        message = {"ends": [vars(end) for end in ends], "now": time.time()}
        self.say("report", **message) if node else self.hub.send({"kind": "report", **message})

    def take(self) -> list[tuple[int, Message]]:
        """Node and message of all that was sent since the last call."""
        sent, self.told[:] = list(self.told), []
        while (message := self._channel.pop("down/1")) is not None:
            sent.append((1, message))
        return sent

    def kinds(self) -> list[tuple[int, str]]:
        return [(node, message["kind"]) for node, message in self.take()]


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Iterator[Wire]:
    """A job of two nodes, of which the second has not joined yet."""
    monkeypatch.setenv("DS_JOIN_TIMEOUT_S", "2")
    monkeypatch.setenv("DS_HOST_TIMEOUT_S", "3")
    yield Wire()


@pytest.fixture
def joined(wire: Wire) -> Wire:
    """The same when both have joined."""
    assert wire.kinds() == []
    wire.say("join")
    go = wire.take()
    assert [(node, message["kind"], message["port"] > 0) for node, message in go] == [(0, "go", True), (1, "go", True)]
    assert go[0][1] == go[1][1]
    return wire


def test_job_is_good_when_all_have_reported_no_failure(joined: Wire) -> None:
    joined.report(1)
    assert joined.take() == []
    joined.report(0)
    good = {"kind": "verdict", "status": 0, "text": ""}
    assert joined.take() == [(0, good), (1, good)]


def test_failure_stops_all_once_and_the_earliest_decides(joined: Wire) -> None:
    joined.hub.send({"kind": "failed"})
    joined.say("failed")
    stop = {"kind": "stop", "signal": signal.SIGTERM, "grace": FAILURE_GRACE_S}
    assert joined.take() == [(0, stop), (1, stop)]
    joined.report(0, RankEnd(0, 10, 1, time.time(), raised_at=time.time(), traceback="connection closed"))
    joined.report(1, RankEnd(1, 11, -signal.SIGKILL, time.time() - 1))
    verdict = joined.take()[0][1]
    assert verdict["status"] == 137
    assert verdict["text"].startswith("deepspeed: rank 1 on b (pid 11) failed first, with signal SIGKILL")


def test_signal_is_passed_on_and_a_second_leaves_no_time(joined: Wire) -> None:
    joined.say("signal", number=signal.SIGINT, immediate=False)
    joined.hub.send({"kind": "signal", "number": signal.SIGINT, "immediate": False})
    joined.hub.send({"kind": "signal", "number": signal.SIGTERM, "immediate": True})
    graces = [(node, message["grace"]) for node, message in joined.take()]
    assert sorted(graces) == [(0, 0.0), (0, SIGNAL_GRACE_S), (1, 0.0), (1, SIGNAL_GRACE_S)]
    joined.report(0, RankEnd(0, 10, 1, 1.0))
    joined.report(1)
    assert joined.take()[-1][1]["status"] == 130


def test_lost_node_is_not_waited_for(joined: Wire) -> None:
    joined.now += 60.0  # in which this process was suspended, and heard nobody
    joined.hub.tick()
    joined.pass_ticks(2.8)
    assert not joined.told
    joined.pass_ticks(0.4)
    assert joined.told == [(0, {"kind": "stop", "signal": signal.SIGTERM, "grace": LOSS_GRACE_S})]
    joined.report(0, RankEnd(0, 10, -signal.SIGTERM, time.time()))
    verdict = joined.told[-1][1]
    assert verdict["status"] == 1 and "host b (node 1) has not been heard for 3 s" in verdict["text"]


def test_node_that_leaves_after_its_report_is_not_lost(joined: Wire) -> None:
    joined.report(1)
    joined.hub.lose(1, "closed its connection")
    joined.report(0)
    assert joined.told[-1] == (0, {"kind": "verdict", "status": 0, "text": ""})


def test_an_incomplete_job_is_given_up_and_late_nodes_are_sent_away(wire: Wire) -> None:
    wire.pass_ticks(2.1)
    assert wire.kinds() == [(0, "stop")]
    wire.say("join")
    ((node, answer),) = wire.take()
    assert node == 1 and "ended already" in answer["text"]
    wire.report(0)
    verdict = wire.told[-1][1]
    assert verdict["status"] == 1 and "no launcher on b joined within 2 s" in verdict["text"]


def test_limits_are_numbers_of_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_HOST_TIMEOUT_S", "soon")
    with pytest.raises(UsageError, match="DS_HOST_TIMEOUT_S=soon is not a number of seconds"):
        silence_limit()


def test_the_report_of_a_job_that_stood_still_is_the_verdict() -> None:
    """Also where the rank that said it was stopped before it had ended, and where another one had raised before."""
    text = "deepspeed.errors.JobHungError: the job stands still\n  rank 1 raised ValueError: bad\n"
    reporter = RankEnd(0, 10, -signal.SIGTERM, 10.4, raised_at=10.0, traceback=text, stopped_by_us=True)
    silent = RankEnd(2, 12, JobHungError.exit_status, 10.1)
    raised = RankEnd(1, 11, -signal.SIGKILL, 10.5, raised_at=4.0, traceback="ValueError: bad", stopped_by_us=True)
    verdict = judge([reporter, silent, raised], [], show_traceback=True)
    assert verdict.status == JobHungError.exit_status == 88
    assert verdict.text == "deepspeed: the job stands still\n  rank 1 raised ValueError: bad\n"
