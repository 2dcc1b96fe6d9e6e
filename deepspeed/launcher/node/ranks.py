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
from collections.abc import Callable, Mapping, Sequence
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
            self._tell(f"path {path}")

    def watch(self, pid: int) -> None:
        """Add the process group ``pid``."""
        self._tell(f"group {pid}")

    def watch_starter(self, pid: int) -> None:
        """Add the process group of a program that ends what it has started when it gets a SIGTERM, as mpirun does."""
        self._tell(f"starter {pid}")

    def dismiss(self) -> None:
        """End it without effect."""
        self._tell("done")
        with contextlib.suppress(OSError):
            self._process.communicate()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # somebody killed it; the job goes on without
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()


class Ranks:
    """Starts one process per command, each the leader of its own process group; ``ended(index)`` is called from a
    thread.

    Raises UsageError when the machine gives no more processes; none is left then.
    """

    def __init__(
        self, commands: Sequence[RankCommand], guardian: Guard, ended: Callable[[int], None], *, stdin: int | None
    ) -> None:
        self._commands = tuple(commands)
        self._lock = threading.Lock()
        self._exitcodes: dict[int, int] = {}
        self._ended_at: dict[int, float] = {}
        self._killed: set[int] = set()
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for command in self._commands:
                # Its own session, so that Ctrl-C in the terminal reaches only the launcher, which passes it on once.
                process = subprocess.Popen(
                    command.argv, env={**os.environ, **command.environment}, stdin=stdin, start_new_session=True
                )
                self._processes.append(process)
                guardian.watch(process.pid)
        except OSError as error:
            self.kill_groups()
            raise UsageError(
                f"cannot start another process for a rank: {error.strerror}; look at ulimit -u and the free memory"
            ) from error
        for index in range(len(self._processes)):
            threading.Thread(target=self._wait, args=(index, ended), daemon=True).start()

    def _wait(self, index: int, ended: Callable[[int], None]) -> None:
        pid = self._processes[index].pid
        if hasattr(os, "waitid"):
            # WNOWAIT leaves a zombie, so that its process group cannot come to belong to somebody else before the kill.
            info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            assert info is not None
            exitcode = info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
        else:
            exitcode = self._processes[index].wait()
        with self._lock:
            self._exitcodes[index] = exitcode
            self._ended_at[index] = time.time()
        ended(index)

    def exitcode(self, index: int) -> int | None:
        """Status of one rank, -S after signal S, None while it runs."""
        return self._exitcodes.get(index)

    @property
    def all_ended(self) -> bool:
        """Whether no rank runs any more; what ranks have started themselves may."""
        with self._lock:
            return len(self._exitcodes) == len(self._processes)

    def signal(self, number: signal.Signals) -> None:
        """Send ``number`` to every rank that still runs, and not to what it started."""
        for index, process in enumerate(self._processes):
            if self.exitcode(index) is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def kill_groups(self) -> None:
        """SIGKILL to every rank's process group: the rank itself and what it started."""
        with self._lock:
            self._killed |= set(range(len(self._processes))) - self._exitcodes.keys()
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
            exitcode = self._exitcodes.get(index, -int(signal.SIGKILL))
            if exitcode != 0:
                moment = self._ended_at.get(index, time.time())
                raised_at, traceback = _read_report(command.report_file)
                stopped = index in self._killed
                ends.append(RankEnd(command.rank, process.pid, exitcode, moment, raised_at, traceback, stopped))
        return ends


def _read_report(report_file: str) -> tuple[float | None, str]:
    try:
        with open(report_file, encoding="utf-8") as file:
            moment, _, traceback = file.read().partition("\n")
        return float(moment), traceback
    except (OSError, ValueError):
        return None, ""  # the rank ended without an exception, or while it was writing
