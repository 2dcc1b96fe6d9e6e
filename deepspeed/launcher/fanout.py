"""Starts one launcher per node through ssh, shows their output, and is the place that hears all nodes; see ``hub``.

The connection is the life line both ways: a launcher whose input ends stops its ranks at once, so no node keeps running
after this command, however it dies; and an ssh that ends, or brings no sign of life, ends the job.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import BinaryIO

from deepspeed.errors import UsageError
from deepspeed.launcher.job import USAGE_STATUS, Job
from deepspeed.launcher.node.hub import SIGNAL_GRACE_S, Hub, Message
from deepspeed.launcher.node.links import BEAT, PAUSE, TICK_S, EventLoop, FrameReader, Post, Silence
from deepspeed.launcher.node.member import say_that_ranks_may_end
from deepspeed.launcher.node.ranks import signals_to
from deepspeed.launcher.node.verdict import LOST_HOST_STATUS, Verdict
from deepspeed.launcher.runners import RunnerOptions, ssh_command

_SSH_FAILED = 255  # what ssh itself ends with; every other status is the remote command's
_FAREWELL_S = 8.0  # how long nodes may take to end by themselves after the verdict
_LAST_WORDS_BYTES = 1000


class Connection:
    """One ssh child: its output goes to this process's, its messages and its end become events."""

    def __init__(
        self, rank: int, host: str, argv: Sequence[str], post: Post, *, prefix: bytes, drain_s: float | None = 1.0
    ) -> None:
        self.rank, self.host = rank, host
        self._drain_s = drain_s  # how long its output may take after its end
        self.joined = False
        self.silence = Silence()
        self._tail = b""
        self._post = post
        self._prefix = prefix
        pipe = subprocess.PIPE
        # Its own session: Ctrl-C in the terminal must not end the connection over which it is to be passed on.
        self._process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
        streams = ((self._process.stdout, sys.stdout.buffer), (self._process.stderr, sys.stderr.buffer))
        self._readers = [threading.Thread(target=self._copy, args=pair, daemon=True) for pair in streams]
        for thread in (*self._readers, threading.Thread(target=self._wait, daemon=True)):
            thread.start()

    def order(self, message: Message) -> None:
        """Send one message; a node that is gone is noticed elsewhere."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()

    def hang_up(self) -> None:
        """Close its input."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def cut(self) -> None:
        """End the connection, and what hangs on it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _wait(self) -> None:
        status = self._process.wait()
        self.hang_up()
        for thread in self._readers:
            thread.join(self._drain_s)  # a shared ssh connection may keep the pipes open for ever
        self._post("ended", self.rank, status)

    def _copy(self, source: BinaryIO, target: BinaryIO) -> None:
        reader = FrameReader(self._prefix)
        while chunk := os.read(source.fileno(), 65536):
            self.silence.broken(ticks=float("-inf"))  # while this thread waits for the terminal nobody can be heard
            output, messages = reader.feed(chunk)
            for message in messages:
                self._post("message", self.rank, message)
            if source is self._process.stderr:
                self._tail = (self._tail + output)[-_LAST_WORDS_BYTES:]
            self._write(target, output)
            self.silence.broken()
        self._write(target, reader.end())
        source.close()

    @property
    def last_words(self) -> str:
        """The last line of its standard error that is not empty, for a message."""
        lines = [line.strip() for line in self._tail.decode(errors="replace").splitlines() if line.strip()]
        return f'; its last words: "{lines[-1].removeprefix(self._prefix.decode())}"' if lines else ""

    def _write(self, target: BinaryIO, data: bytes) -> None:
        try:
            if data:
                # One write per piece: the lines of several hosts never mix.
                target.write(data)
                target.flush()
        except (OSError, ValueError):
            self._post("deaf")


class FanOut(EventLoop):
    """Runs ``commands`` (one ssh command line per host, in node-rank order) as one job."""

    def __init__(self, hosts: Sequence[str], commands: Sequence[Sequence[str]], *, show_traceback: bool) -> None:
        super().__init__()
        self._hosts, self._commands = tuple(hosts), tuple(commands)
        self._nodes: list[Connection] = []
        self._running: set[int] = set()
        self._signalled = self._parting = False
        self._ticks = 0
        self._hub = Hub(hosts, lambda rank, message: self._nodes[rank].order(message), show_traceback=show_traceback)

    def run(self) -> Verdict:
        """Start all nodes and return the verdict on the job."""
        try:
            with signals_to(lambda number: self.post("signal", number), "SIGTSTP"):
                self._start()
                while self._running:
                    self.handle_next()
                    if self._hub.verdict is not None:
                        self._part()
        finally:
            for node in self._nodes:
                node.cut()
        assert self._hub.verdict is not None
        return self._hub.verdict

    def _start(self) -> None:
        for rank, (host, argv) in enumerate(zip(self._hosts, self._commands, strict=True)):
            prefix = f"{host}: ".encode() if len(self._hosts) > 1 else b""
            try:
                self._nodes.append(Connection(rank, host, argv, self.post, prefix=prefix))
            except OSError as error:
                raise UsageError(
                    f"cannot start {argv[0]}: {error.strerror}; install ssh, or name another program in DS_SSH"
                ) from error
            self._running.add(rank)

    def _part(self) -> None:
        """After the verdict: give the nodes time to end, and cut off those that nobody has reached yet."""
        if not self._parting:
            self._parting = True
            self.deadline = time.monotonic() + _FAREWELL_S
            for node in self._nodes:
                if not node.joined:
                    node.cut()

    def _on_tick(self) -> None:
        self._ticks += 1
        self._hub.watch_joining(self._ticks * TICK_S)
        for node in self._nodes:
            node.order(BEAT)
            if node.joined and node.silence.grows():
                how = f"has not been heard for {node.silence.limit_s:g} s"
                self._hub.lose(node.rank, last_heard=node.silence.last_heard, how=how)
                node.cut()

    def _on_message(self, rank: int, message: Message) -> None:
        node = self._nodes[rank]
        node.joined = node.joined or message["kind"] == "join"
        self._hub.handle(rank, message)

    def _on_ended(self, rank: int, status: int) -> None:
        self._running.discard(rank)
        node = self._nodes[rank]
        why = f"its command ended with status {status}{node.last_words}"
        if node.joined:
            self._hub.lose(rank, last_heard=node.silence.last_heard, how=f"closed its connection: {why}")
        else:
            what = "cannot be reached" if status == _SSH_FAILED else "could not start its launcher"
            # A launcher that refuses its command line or its port ends with the status for that, which stays so.
            own_status = USAGE_STATUS if status == USAGE_STATUS else LOST_HOST_STATUS
            self._hub.end(Verdict(own_status, f"deepspeed: host {node.host} (node {rank}) {what}: {why}\n"))

    def _on_signal(self, number: signal.Signals) -> None:
        if number == signal.SIGTSTP:
            for node in self._nodes:
                node.order(PAUSE)
            os.kill(os.getpid(), signal.SIGSTOP)
            return
        if not self._signalled:
            say_that_ranks_may_end(number)
        self._interrupt(number, immediate=self._signalled)
        self._signalled = True

    def _on_deaf(self) -> None:
        # Nobody reads this command's output any more: the end of a command whose pipe has closed.
        self._interrupt(signal.SIGPIPE, immediate=True)

    def _interrupt(self, number: signal.Signals, *, immediate: bool) -> None:
        self._hub.interrupt(number, immediate=immediate)
        self.deadline = time.monotonic() + _FAREWELL_S + (0.0 if immediate else SIGNAL_GRACE_S)

    def _on_deadline(self) -> None:
        """What has not ended by itself is cut off, which ends the launchers behind it."""
        for rank in self._running:
            self._nodes[rank].cut()


def run_over_ssh(job: Job, *, options: RunnerOptions) -> int:
    """Run ``job`` on all its hosts through ssh and return its exit status; the verdict is the last text shown.

    1 when a host cannot be reached or cannot start its launcher. Raises UsageError when ssh cannot be started.
    """
    commands = [ssh_command(job, rank, options=options) for rank in range(len(job.hosts))]
    verdict = FanOut(job.hosts, commands, show_traceback=job.world_size > 1).run()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.write(verdict.text)
        sys.stderr.flush()
    return verdict.status
