"""The launcher of one node as a member of the job: one loop over all that happens, one verdict.

Signals, ends of ranks and messages of the hub all arrive as events from handlers and threads.
"""

import signal
import time
from collections.abc import Callable

from deepspeed.launcher.node.hub import Hub, Spoke
from deepspeed.launcher.node.loop import FAILURE_GRACE_S, LOSS_GRACE_S, SIGNAL_GRACE_S, EventLoop, Message
from deepspeed.launcher.node.ranks import Ranks
from deepspeed.launcher.node.verdict import LOST_HOST_STATUS, Verdict, interrupted

_KILL_S = 2.0  # a process that SIGKILL has not ended by then is stuck in the kernel; the job does not wait for it


class Member(EventLoop):
    """Runs the ranks of this node from ``go`` to the verdict; ``start(go)`` starts them.

    ``orphaned`` is the verdict of a node that has lost the hub or its command, and must judge alone.
    """

    def __init__(self, start: Callable[[Message], Ranks]) -> None:
        super().__init__()
        self._start = start
        self._ranks: Ranks | None = None
        self._stopping = self._killed = self._reported = False
        self._verdict: Verdict | None = None
        self.orphaned: Verdict | None = None

    def run(self, link: Hub | Spoke) -> Verdict:
        """Handle events until the job is decided; no rank of this node is left then."""
        self._link, self.tick_s = link, link.tick_s
        try:
            while self._verdict is None:
                self.handle_next()
            return self._verdict
        finally:
            if self._ranks is not None:
                if self._stopping or not self._ranks.all_ended:
                    self._ranks.kill_groups()
                self._ranks.reap()
            link.close()

    def _on_tick(self) -> None:
        self._link.tick()

    def _on_port(self, port: int) -> None:
        if isinstance(self._link, Spoke):
            self._link.port.put(port)

    def _on_refused(self, why: str) -> None:
        self._verdict = Verdict(LOST_HOST_STATUS, f"deepspeed: {why}\n")

    def _on_hub(self, message: Message) -> None:
        kind = message["kind"]
        if kind == "go" and not self._stopping:
            self._ranks = self._start(message)
        elif kind == "stop":
            self._stop(message["signal"], message["grace"])
        elif kind == "verdict":
            self._verdict = Verdict(message["status"], message["text"])

    def _on_lost(self, text: str) -> None:
        self.orphaned = Verdict(LOST_HOST_STATUS, text)
        self._stop(signal.SIGTERM, LOSS_GRACE_S)
        if self._reported:
            self._verdict = self.orphaned

    def _on_rank(self, index: int) -> None:
        assert self._ranks is not None
        if self._ranks.exitcode(index) != 0 and not self._stopping:
            # The other nodes first: they need the time more.
            self._link.send({"kind": "failed"})
            self._stop(signal.SIGTERM, FAILURE_GRACE_S)
        if self._ranks.all_ended:
            self._report()

    def _on_interrupt(self, number: int, immediate: bool) -> None:  # noqa: FBT001 - a value of an event
        if not self._link.joined:
            self._verdict = interrupted(number)
            return
        self._link.send({"kind": "signal", "number": number, "immediate": immediate})
        self._stop(number, 0.0 if immediate else SIGNAL_GRACE_S)

    def _stop(self, number: int, grace_s: float) -> None:
        """End the ranks: ``number`` to each, once, and SIGKILL to what is left after ``grace_s``."""
        deadline = time.monotonic() + grace_s
        first, self._stopping = not self._stopping, True
        if self._ranks is None or self._ranks.all_ended:
            self._report()
        elif not self._reported:
            if first and grace_s > 0:
                self._ranks.signal(number)
            self.deadline = deadline if self.deadline is None else min(deadline, self.deadline)

    def _on_deadline(self) -> None:
        assert self._ranks is not None
        if self._killed:
            self._report()
        else:
            self._killed = True
            self._ranks.kill_groups()
            self.deadline = time.monotonic() + _KILL_S

    def _report(self) -> None:
        """Tell the hub how the ranks of this node ended, once."""
        if self._reported:
            return
        self._reported, self.deadline = True, None
        if self._stopping and self._ranks is not None:
            self._ranks.kill_groups()
        ends = self._ranks.failures() if self._ranks is not None else []
        self._link.send({"kind": "report", "ends": [vars(end) for end in ends], "now": time.time()})
        if self.orphaned is not None:
            self._verdict = self.orphaned
