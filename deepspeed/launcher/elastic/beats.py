"""Signs of life between the nodes of one round, whatever their agents wait for meanwhile."""

import contextlib
import threading
import time

from torch.distributed import Store

from deepspeed.launcher.node.loop import silence_limit

BEAT_S = 1.0
_BUSY_S = 3 * BEAT_S  # what a beat may come late on a machine that is busy with much else


def beat(store: Store, node: int) -> None:
    """Record a beat of ``node``, with the time of its clock."""
    store.set(f"beat/{node}", repr(time.time()))


class Beats:
    """Beats of one round: a thread sends those of ``node`` and hears those of other ``nodes``, until ``stop``.

    Each node must have given one ``beat`` before. ``silent``: nodes not heard for the limit. The first such node that
    has not taken leave (``ended/NODE``) is the reason ``over`` of the round's end.
    """

    def __init__(self, store: Store, node: int, nodes: tuple[str, ...]) -> None:
        self.silent: set[int] = set()
        self._node, self._others = node, {other: host for other, host in enumerate(nodes) if other != node}
        self._least_s: dict[int, float] = {}
        self._stopped = threading.Event()
        if self._others:  # a connection of its own: one wait of the agent's would keep all others waiting
            clone: Store = store.clone()  # type: ignore[attr-defined]
            threading.Thread(target=self._run, args=(clone,), name="beats", daemon=True).start()

    def stop(self) -> None:
        """Stop sending and hearing beats."""
        self._stopped.set()

    def ahead_s(self, node: int) -> float:
        """Return how many seconds this node's clock is ahead of that of ``node``; 0 where both may show the same."""
        least_s = self._least_s.get(node, 0.0)  # and what that beat took to be heard
        return 0.0 if -0.5 * BEAT_S < least_s < _BUSY_S else least_s

    def _run(self, store: Store) -> None:
        limit_s, heard, due = silence_limit(), dict[int, tuple[bytes, float]](), time.monotonic()
        with contextlib.suppress(RuntimeError):  # the store is gone; the agent sees it as well
            while True:
                now = time.monotonic()
                if now > due + _BUSY_S:  # this process was suspended, or busy: its own silence says nothing
                    heard = {}
                due = now + BEAT_S
                beat(store, self._node)
                for node, host in self._others.items():
                    last = store.get(f"beat/{node}")
                    if last != heard.get(node, (b"", 0.0))[0]:
                        heard[node] = last, now
                        self._least_s[node] = min(self._least_s.get(node, float("inf")), time.time() - float(last))
                    elif now - heard[node][1] > limit_s:
                        self.silent.add(node)
                        if not store.check([f"ended/{node}"]):
                            store.compare_set(
                                "over", "", f"host {host} (node {node}) has not been heard for {limit_s:g} s"
                            )
                if self._stopped.wait(BEAT_S):
                    return
