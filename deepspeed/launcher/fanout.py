"""Start a job on other hosts: one launcher per node through ssh, or the one process of a backend (mpirun, srun, pdsh).

The output of launchers is shown; among themselves they talk as ``node.hub`` says. The ssh connection is the life line
both ways: a launcher whose input ends stops its ranks at once, so no node keeps running after this command, however it
dies; and an ssh that ends before the verdict ends the job.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, BinaryIO

from deepspeed.errors import UsageError
from deepspeed.launcher.job import Job
from deepspeed.launcher.machine import own_address
from deepspeed.launcher.node.loop import BEAT, MARK, PAUSE, EventLoop, Message, Post, join_limit, signals_to
from deepspeed.launcher.node.ranks import Guard
from deepspeed.launcher.node.verdict import LOST_HOST_STATUS, Verdict, interrupted, lost, shell_status
from deepspeed.launcher.runners import RUNNERS, RunnerCommand, ssh_command, ssh_prefix, ssh_words
from deepspeed.monitor.log import logger
from deepspeed.monitor.program import BAD_INPUT

_CHECKS_AT_A_TIME = 64  # each costs three file descriptors, and 1024 is a usual limit
_SSH_FAILED = 255  # what ssh itself ends with; every other status is the remote command's
_FAREWELL_S = 3.0  # how long nodes may take to end by themselves after the verdict
_STOP_S = 5.0  # the same where they have yet to stop their ranks, and of a backend after a second signal
_LAST_WORDS = 1000  # characters of them, in a message
_TRY_AGAIN_S = 5.0  # between attempts to reach a host that an elastic job has lost
_MAX_LINE_BYTES = 1 << 16


class FrameReader:
    """Split one stream of a node into output, with ``prefix`` before every line, and frames.

    A line ends with a newline or, as in progress bars, a carriage return; half a line is shown only if it is very long.
    """

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix
        self._rest = b""

    def feed(self, data: bytes) -> tuple[bytes, list[Message]]:
        """Return the complete lines, and the frames."""
        lines = (self._rest + data).splitlines(keepends=True)
        # A carriage return at the very end may yet get its newline.
        rest = lines.pop() if lines and not lines[-1].endswith(b"\n") else b""
        output: list[bytes] = []
        frames: list[Message] = []
        head = b""
        for line in lines:
            before, mark, text = (head + line).rpartition(MARK)
            frame = None
            with contextlib.suppress(ValueError):
                frame = json.loads(text) if mark else None
            if isinstance(frame, dict) and "kind" in frame:
                frames.append(frame)
                head = before  # the line that the frame came amid goes on
            else:
                output.append(self._prefix + head + line)
                head = b""
        self._rest = head + rest
        if len(self._rest) > _MAX_LINE_BYTES and MARK[:1] not in self._rest:
            output.append(self.end())
        return b"".join(output), frames

    def end(self) -> bytes:
        """Return the last line, if it had no end."""
        rest, self._rest = self._rest, b""
        return self._prefix + rest + b"\n" if rest else b""


class Connection:
    """Run one ssh child: show its output; post its messages and its end as events. UsageError if it cannot start."""

    def __init__(
        self, rank: int, host: str, argv: Sequence[str], post: Post, *, prefix: bytes, drain_s: float | None = 1.0
    ) -> None:
        self.rank, self.host = rank, host
        self._drain_s = drain_s  # how long its output may take after its end
        self.joined = False
        self.last_words = ""  # the last line of its standard error
        self._post, self._prefix = post, prefix
        pipe = subprocess.PIPE
        try:
            # Its own session: Ctrl-C in the terminal must not end the connection over which it is to be passed on.
            self._process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
        except OSError as error:
            hint = "install an ssh client, or name another program in DS_SSH"
            raise UsageError(f"cannot start {argv[0]}: {error.strerror}; {hint}") from error
        assert self._process.stdin is not None
        self._input = self._process.stdin
        streams = ((self._process.stdout, sys.stdout.buffer), (self._process.stderr, sys.stderr.buffer))
        self._readers = [threading.Thread(target=self._copy, args=pair, daemon=True) for pair in streams]
        for thread in (*self._readers, threading.Thread(target=self._wait, daemon=True)):
            thread.start()

    def order(self, words: Sequence[Any]) -> None:
        """Send one event, or a beat; the loss of a node is noticed elsewhere."""
        with contextlib.suppress(OSError, ValueError):
            self._input.write(json.dumps(words).encode() + b"\n")
            self._input.flush()

    def hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self._input.close()

    def cut(self) -> None:
        """Kill the connection and the processes that depend on it."""
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
            output, messages = reader.feed(chunk)
            for message in messages:
                self._post("message", self.rank, message)
            if source is self._process.stderr and (words := output.decode(errors="replace").strip()):
                self.last_words = words.splitlines()[-1].removeprefix(self._prefix.decode())[-_LAST_WORDS:]
            self._write(target, output)
        self._write(target, reader.end())
        source.close()

    def _write(self, target: BinaryIO, data: bytes) -> None:
        try:
            if data:
                # One write per piece: the lines of several hosts never mix.
                target.write(data)
                target.flush()
        except (OSError, ValueError):
            self._post("deaf")


class FanOut(EventLoop):
    """Run ``commands`` (one ssh command line per host, in node-rank order) as one job."""

    def __init__(self, hosts: Sequence[str], commands: Sequence[Sequence[str]], *, grace_s: float) -> None:
        """Set ``grace_s``, the seconds that the ranks may take to end after a signal."""
        super().__init__()
        self.grace_s = grace_s
        self._hosts, self._commands = tuple(hosts), tuple(commands)
        self._nodes: list[Connection] = []
        self._running: set[int] = set()
        self._waited_s = 0.0
        self._verdict: Verdict | None = None
        self._interrupted: Verdict | None = None  # holds where no node has one

    def run(self) -> Verdict:
        """Start all nodes and return the verdict on the job. Raises UsageError when ssh cannot be started."""
        try:
            with signals_to(lambda number: self.post("signal", number), signal.SIGTSTP, signal.SIGUSR1):
                for rank, (host, argv) in enumerate(zip(self._hosts, self._commands, strict=True)):
                    prefix = f"{host}: ".encode() if len(self._hosts) > 1 else b""
                    self._nodes.append(Connection(rank, host, argv, self.post, prefix=prefix))
                    self._running.add(rank)
                while self._running:
                    self.handle_next()
        finally:
            for node in self._nodes:
                node.cut()
        verdict = self._verdict or self._interrupted
        assert verdict is not None
        return verdict

    def _on_tick(self) -> None:
        self._waited_s += self.tick_s
        for node in self._nodes:
            node.order(BEAT)
        absent = ", ".join(node.host for node in self._nodes if not node.joined)
        if absent and self._waited_s > join_limit():
            self._decide(Verdict(1, f"deepspeed: no launcher on {absent} joined within {join_limit():g} s\n"))

    def _on_message(self, rank: int, message: Message) -> None:
        self._nodes[rank].joined = True
        if message["kind"] == "verdict":
            self._decide(Verdict(message["status"], message["text"]), hang_up=False)
        elif "port" in message:
            for node in self._nodes:
                node.order(["port", message["port"]])

    def _on_ended(self, rank: int, status: int) -> None:
        self._running.discard(rank)
        node = self._nodes[rank]
        words = f'; its last words: "{node.last_words}"' if node.last_words else ""
        why = f"its command ended with status {status}{words}"
        if self._interrupted is not None:
            return
        if node.joined:
            self._decide(lost(node.host, rank, f"closed its connection: {why}"))
        else:
            failure = "cannot be reached" if status == _SSH_FAILED else "could not start its launcher"
            # A launcher that refuses its command line or its port ends with the status for that, which stays so.
            own_status = BAD_INPUT if status == BAD_INPUT else LOST_HOST_STATUS
            self._decide(Verdict(own_status, f"deepspeed: host {node.host} (node {rank}) {failure}: {why}\n"))

    def _decide(self, verdict: Verdict, *, hang_up: bool = True) -> None:
        """Keep the first verdict and give the nodes time to end; ``hang_up``: tell nodes that do not know it yet."""
        if self._verdict is not None:
            return
        self._verdict, self.deadline = verdict, time.monotonic() + (_STOP_S if hang_up else _FAREWELL_S)
        for node in self._nodes if hang_up else ():
            node.hang_up()
            if not node.joined:
                node.cut()

    def _on_signal(self, number: int) -> None:
        if number != signal.SIGTSTP:
            super()._on_signal(number)
            return
        for node in self._nodes:
            node.order(PAUSE)
        os.kill(os.getpid(), signal.SIGSTOP)

    def _on_deaf(self) -> None:
        # Nobody reads this command's output any more: the end of a command whose pipe has closed.
        self._on_interrupt(signal.SIGPIPE, immediate=True)

    def _on_interrupt(self, number: int, immediate: bool) -> None:  # noqa: FBT001 - a value of an event
        if self._verdict is None:
            self._interrupted = self._interrupted or interrupted(number)
            self.deadline = time.monotonic() + _STOP_S + (0.0 if immediate else self.grace_s)
        for node in self._nodes:
            node.order(["interrupt", number, immediate])
            if not node.joined:
                node.cut()

    def _on_deadline(self) -> None:
        """Cut off nodes that have not ended by themselves, which ends the launchers behind them."""
        for rank in self._running:
            self._nodes[rank].cut()


class ElasticFanOut(FanOut):
    """Run an elastic job over ssh: a lost host is tried again and again, while ``least`` others go on."""

    def __init__(self, hosts: Sequence[str], commands: Sequence[Sequence[str]], *, grace_s: float, least: int) -> None:
        super().__init__(hosts, commands, grace_s=grace_s)
        self._least = least
        self._again: dict[int, float] = {}  # host -> when to start its launcher again

    def _on_tick(self) -> None:
        for node in self._nodes:
            node.order(BEAT)
        for rank, when in list(self._again.items()):
            if time.monotonic() > when and self._verdict is None and self._interrupted is None:
                del self._again[rank]
                prefix = f"{self._hosts[rank]}: ".encode()
                self._nodes[rank] = Connection(rank, self._hosts[rank], self._commands[rank], self.post, prefix=prefix)
                self._running.add(rank)

    def _on_ended(self, rank: int, status: int) -> None:
        if self._verdict is None and self._interrupted is None and len(self._running) > self._least:
            self._running.discard(rank)
            if self._nodes[rank].joined:
                logger.warning("host %s is lost (%s); trying it again", self._hosts[rank], self._nodes[rank].last_words)
            self._again[rank] = time.monotonic() + _TRY_AGAIN_S
        else:
            super()._on_ended(rank, status)


def _elastic_nodes(job: Job, options: Namespace) -> tuple[ElasticFanOut, object]:
    """Make the nodes, and the store in which they meet, in this command's process, so that any host may be lost."""
    from deepspeed.launcher.node.hub import bind_store  # noqa: PLC0415 - needs torch, as no other job over ssh does

    limits = job.elastic
    assert limits is not None
    address = options.master_addr or own_address(job.hosts[0].rpartition("@")[2])
    store = bind_store(address, job.master_port)
    job = replace(job, master_addr=address, master_port=store.port)
    commands = [ssh_command(job, rank, options) for rank in range(len(job.hosts))]
    return ElasticFanOut(job.hosts, commands, grace_s=job.signal_grace, least=limits.min_nodes), store


def run_over_ssh(job: Job, options: Namespace) -> int:
    """Run ``job`` on all its hosts through ssh and return its exit status; the verdict is the last text shown.

    1 when a host cannot be reached or cannot start its launcher. Raises UsageError when ssh cannot be started.
    """
    if job.elastic is not None:
        nodes, store = _elastic_nodes(job, options)
        verdict = nodes.run()
        del store
    else:
        commands = [ssh_command(job, rank, options) for rank in range(len(job.hosts))]
        verdict = FanOut(job.hosts, commands, grace_s=job.signal_grace).run()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.write(verdict.text)
        sys.stderr.flush()
    return verdict.status


def run_backend(command: RunnerCommand) -> int:
    """Run ``command`` and return its exit status, 128 + S when signal S ended it, or made it or this process fail.

    Signals that end a job are passed on; after a second one the backend has 5 s before it is killed. When this process
    is killed the backend is ended too. Raises UsageError when the program cannot be started.
    """
    received: list[signal.Signals] = []
    with contextlib.ExitStack() as stack:
        guardian = Guard()
        stack.callback(guardian.dismiss)
        # Before there is a backend, which would outlive a signal that comes in between.
        stack.enter_context(signals_to(received.append))
        try:
            # Its own session, so that Ctrl-C in the terminal reaches it once, from here. The guard knows it before it
            # runs, or this process could be killed in between.
            child = subprocess.Popen(
                command.argv,
                env={**os.environ, **command.env},
                start_new_session=True,
                preexec_fn=lambda: guardian.watch(os.getpid()),
            )
        except OSError as error:
            raise UsageError(f"cannot start {command.argv[0]}: {error.strerror}") from error
        passed_on, deadline = 0, float("inf")
        while (status := child.poll()) is None:
            numbers = received[passed_on:]
            passed_on += len(numbers)
            if passed_on > 1:
                deadline = min(deadline, time.monotonic() + _STOP_S)
            if time.monotonic() > deadline:
                numbers = [signal.SIGKILL]
            for number in numbers:
                # To the group, as from a terminal: mpirun may be a script, which would not pass it on.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(child.pid, number)
            time.sleep(0.05)
    return 128 + received[0] if received and status != 0 else shell_status(status)


def _unreachable(host: str, options: Namespace) -> str | None:
    """Return why ``host`` cannot be reached; None when it can."""
    command = [*ssh_prefix(options.ssh, host, *ssh_words(options), connect_timeout_s=5), "true"]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=10)
    except (subprocess.TimeoutExpired, OSError) as error:
        return str(error)
    lines = done.stderr.decode(errors="replace").strip().splitlines() or [f"ssh ended with status {done.returncode}"]
    return lines[0].strip() if done.returncode else None


def check_reachable(hosts: Sequence[str], options: Namespace) -> None:
    """Run ``true`` on all ``hosts`` at once. Raises UsageError naming those not reached, with ssh's first words."""
    with ThreadPoolExecutor(max_workers=min(len(hosts), _CHECKS_AT_A_TIME)) as threads:
        answers = threads.map(lambda host: _unreachable(host, options), hosts)
        failed = [(host, why) for host, why in zip(hosts, answers, strict=True) if why is not None]
    if failed:
        (first, why), *more = failed
        rest = f" (nor are {len(more)} more: {', '.join(host for host, _ in more[:5])})" if more else ""
        raise UsageError(
            f"host {first} cannot be reached: \"{why}\"{rest}; make '{' '.join(options.ssh)} {first} true' work "
            "without a password, or skip this test with --no_ssh_check"
        )


def check_programs(options: Namespace) -> None:
    """Raise UsageError when a program of the runner is not installed here, or is another backend's."""
    runner = RUNNERS[options.launcher]
    for program in (options.ssh[0],) if options.launcher == "ssh" else runner.programs:
        if shutil.which(program) is None:
            raise UsageError(
                f"--launcher {options.launcher} needs the program {program!r}, which is not on PATH; install "
                f"{runner.install}, or choose another --launcher"
            )
    if options.launcher == "mvapich":
        done = subprocess.run(["mpiname"], stdin=subprocess.DEVNULL, capture_output=True)
        name = done.stdout.decode(errors="replace").strip()[:80]
        if "MVAPICH" not in name.upper():
            raise UsageError(f"the mpiname on PATH reports {name!r}, which is not MVAPICH; put MVAPICH first on PATH")
