"""Which failure came first, and when a job of several nodes has come to its verdict."""

import signal
import time

import pytest

from deepspeed.errors import UsageError
from deepspeed.launcher.node.hub import FAILURE_GRACE_S, LOSS_GRACE_S, SIGNAL_GRACE_S, Hub, Message, silence_limit
from deepspeed.launcher.node.verdict import TRACEBACK_CHARACTERS, HostLoss, RankEnd, Verdict, first_failure, judge

KILLED = RankEnd(1, 11, -signal.SIGKILL, 10.0)


def test_cause_comes_before_its_consequences() -> None:
    broken = RankEnd(0, 10, 1, 10.4, raised_at=9.99, traceback="connection closed")
    stopped = RankEnd(2, 12, -signal.SIGTERM, 9.9)
    assert first_failure([broken, stopped, KILLED]) is KILLED
    raised = RankEnd(3, 13, 1, 10.5, raised_at=9.7, traceback="the cause")
    assert first_failure([broken, stopped, KILLED, raised]) is raised


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_rank_that_raised_and_was_then_stopped_counts_with_its_exception(number: signal.Signals) -> None:
    raised = RankEnd(1, 11, -number, 10.5, raised_at=10.0, traceback="the cause", stopped_by_us=True)
    bystander = RankEnd(0, 10, 1, 10.3, raised_at=10.2, traceback="connection closed")
    verdict = judge([bystander, raised], [], show_traceback=True)
    assert verdict.status == 1 and "rank 1 (pid 11) failed first, with exit status 1" in verdict.text
    assert verdict.text.endswith("the cause")


def test_lone_rank_that_somebody_terminated_gives_its_status() -> None:
    assert judge([RankEnd(0, 10, -signal.SIGTERM, 1.0)], [], show_traceback=True).status == 128 + signal.SIGTERM


def test_times_travel_as_ages() -> None:
    end = RankEnd(3, 13, 1, 100.0, raised_at=99.0, traceback="x" * 2 * TRACEBACK_CHARACTERS, host="")
    there = RankEnd.from_message(end.to_message(now=101.0), now=5001.0)
    assert (there.ended_at, there.raised_at, len(there.traceback)) == (5000.0, 4999.0, TRACEBACK_CHARACTERS)
    assert RankEnd.from_message(KILLED.to_message(now=10.0), now=10.0) == KILLED


def test_lost_host_is_the_cause_unless_a_rank_failed_before_it_was_last_heard() -> None:
    loss = HostLoss("b", 1, 10.0, "closed its connection")
    broken = RankEnd(0, 10, 1, 10.5, raised_at=10.1)
    assert judge([broken], [loss], show_traceback=True) == Verdict(1, loss.describe())
    assert judge([], [loss], show_traceback=True).status == 1
    assert judge([RankEnd(0, 10, 7, 9.0)], [loss], show_traceback=True).status == 7


class Wire:
    """A hub of two nodes and what it has sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, Message]] = []
        self.hub = Hub(("a", "b"), lambda node, message: self.sent.append((node, message)), show_traceback=True)

    def take(self) -> list[tuple[int, str]]:
        """Node and kind of everything sent since the last call."""
        sent, self.sent[:] = [(node, message["kind"]) for node, message in self.sent], []
        return sent

    def join(self, node: int) -> None:
        self.hub.handle(node, {"kind": "join", **({"port": 7, "run_id": "r"} if node == 0 else {})})

    def report(self, node: int, *ends: RankEnd) -> None:
        self.hub.handle(node, {"kind": "report", "ends": [end.to_message(time.time()) for end in ends]})

    def signal(self, node: int, number: int, *, immediate: bool) -> None:
        self.hub.handle(node, {"kind": "signal", "number": number, "immediate": immediate})


@pytest.fixture
def wire() -> Wire:
    """A job of two nodes that have both joined."""
    made = Wire()
    made.join(1)
    assert made.hub.missing() == ["a"] and made.take() == []
    made.join(0)
    assert made.hub.missing() == []
    assert made.sent == [(node, {"kind": "go", "port": 7, "run_id": "r"}) for node in (1, 0)]
    made.take()
    return made


def test_job_is_good_when_all_have_reported_no_failure(wire: Wire) -> None:
    wire.report(1)
    assert wire.take() == [] and wire.hub.verdict is None
    wire.report(0)
    assert wire.sent[-1] == (0, {"kind": "verdict", "status": 0, "text": ""})
    assert wire.take() == [(1, "verdict"), (0, "verdict")] and wire.hub.verdict == Verdict(0)


def test_failure_stops_all_once_and_the_earliest_decides(wire: Wire) -> None:
    wire.hub.handle(0, {"kind": "failed"})
    assert wire.sent[0] == (1, {"kind": "stop", "signal": signal.SIGTERM, "grace": FAILURE_GRACE_S})
    wire.hub.handle(1, {"kind": "failed"})
    assert wire.take() == [(1, "stop"), (0, "stop")]
    wire.report(0, RankEnd(0, 10, 1, time.time(), raised_at=time.time(), traceback="connection closed"))
    wire.report(1, RankEnd(1, 11, -signal.SIGKILL, time.time() - 1))
    assert wire.hub.verdict.status == 137 and wire.hub.verdict.text.startswith(
        "deepspeed: rank 1 on b (pid 11) failed first, with signal SIGKILL"
    )


def test_signal_is_passed_on_and_a_second_leaves_no_time(wire: Wire) -> None:
    wire.signal(1, signal.SIGINT, immediate=False)
    wire.signal(0, signal.SIGINT, immediate=False)
    assert [message["grace"] for _, message in wire.sent] == [SIGNAL_GRACE_S] * 2
    wire.signal(0, signal.SIGTERM, immediate=True)
    assert [message["grace"] for _, message in wire.sent[2:]] == [0.0] * 2
    wire.report(0, RankEnd(0, 10, 1, 1.0))
    wire.report(1)
    assert wire.sent[-1][1]["status"] == 130


def test_lost_node_is_not_waited_for(wire: Wire) -> None:
    wire.hub.lose(1, last_heard=time.time(), how="has not been heard for 3 s")
    assert wire.sent == [(0, {"kind": "stop", "signal": signal.SIGTERM, "grace": LOSS_GRACE_S})]
    wire.report(0, RankEnd(0, 10, -signal.SIGTERM, time.time()))
    assert wire.sent[-1][1]["status"] == 1 and "host b (node 1) has not been heard" in wire.sent[-1][1]["text"]


def test_node_that_leaves_after_its_report_is_not_lost(wire: Wire) -> None:
    wire.report(1)
    wire.hub.lose(1, last_heard=time.time(), how="closed its connection")
    wire.report(0)
    assert wire.sent[-1] == (0, {"kind": "verdict", "status": 0, "text": ""})


def test_an_incomplete_job_is_given_up_and_late_nodes_are_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_JOIN_TIMEOUT_S", "2")
    wire = Wire()
    wire.join(0)
    wire.hub.watch_joining(1.5)
    assert wire.take() == []
    wire.hub.watch_joining(2.0)
    assert wire.take() == [(0, "stop")]
    wire.join(1)
    assert wire.sent[-1][0] == 1 and "ended already" in wire.sent[-1][1]["text"]
    wire.report(0)
    assert wire.sent[-1][1]["status"] == 1 and "no launcher on b joined within 2 s" in wire.sent[-1][1]["text"]


def test_a_job_that_nobody_has_joined_ends_at_once() -> None:
    wire = Wire()
    wire.hub.interrupt(signal.SIGINT, immediate=False)
    assert wire.hub.verdict.status == 130 and wire.sent == []


def test_limits_are_numbers_of_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_HOST_TIMEOUT_S", "soon")
    with pytest.raises(UsageError, match="DS_HOST_TIMEOUT_S=soon is not a number of seconds"):
        silence_limit()
