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

TRACEBACK_CHARACTERS = 16_384  # what is kept of one, from its end: reports of many ranks travel in one message


@dataclass(frozen=True)
class RankCommand:
    """What starts one rank; ``rank`` is global, ``environment`` goes on top of this process's own.

    ``log_file`` gets both output streams; ``cores`` are what it may run on. Either may be empty: as this process.
    """

    rank: int
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    report_file: str
    log_file: str = ""
    cores: tuple[int, ...] = ()


class Guard:
    """A small process that kills the ranks and removes ``paths`` if this process is killed; see ``guard.py``."""

    def __init__(self, paths: Sequence[str] = ()) -> None:
        command, quiet = [sys.executable, "-I", "-S", guard.__file__, *paths], subprocess.DEVNULL
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True, text=True
        )

    def watch(self, group: int | str) -> None:
        """Add the process group of a rank, or of a program that starts ranks."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # somebody killed it; the job goes on without
            self._process.stdin.write(f"{group}\n")
            self._process.stdin.flush()

    def dismiss(self) -> None:
        """End it without effect."""
        self.watch("done")
        with contextlib.suppress(OSError):
            self._process.communicate()


@contextlib.contextmanager
def _on_cores(cores: Sequence[int]) -> Iterator[None]:
    """Within the block this thread, and with it what it starts, runs on ``cores``."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class Ranks:
    """One process per command, each the leader of its own process group; ``ended(index)`` is called from a thread.

    Raises UsageError when one cannot be started; none is left then.
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
                self._start(command, stdin)
                guardian.watch(self._processes[-1].pid)
        except OSError as error:
            self.kill_groups()
            what = "look at ulimit -u, the free memory and the folder of log files"
            raise UsageError(f"cannot start another process for a rank: {error}; {what}") from error
        for index in range(len(self._processes)):
            threading.Thread(target=self._wait, args=(index, ended), daemon=True).start()

    def _start(self, command: RankCommand, stdin: int | None) -> None:
        environment = {**os.environ, **command.environment}
        with contextlib.ExitStack() as stack:
            stack.enter_context(_on_cores(command.cores))
            log = stack.enter_context(open(command.log_file, "ab")) if command.log_file else None
            # Its own session, so that Ctrl-C in the terminal reaches only the launcher, which passes it on once.
            process = subprocess.Popen(
                command.argv, env=environment, stdin=stdin, stdout=log, stderr=log, start_new_session=True
            )
        self._processes.append(process)

    def _wait(self, index: int, ended: Callable[[int], None]) -> None:
        # WNOWAIT leaves a zombie, so that its process group cannot come to belong to somebody else before the kill.
        info = os.waitid(os.P_PID, self._processes[index].pid, os.WEXITED | os.WNOWAIT)
        assert info is not None
        self._ends[index] = info.si_status if info.si_code == os.CLD_EXITED else -info.si_status, time.time()
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
        return float(moment), traceback[-TRACEBACK_CHARACTERS:]
    except (OSError, ValueError):
        return None, ""  # the rank ended without an exception, or while it was writing
