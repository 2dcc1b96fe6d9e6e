"""The launcher of one node as a member of the job: one queue of events, one loop, one verdict.

Signals, ends of ranks, orders of the ``deepspeed`` command and messages of the hub all arrive as events from handlers
and threads; only this loop acts on them, so nothing here needs a lock.
"""

import queue
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from deepspeed.launcher.cluster.hub import FAILURE_GRACE_S, LOSS_GRACE_S, SIGNAL_GRACE_S, Message
from deepspeed.launcher.cluster.rendezvous import Link
from deepspeed.launcher.node.ranks import Ranks
from deepspeed.launcher.node.verdict import LOST_HOST_STATUS, HostLoss, Verdict

_KILL_S = 2.0  # a process that SIGKILL has not ended by then is stuck in the kernel; the job does not wait for it

Event = tuple[str, Any]


class Member:
    """Runs the ranks of this node from ``go`` to the verdict; ``start(link)`` starts them.

    ``link`` is the way to the hub, once there is one; ``port`` takes the port that the ``deepspeed`` command may name;
    ``from_hub`` says afterwards that the verdict is the one that all nodes have been told.
    """

    def __init__(
        self,
        events: "queue.SimpleQueue[Event]",
        start: Callable[[Link], Ranks],
        *,
        first_host: str,
        announce: Callable[..., None],
    ) -> None:
        self._events = events
        self._start = start
        self._first_host = first_host
        self._announce = announce
        self.port: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.link: Link | None = None
        self._ranks: Ranks | None = None
        self._signalled = False
        self._stopping = False
        self._killed = False
        self._reported = False
        self._deadline: float | None = None
        self._orphaned: Verdict | None = None
        self._verdict: Verdict | None = None
        self.from_hub = False

    def run(self) -> Verdict:
        """Handle events until the job is decided; no rank of this node is left then."""
        handlers: dict[str, Callable[[Any], None]] = {
            "linked": self._on_linked,
            "unlinked": self._on_unlinked,
            "hub": self._on_hub,
            "hub lost": self._on_hub_lost,
            "rank": self._on_rank,
            "signal": self._on_signal,
            "runner": self._on_runner,
        }
        try:
            while self._verdict is None:
                try:
                    kind, value = self._events.get(timeout=self._patience())
                except queue.Empty:
                    self._on_deadline()
                else:
                    handlers[kind](value)
            return self._verdict
        finally:
            self._finish()

    def _patience(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def _finish(self) -> None:
        if self._ranks is not None:
            if self._stopping or not self._ranks.all_ended:
                self._ranks.kill_groups()
            self._ranks.reap()
        if self.link is not None:
            self.link.close()

    def _on_linked(self, link: Link) -> None:
        self.link = link

    def _on_unlinked(self, why: str) -> None:
        self._verdict = Verdict(LOST_HOST_STATUS, f"deepspeed: {why}\n")

    def _on_hub(self, message: Message) -> None:
        kind = message["kind"]
        if kind == "go" and not self._stopping:
            assert self.link is not None
            self._announce("joined")
            self._ranks = self._start(self.link)
        elif kind == "stop":
            self._stop(signal.Signals[message["signal"]], message["grace"])
        elif kind == "verdict":
            self._verdict = Verdict(message["status"], message["text"])
            self.from_hub = True
        elif kind == "refused":
            self._verdict = Verdict(LOST_HOST_STATUS, f"deepspeed: node 0 refused this node: {message['why']}\n")

    def _on_hub_lost(self, how: str) -> None:
        self._orphaned = Verdict(LOST_HOST_STATUS, HostLoss(self._first_host, 0, 0.0, how).describe())
        self._stop(signal.SIGTERM, LOSS_GRACE_S)
        if self._reported:
            self._verdict = self._orphaned

    def _on_rank(self, index: int) -> None:
        assert self._ranks is not None and self.link is not None
        if self._ranks.exitcode(index) != 0 and not self._stopping:
            # The other nodes first: they need the time more.
            self.link.send({"kind": "failed"})
            self._stop(signal.SIGTERM, FAILURE_GRACE_S)
        if self._ranks.all_ended:
            self._report()

    def _on_signal(self, number: signal.Signals) -> None:
        if not self._signalled:
            sys.stderr.write(
                f"deepspeed: {number.name} received; waiting up to {SIGNAL_GRACE_S:g} s for the ranks to end\n"
            )
            sys.stderr.flush()
        self._signal(number, immediate=self._signalled)

    def _on_runner(self, order: str) -> None:
        verb, _, value = order.partition(" ")
        if verb == "port":
            self.port.put(int(value))
        elif verb == "signal":
            self._signal(signal.Signals[value], immediate=False)
        elif verb == "kill":
            self._signal(signal.SIGTERM, immediate=True)

    def _signal(self, number: signal.Signals, *, immediate: bool) -> None:
        self._signalled = True
        if self.link is None:
            self._verdict = Verdict(128 + number)
            return
        self.link.send({"kind": "signal", "name": number.name, "immediate": immediate})
        self._stop(number, 0.0 if immediate else SIGNAL_GRACE_S)

    def _stop(self, number: signal.Signals, grace_s: float) -> None:
        """End the ranks: ``number`` to each, once, and SIGKILL to what is left after ``grace_s``."""
        deadline = time.monotonic() + grace_s
        first, self._stopping = not self._stopping, True
        if self._reported:
            return
        if self._ranks is None or self._ranks.all_ended:
            self._report()
            return
        if first and grace_s > 0:
            self._ranks.signal(number)
        self._deadline = deadline if self._deadline is None else min(deadline, self._deadline)

    def _on_deadline(self) -> None:
        assert self._ranks is not None
        if self._killed:
            self._report()
        else:
            self._killed = True
            self._ranks.kill_groups()
            self._deadline = time.monotonic() + _KILL_S

    def _report(self) -> None:
        """Tell the hub how the ranks of this node ended, once."""
        if self._reported:
            return
        self._reported, self._deadline = True, None
        if self._stopping and self._ranks is not None:
            self._ranks.kill_groups()
        now = time.time()
        ends = self._ranks.failures() if self._ranks is not None else []
        if self.link is not None:
            self.link.send({"kind": "report", "ends": [end.to_message(now) for end in ends]})
        if self._orphaned is not None:
            self._verdict = self._orphaned
