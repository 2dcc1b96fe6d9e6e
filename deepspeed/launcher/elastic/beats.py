"""Signs of life between the nodes of one round, whatever their agents wait for meanwhile."""

import contextlib
import threading
import time
from collections.abc import Callable

from deepspeed.comm.channel import Channel, Heard, SteadyClock
from deepspeed.launcher.node.loop import silence_limit

BEAT_S = 1.0
_BUSY_S = 3 * BEAT_S  # what a beat may come late on a machine that is busy with much else


def beat(channel: Channel, node: int) -> None:
    """Record a beat of ``node``, with the time of its clock."""
    channel.put(f"beat/{node}", time.time())


class Beats:
    """Beats of one round: those of ``node`` are sent and those of other ``nodes`` heard at each ``look``, which a
    thread takes from ``start`` until ``stop``.

    Each node must have given one ``beat`` before. ``silent``: nodes not heard for the limit. The first such node that
    has not taken leave (``ended/NODE``) is the reason ``over`` of the round's end.
    """

    def __init__(
        self, channel: Channel, node: int, nodes: tuple[str, ...], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.silent: set[int] = set()
        self._channel, self._node, self._limit_s = channel, node, silence_limit()
        self._others = {other: host for other, host in enumerate(nodes) if other != node}
        self._heard = Heard(SteadyClock(min(_BUSY_S, self._limit_s / 2), clock))
        self._least_s: dict[int, float] = {}
        self._stopped = threading.Event()

    def start(self) -> None:
        """Start the thread, where there are others; one wait of the agent's would keep its beats waiting."""
        if self._others:
            self._channel = self._channel.apart()
            threading.Thread(target=self._run, name="beats", daemon=True).start()

    def stop(self) -> None:
        """Stop sending and hearing beats."""
        self._stopped.set()

    def ahead_s(self, node: int) -> float:
        """Return how many seconds this node's clock is ahead of that of ``node``; 0 where both may show the same."""
        least_s = self._least_s.get(node, 0.0)  # and what that beat took to be heard
        return 0.0 if -0.5 * BEAT_S < least_s < _BUSY_S else least_s

    def look(self) -> None:
        """Send a beat, and hear those of the others."""
        beat(self._channel, self._node)
        for node, last in self._channel.of("beat", self._others).items():
            silent_s = self._heard.hear(node, last)
            if silent_s == 0.0:
                self._least_s[node] = min(self._least_s.get(node, float("inf")), time.time() - last)
            elif silent_s > self._limit_s:
                self.silent.add(node)
                if not self._channel.has(f"ended/{node}"):
                    host = f"host {self._others[node]} (node {node})"
                    self._channel.claim("over", f"{host} has not been heard for {self._limit_s:g} s")

    def _run(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone; the agent sees it as well
            while not self._stopped.is_set():
                self.look()
                self._stopped.wait(BEAT_S)
