"""What node 0's launcher knows about the whole job: who has joined, what failed, and when everybody has said all. No
sockets.

The launchers of all nodes, node 0's own among them, are *members*. Messages are dictionaries with a ``kind``:

    member -> hub   join, failed, signal (name, immediate), report (ends)
    hub -> member   go, stop (signal, grace), verdict (status, text)

A job ends in one way: the hub tells everyone to stop (unless all ranks returned 0), waits for the report of every
member that is still there, decides which failure came first, and tells the verdict to all.
"""

import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from deepspeed.launcher.node.verdict import HostLoss, RankEnd, Verdict, judge

FAILURE_GRACE_S = 2.0  # how long survivors of a failed rank may take to end
LOSS_GRACE_S = 1.0  # the same after a lost host, which took the silence limit to be noticed
SIGNAL_GRACE_S = 10.0  # how long all ranks may take after Ctrl-C or SIGTERM; a second signal ends them at once

Message = dict[str, Any]


class Hub:
    """Thread-safe state of one job; ``send(node_rank, message)`` must not block for long and must not raise."""

    def __init__(self, hosts: Sequence[str], send: Callable[[int, Message], None], *, show_traceback: bool) -> None:
        self._hosts = tuple(hosts)
        self._send = send
        self._show_traceback = show_traceback
        self._lock = threading.RLock()
        self._present: set[int] = set()
        self._started = self._stopped = self._decided = False
        self._cause: Verdict | None = None  # set when something other than a rank or a host ended the job
        self._ends: dict[int, list[RankEnd]] = {}
        self._losses: list[HostLoss] = []

    def missing(self) -> list[str]:
        """Hosts that have not joined yet."""
        with self._lock:
            return [] if self._started else [host for node, host in enumerate(self._hosts) if node not in self._present]

    def join(self, node: int) -> bool:
        """Take in the launcher of ``node``; false when it comes twice or too late."""
        with self._lock:
            if node in self._present or self._started or self._stopped:
                return False
            self._present.add(node)
            if len(self._present) == len(self._hosts):
                self._started = True
                self._tell_all({"kind": "go"})
            return True

    def handle(self, node: int, message: Mapping[str, Any]) -> None:
        """Act on one message of a member that has joined. Raises KeyError, TypeError or ValueError for a malformed
        one.
        """
        with self._lock:
            kind = message["kind"]
            if kind == "failed":
                self._stop(signal.SIGTERM, FAILURE_GRACE_S)
            elif kind == "signal":
                self._signalled(str(message["name"]), 0.0 if message["immediate"] else SIGNAL_GRACE_S)
            elif kind == "report":
                now = time.time()
                host = self._hosts[node] if len(self._hosts) > 1 else ""
                self._ends[node] = [replace(RankEnd.from_message(end, now), host=host) for end in message["ends"]]
                self._decide_when_all_said()

    def lose(self, node: int, *, last_heard: float, how: str) -> None:
        """The launcher of ``node`` is gone without having taken leave; ignored once the verdict is out."""
        with self._lock:
            if self._decided or node not in self._present:
                return
            self._present.remove(node)
            if node not in self._ends:  # otherwise it had said all before it went
                self._ends[node] = []
                self._losses.append(HostLoss(self._hosts[node], node, last_heard, how))
                self._stop(signal.SIGTERM, LOSS_GRACE_S)
            self._decide_when_all_said()

    def give_up(self, text: str) -> None:
        """End the job with status 1 and ``text`` because it never became complete."""
        with self._lock:
            if not (self._started or self._stopped):
                self._cause = Verdict(1, text)
                self._stop(signal.SIGTERM, 0.0)

    def _signalled(self, name: str, grace_s: float) -> None:
        number = signal.Signals[name]
        if not self._stopped:
            self._cause = Verdict(128 + number, f"deepspeed: all ranks have been stopped after {name}\n")
        if not self._stopped or grace_s == 0.0:
            self._stop(number, grace_s, again=True)

    def _stop(self, number: signal.Signals, grace_s: float, *, again: bool = False) -> None:
        if not self._stopped or again:
            self._stopped = True
            self._tell_all({"kind": "stop", "signal": number.name, "grace": grace_s})

    def _decide_when_all_said(self) -> None:
        if self._decided or not self._present <= self._ends.keys():
            return
        self._decided = True
        ends = [end for node in sorted(self._ends) for end in self._ends[node]]
        verdict = self._cause or judge(ends, self._losses, show_traceback=self._show_traceback)
        self._tell_all({"kind": "verdict", "status": verdict.status, "text": verdict.text})

    def _tell_all(self, message: Message) -> None:
        for node in sorted(self._present, reverse=True):  # node 0 last: after its verdict the hub itself goes
            self._send(node, message)
