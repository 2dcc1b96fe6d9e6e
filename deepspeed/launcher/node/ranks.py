"""The rank processes of one node: start, signal, kill, and how each ended.

Not built on torch's elastic agent: that reaps ranks in a way that loses which one failed first, gives survivors 30 s
after a failure, leaves the children of a dead rank alone, and raises exceptions out of signal handlers at any line.
"""

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import psutil

from deepspeed.errors import UsageError
from deepspeed.launcher.node import guard
from deepspeed.launcher.node.verdict import RankEnd

TRACEBACK_CHARACTERS = 16_384  # what is kept of one, from its end: reports of many ranks travel in one message
KILL_S = 2.0  # a process that SIGKILL has not ended by then is stuck in the kernel; the job does not wait for it


def scratch_path() -> str:
    """Return a new path for a launcher's files; its guard gets it before ``made`` makes it, or a kill leaves it."""
    return os.path.join(tempfile.gettempdir(), f"deepspeed_{secrets.token_hex(8)}")


@contextlib.contextmanager
def made(folder: str) -> Iterator[str]:
    """Make the folder for the duration of the block. Raises UsageError when that fails."""
    try:
        os.mkdir(folder, 0o700)
    except OSError as error:
        hint = "name a folder with space for temporary files in TMPDIR"
        raise UsageError(f"cannot make {folder}: {error.strerror}; {hint}") from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _runs(group: int) -> bool:
    """Tell whether any process of the group runs; zombies, which wait for their parent, do not count."""
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


class Guard:
    """Process that kills the ranks and removes ``paths`` if this process is killed; see ``guard.py``."""

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
        """End the guard without effect."""
        self.watch("done")
        with contextlib.suppress(OSError):
            self._process.communicate()


class Ranks:
    """Run one process per rank of this node, each the leader of its own process group; crash reports go to ``scratch``.

    ``ended(exitcode)`` is called from a thread for each, with -S after signal S.
    """

    def __init__(self, guardian: Guard, ended: Callable[[int], None], *, scratch: str, stdin: int | None) -> None:
        self._guardian, self._ended, self._scratch, self._stdin = guardian, ended, scratch, stdin
        self._ends: dict[int, tuple[int, float]] = {}  # status and moment
        self._killed: set[int] = set()
        self._killing = False
        self._processes: list[tuple[int, subprocess.Popen[bytes]]] = []  # with the global rank

    def _report_file(self, index: int) -> str:
        return os.path.join(self._scratch, f"rank{index}")

    def start(
        self, rank: int, argv: Sequence[str], environment: Mapping[str, str], log_file: str, cores: Sequence[int]
    ) -> None:
        """Start the next rank; ``environment`` goes on top of this process's own.

        ``log_file`` gets both output streams; ``cores``: CPUs it may run on. Either may be empty: as this process.
        Raises UsageError when it cannot be started; none is left then.
        """
        index = len(self._processes)
        environment = {**os.environ, **environment, "DS_CRASH_REPORT": self._report_file(index)}
        environment |= {"DS_RANK_LOG": log_file} if log_file else {}
        try:
            with contextlib.ExitStack() as stack:
                if cores:  # what this thread starts inherits them
                    stack.callback(os.sched_setaffinity, 0, os.sched_getaffinity(0))
                    os.sched_setaffinity(0, cores)
                log = stack.enter_context(open(log_file, "ab")) if log_file else None
                # Its own session, so that Ctrl-C in the terminal reaches only the launcher, which passes it on once.
                process = subprocess.Popen(
                    argv, env=environment, stdin=self._stdin, stdout=log, stderr=log, start_new_session=True
                )
        except OSError as error:
            self.kill_groups()
            hint = "look at ulimit -u, the free memory and the folder of log files"
            raise UsageError(f"cannot start another process for a rank: {error}; {hint}") from error
        self._processes.append((rank, process))
        self._guardian.watch(process.pid)
        threading.Thread(target=self._wait, args=(index, process.pid), daemon=True).start()

    def _wait(self, index: int, pid: int) -> None:
        # WNOWAIT leaves a zombie, so that its process group cannot come to belong to somebody else before the kill.
        info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert info is not None
        exitcode = info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
        self._ends[index] = exitcode, time.time()
        self._ended(exitcode)

    @property
    def all_ended(self) -> bool:
        """Tell whether no rank runs any more, or yet; processes that ranks have started may still run."""
        return len(self._ends) == len(self._processes)

    def signal(self, number: int) -> None:
        """Send ``number`` to every rank that still runs, and not to its children."""
        for index, (_, process) in enumerate(self._processes):
            if index not in self._ends:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def kill_groups(self) -> None:
        """Send SIGKILL to every rank's process group: the rank itself and its children."""
        self._killing = True
        self._killed |= {index for index in range(len(self._processes)) if index not in self._ends}
        for _, process in self._processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)

    def reap(self) -> None:
        """Reap all ended ranks and, after a kill, wait shortly for their children too; the last call of all."""
        until = time.monotonic() + KILL_S
        while True:
            for index, (_, process) in enumerate(self._processes):
                if index in self._ends:  # else its thread would wait for what is gone
                    process.poll()
            if not self._killing or time.monotonic() > until:
                return
            if not any(_runs(process.pid) for _, process in self._processes):
                return
            time.sleep(0.01)

    def failures(self, *, ended_only: bool = False) -> list[RankEnd]:
        """Return the ends of ranks that did not return 0; also of one that survives SIGKILL, unless ``ended_only``."""
        ends = []
        for index, (rank, process) in enumerate(self._processes):
            if ended_only and index not in self._ends:
                continue
            exitcode, moment = self._ends.get(index, (-signal.SIGKILL, time.time()))
            if exitcode != 0:
                raised, traceback = None, ""  # it ended without an exception, or while it was writing
                with contextlib.suppress(OSError, ValueError), open(self._report_file(index), encoding="utf-8") as file:
                    stamp, _, text = file.read().partition("\n")
                    raised, traceback = float(stamp), text[-TRACEBACK_CHARACTERS:]
                killed = index in self._killed
                ends.append(RankEnd(rank, process.pid, exitcode, moment, raised, traceback, killed))
        return ends
