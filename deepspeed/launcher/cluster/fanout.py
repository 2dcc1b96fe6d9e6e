"""Starts one launcher per node through ssh, shows their output, and passes signals on; see ``frames`` for how they
talk.

The connection is the life line both ways: a launcher whose input ends stops its ranks at once, so no node keeps running
after this command, however it dies; and an ssh that ends ends the job.
"""

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, BinaryIO

from deepspeed.errors import UsageError
from deepspeed.launcher.cluster.frames import LIFELINE, FrameFilter, LinePrefixer
from deepspeed.launcher.cluster.hub import SIGNAL_GRACE_S
from deepspeed.launcher.cluster.runners import RunnerOptions, ssh_command
from deepspeed.launcher.job import Job
from deepspeed.launcher.node.interrupts import signals_to
from deepspeed.launcher.node.verdict import LOST_HOST_STATUS, Verdict

_SSH_FAILED = 255  # what ssh itself ends with; every other status is the remote command's
USAGE_STATUS = 2
_FAREWELL_S = 8.0  # how long nodes may take to end by themselves after one of them did
_DRAIN_S = 1.0
_LAST_WORDS_BYTES = 1000

_Event = tuple[str, int, Any]


class _Node:
    """One ssh child: its output goes to this process's, its frames and its end to ``events``."""

    def __init__(
        self, rank: int, host: str, argv: Sequence[str], events: "queue.SimpleQueue[_Event]", *, prefix: bytes
    ) -> None:
        self.rank, self.host = rank, host
        self.answered = self.joined = False
        self.verdict: Verdict | None = None
        self._tail = b""
        self._events = events
        self._prefix = prefix
        # Its own session: Ctrl-C in the terminal must not end the connection over which it is to be passed on.
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
        self.order(LIFELINE)
        streams = ((self._process.stdout, sys.stdout.buffer), (self._process.stderr, sys.stderr.buffer))
        self._readers = [threading.Thread(target=self._copy, args=pair, daemon=True) for pair in streams]
        for thread in (*self._readers, threading.Thread(target=self._wait, daemon=True)):
            thread.start()

    def order(self, line: str) -> None:
        """Send one order; a node that is gone is noticed elsewhere."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()

    def end(self) -> None:
        """End the connection, and what hangs on it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _wait(self) -> None:
        status = self._process.wait()
        for thread in self._readers:
            thread.join(_DRAIN_S)  # a shared ssh connection may keep the pipes open for ever
        self._events.put(("ended", self.rank, status))

    def _copy(self, source: BinaryIO, target: BinaryIO) -> None:
        frames, lines = FrameFilter(), LinePrefixer(self._prefix)
        while chunk := os.read(source.fileno(), 65536):
            output, found = frames.feed(chunk)
            for frame in found:
                self._events.put(("frame", self.rank, frame))
            if source is self._process.stderr:
                self._remember(output)
            self._write(target, lines.feed(output))
        self._write(target, lines.feed(frames.end()) + lines.end())

    def _remember(self, output: bytes) -> None:
        self._tail = (self._tail + output)[-_LAST_WORDS_BYTES:]

    @property
    def last_words(self) -> str:
        """The last line of its standard error that is not empty."""
        return next(
            (line for line in reversed(self._tail.decode(errors="replace").splitlines()) if line.strip()), ""
        ).strip()

    def _write(self, target: BinaryIO, data: bytes) -> None:
        try:
            if data:
                # One write per piece: the lines of several hosts never mix.
                target.write(data)
                target.flush()
        except (OSError, ValueError):
            self._events.put(("deaf", self.rank, None))


class FanOut:
    """Runs ``commands`` (one ssh command line per host, in node-rank order) as one job."""

    def __init__(self, hosts: Sequence[str], commands: Sequence[Sequence[str]], *, port_known: bool) -> None:
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()  # its put may be called from a signal handler
        self._hosts, self._commands = tuple(hosts), tuple(commands)
        self._port_known = port_known
        self._nodes: list[_Node] = []
        self._running: set[int] = set()
        self._received: signal.Signals | None = None
        self._again = False
        self._problem: Verdict | None = None
        self._deadline: float | None = None

    def run(self) -> Verdict:
        """Start all nodes and return the verdict of node 0, or of the first node that has one, or on what kept them
        from it.
        """
        try:
            with signals_to(lambda number: self._events.put(("signal", 0, number))):
                self._start()
                while self._running:
                    self._step()
        finally:
            for node in self._nodes:
                node.end()
        verdicts = [node.verdict for node in self._nodes if node.verdict is not None]
        if self._problem is not None:
            return self._problem
        if verdicts:
            return verdicts[0]
        assert self._received is not None, "without a verdict, a problem or a signal no job ends"
        return Verdict(128 + self._received)

    def _start(self) -> None:
        program = self._commands[0][0]
        for rank, (host, argv) in enumerate(zip(self._hosts, self._commands, strict=True)):
            prefix = f"{host}: ".encode() if len(self._hosts) > 1 else b""
            try:
                self._nodes.append(_Node(rank, host, argv, self._events, prefix=prefix))
            except OSError as error:
                raise UsageError(
                    f"cannot start {program}: {error.strerror}; install ssh, or name another program in DS_SSH"
                ) from error
            self._running.add(rank)

    def _step(self) -> None:
        try:
            patience = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
            kind, rank, value = self._events.get(timeout=patience)
        except queue.Empty:
            self._too_late()
            return
        if kind == "frame":
            self._frame(self._nodes[rank], value)
        elif kind == "ended":
            self._running.discard(rank)
            self._ended(self._nodes[rank], value)
        elif kind == "signal":
            self._signal(value)
        elif kind == "deaf" and self._received is None:
            # Nobody reads this command's output any more: the end of a command whose pipe has closed.
            self._received = signal.SIGPIPE
            self._kill()

    def _frame(self, node: _Node, frame: dict[str, Any]) -> None:
        node.answered = True
        if frame["event"] == "port" and not self._port_known:
            for other in self._nodes[1:]:
                other.order(f"port {frame['port']}")
        elif frame["event"] == "joined":
            node.joined = True
        elif frame["event"] == "verdict":
            node.verdict = Verdict(int(frame["status"]), str(frame["text"]))
            self._expect_end(_FAREWELL_S)

    def _ended(self, node: _Node, status: int) -> None:
        if node.verdict is not None or self._received is not None or any(other.verdict for other in self._nodes):
            self._expect_end(_FAREWELL_S)
        elif node.joined:
            # The other launchers notice it too, and their verdict may know more.
            self._expect_end(_FAREWELL_S)
            if not self._running:
                self._problem = Verdict(LOST_HOST_STATUS, self._describe(node, status, "ended"))
        elif self._problem is None:
            what = "cannot be reached" if status == _SSH_FAILED else "could not start its launcher"
            # A launcher that refuses its command line or its port ends with the status for that, which stays so.
            own = USAGE_STATUS if status == USAGE_STATUS else LOST_HOST_STATUS
            self._problem = Verdict(own, self._describe(node, status, what))
            self._kill()

    def _describe(self, node: _Node, status: int, what: str) -> str:
        said = f'; its last words: "{node.last_words}"' if node.last_words else ""
        return f"deepspeed: host {node.host} (node {node.rank}) {what}: its command ended with status {status}{said}\n"

    def _signal(self, number: signal.Signals) -> None:
        if self._received is None:
            self._received = number
            sys.stderr.write(
                f"deepspeed: {number.name} received; waiting up to {SIGNAL_GRACE_S:g} s for the ranks to end\n"
            )
            sys.stderr.flush()
            for node in self._nodes:
                node.order(f"signal {number.name}")
            self._expect_end(SIGNAL_GRACE_S + _FAREWELL_S)
        else:
            self._kill()

    def _kill(self) -> None:
        for node in self._nodes:
            if node.answered:
                node.order("kill")
            else:
                node.end()  # nobody is there yet to read an order
        self._deadline = None
        self._expect_end(_FAREWELL_S)

    def _expect_end(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        self._deadline = deadline if self._deadline is None else min(deadline, self._deadline)

    def _too_late(self) -> None:
        """What has not ended by itself is cut off, which ends the launchers behind it."""
        self._deadline = None
        left = [self._nodes[rank].host for rank in sorted(self._running)]
        if not any(node.verdict for node in self._nodes) and self._problem is None and self._received is None:
            text = f"deepspeed: a host was lost, and {', '.join(left)} did not answer; all connections have been cut\n"
            self._problem = Verdict(LOST_HOST_STATUS, text)
        for rank in self._running:
            self._nodes[rank].end()


def run_over_ssh(job: Job, *, options: RunnerOptions) -> int:
    """Run ``job`` on all its hosts through ssh and return its exit status; the verdict is the last text on the
    terminal.

    Statuses are those of ``node.run_node``; 1 also
    when a host cannot be reached or cannot start its launcher, 130 after Ctrl-C. Raises UsageError when ssh cannot be
    started.
    """
    commands = [ssh_command(job, rank, options=options) for rank in range(len(job.hosts))]
    verdict = FanOut(job.hosts, commands, port_known=job.master_port != 0).run()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.write(verdict.text)
        sys.stderr.flush()
    return verdict.status
