"""The rank processes of one node: start, signal, kill, and how each ended.

Not built on torch's elastic agent: that reaps ranks in a way that loses which one failed first, gives survivors 30 s
after a failure, leaves the children of a dead rank alone, and raises exceptions out of signal handlers at any line.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from deepspeed.errors import UsageError
from deepspeed.launcher.node import guard
from deepspeed.launcher.node.verdict import RankEnd


@dataclass(frozen=True)
class RankCommand:
    """What starts one rank; ``rank`` is global, ``environment`` goes on top of this process's own."""

    rank: int
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    report_file: str


class Guard:
    """A small process that kills the ranks and removes ``paths`` if this process is killed; see ``guard.py``."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )
        for path in paths:
            self.watch("path", path)

    def watch(self, kind: str, value: int | str) -> None:
        """Add a ``path``, the process ``group`` of a rank, or that of a ``starter`` of ranks such as mpirun."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # somebody killed it; the job goes on without
            self._process.stdin.write(f"{kind} {value}\n")
            self._process.stdin.flush()

    def dismiss(self) -> None:
        """End it without effect."""
        self.watch("done", "")
        with contextlib.suppress(OSError):
            self._process.communicate()


@contextlib.contextmanager
def signals_to(receive: Callable[[signal.Signals], None], *more: str) -> Iterator[None]:
    """Within the block the signals that end a job, and ``more``, call ``receive``, which must be safe in a handler."""
    if threading.current_thread() is not threading.main_thread():
        yield  # a client's thread: its main thread keeps the signals
        return
    names = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", *more)
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        # Under nohup SIGHUP is ignored, and stays so.
        if number.name != "SIGHUP" or before[number] is not signal.SIG_IGN:
            signal.signal(number, lambda number, frame: receive(signal.Signals(number)))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Ranks:
    """One process per command, each the leader of its own process group; ``ended(index)`` is called from a thread.

    Raises UsageError when the machine gives no more processes; none is left then.
    """

    def __init__(
        self, commands: Sequence[RankCommand], guardian: Guard, ended: Callable[[int], None], *, stdin: int | None
    ) -> None:
        self._commands = tuple(commands)
        self._ends: dict[int, tuple[int, float]] = {}  # status and moment
        self._killed: set[int] = set()
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for command in self._commands:
                environment = {**os.environ, **command.environment}
                # Its own session, so that Ctrl-C in the terminal reaches only the launcher, which passes it on once.
                process = subprocess.Popen(command.argv, env=environment, stdin=stdin, start_new_session=True)
                self._processes.append(process)
                guardian.watch("group", process.pid)
        except OSError as error:
            self.kill_groups()
            raise UsageError(
                f"cannot start another process for a rank: {error.strerror}; look at ulimit -u and the free memory"
            ) from error
        for index in range(len(self._processes)):
            threading.Thread(target=self._wait, args=(index, ended), daemon=True).start()

    def _wait(self, index: int, ended: Callable[[int], None]) -> None:
        process = self._processes[index]
        if hasattr(os, "waitid"):
            # WNOWAIT leaves a zombie, so that its process group cannot come to belong to somebody else before the kill.
            info = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            assert info is not None
            exitcode = info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
        else:
            exitcode = process.wait()
        self._ends[index] = exitcode, time.time()
        ended(index)

    def exitcode(self, index: int) -> int | None:
        """Status of one rank, -S after signal S, None while it runs."""
        return self._ends[index][0] if index in self._ends else None

    @property
    def all_ended(self) -> bool:
        """Whether no rank runs any more; what ranks have started themselves may."""
        return len(self._ends) == len(self._processes)

    def signal(self, number: int) -> None:
        """Send ``number`` to every rank that still runs, and not to what it started."""
        for index, process in enumerate(self._processes):
            if index not in self._ends:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def kill_groups(self) -> None:
        """SIGKILL to every rank's process group: the rank itself and what it started."""
        self._killed |= {index for index in range(len(self._processes)) if index not in self._ends}
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)

    def reap(self) -> None:
        """Take in all that have ended; the last thing to do."""
        for process in self._processes:
            process.poll()

    def failures(self) -> list[RankEnd]:
        """How every rank ended that did not return 0; one that even SIGKILL has not ended counts as killed now."""
        ends = []
        for index, (command, process) in enumerate(zip(self._commands, self._processes, strict=True)):
            exitcode, moment = self._ends.get(index, (-signal.SIGKILL, time.time()))
            if exitcode != 0:
                report = _read_report(command.report_file)
                ends.append(RankEnd(command.rank, process.pid, exitcode, moment, *report, index in self._killed))
        return ends


def _read_report(report_file: str) -> tuple[float | None, str]:
    try:
        with open(report_file, encoding="utf-8") as file:
            moment, _, traceback = file.read().partition("\n")
        return float(moment), traceback
    except (OSError, ValueError):
        return None, ""  # the rank ended without an exception, or while it was writing
