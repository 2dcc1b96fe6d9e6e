"""What is known about the whole job in the one place that hears all nodes: who has joined, what failed, the verdict.

That place is the ``deepspeed`` command where it reaches the nodes over ssh, and the launcher of node 0 everywhere else.
Messages are dictionaries with a ``kind``:

    node -> hub   join (node 0: port and run_id of the store), failed, signal (number, immediate), report (ends)
    hub -> node   go (port, run_id), stop (signal, grace), verdict (status, text)

A job ends in one way: the hub tells everyone to stop (unless all ranks returned 0), waits for the report of every node
that is still there, decides which failure came first, and tells the verdict to all.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from deepspeed.errors import UsageError
from deepspeed.launcher.node.verdict import HostLoss, RankEnd, Verdict, judge, signal_name
from deepspeed.observe.log import logger

FAILURE_GRACE_S = 2.0  # how long survivors of a failed rank may take to end
LOSS_GRACE_S = 1.0  # the same after a lost host, which took the silence limit to be noticed
SAY_AFTER_S = 5.0
SIGNAL_GRACE_S = 10.0  # how long all ranks may take after Ctrl-C or SIGTERM; a second signal ends them at once

Message = Mapping[str, Any]


def seconds_from(variable: str, default: float) -> float:
    """A positive number of seconds from the environment. Raises UsageError for anything else."""
    text = os.environ.get(variable)
    try:
        seconds = float(text) if text else default
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise UsageError(f"{variable}={text} is not a number of seconds; unset it for {default:g}")
    return seconds


def silence_limit() -> float:
    """Seconds without a sign of life after which a node counts as lost."""
    return seconds_from("DS_HOST_TIMEOUT_S", 10.0)


def join_limit() -> float:
    """Seconds that the nodes of one job wait for each other: people and schedulers start them minutes apart."""
    return seconds_from("DS_JOIN_TIMEOUT_S", 300.0)


class Hub:
    """Thread-safe state of one job; ``send(node_rank, message)`` must not block for long and must not raise.

    ``verdict`` is None until the job is decided; ``present`` are the nodes that take part and have not been lost.
    """

    def __init__(self, hosts: Sequence[str], send: Callable[[int, Message], None], *, show_traceback: bool) -> None:
        self._hosts = tuple(hosts)
        self._send = send
        self._show_traceback = show_traceback
        self._lock = threading.RLock()
        self._started = self._stopped = False
        self._meeting_point: Message = {}
        self._cause: Verdict | None = None  # set when something other than a rank or a host ended the job
        self._ends: dict[int, list[RankEnd]] = {}
        self._losses: list[HostLoss] = []
        self.present: set[int] = set()
        self.verdict: Verdict | None = None

    def missing(self) -> list[str]:
        """Hosts that the job still waits for before it starts."""
        waits = not (self._started or self._stopped)
        return [host for node, host in enumerate(self._hosts) if waits and node not in self.present]

    def watch_joining(self, waited_s: float) -> None:
        """Called at every tick: say after a while for whom the job waits, and give it up after the limit."""
        if not (missing := self.missing()):
            return
        limit, hosts = join_limit(), ", ".join(missing)
        if waited_s == SAY_AFTER_S:
            logger.info("waiting up to %g s for the launchers on %s", limit, hosts)
        if waited_s >= limit:
            text = f"deepspeed: no launcher on {hosts} joined within {limit:g} s; no rank has been started\n"
            self.end(Verdict(1, text))

    def handle(self, node: int, message: Message) -> None:
        """Act on one message of a node."""
        with self._lock:
            kind = message["kind"]
            if kind == "join":
                self._join(node, message)
            elif kind == "failed":
                self._stop(signal.SIGTERM, FAILURE_GRACE_S)
            elif kind == "signal":
                self.interrupt(message["number"], immediate=message["immediate"])
            elif kind == "report":
                now, host = time.time(), self._hosts[node] if len(self._hosts) > 1 else ""
                self._ends[node] = [replace(RankEnd.from_message(end, now), host=host) for end in message["ends"]]
                self._decide_when_all_have_reported()

    def _join(self, node: int, message: Message) -> None:
        if self._stopped:
            self._send(node, {"kind": "verdict", "status": 1, "text": "deepspeed: the job has ended already\n"})
            return
        self.present.add(node)
        if node == 0:
            self._meeting_point = {"port": message["port"], "run_id": message["run_id"]}
        if len(self.present) == len(self._hosts):
            self._started = True
            self._tell_all({"kind": "go", **self._meeting_point})

    def lose(self, node: int, *, last_heard: float, how: str) -> None:
        """Node ``node`` is gone without having taken leave; ignored once the verdict is out."""
        with self._lock:
            if self.verdict is not None or node not in self.present:
                return
            self.present.remove(node)
            if node not in self._ends:  # otherwise it had said all before it went
                self._losses.append(HostLoss(self._hosts[node], node, last_heard, how))
                self._stop(signal.SIGTERM, LOSS_GRACE_S)
            self._decide_when_all_have_reported()

    def interrupt(self, number: int, *, immediate: bool) -> None:
        """Pass a signal that a launcher or the command was sent on to all ranks."""
        text = f"deepspeed: all ranks have been stopped after {signal_name(number)}\n"
        self.end(Verdict(128 + number, text), number=number, grace_s=0.0 if immediate else SIGNAL_GRACE_S)

    def end(self, cause: Verdict, *, number: int = signal.SIGTERM, grace_s: float = 0.0) -> None:
        """End the job with ``cause``, which is no rank's failure, unless it is ending already."""
        with self._lock:
            if not self._stopped:
                self._cause = cause
            self._stop(number, grace_s, again=grace_s == 0.0)

    def _stop(self, number: int, grace_s: float, *, again: bool = False) -> None:
        if not self._stopped or again:
            self._stopped = True
            self._tell_all({"kind": "stop", "signal": number, "grace": grace_s})
            self._decide_when_all_have_reported()

    def _decide_when_all_have_reported(self) -> None:
        if self.verdict is None and self.present <= self._ends.keys():
            ends = [end for node in sorted(self._ends) for end in self._ends[node]]
            self.verdict = self._cause or judge(ends, self._losses, show_traceback=self._show_traceback)
            self._tell_all({"kind": "verdict", "status": self.verdict.status, "text": self.verdict.text})

    def _tell_all(self, message: Message) -> None:
        for node in sorted(self.present, reverse=True):  # node 0 last: after its verdict the store goes
            self._send(node, message)
