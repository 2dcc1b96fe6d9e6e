"""What ended a job first, and how to say so; pure functions of what was observed."""

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace

from deepspeed.errors import JobHungError, PreemptedExit

# A rank that ends without an exception cannot stamp the moment itself; the launcher sees its end a little late, while a
# peer may stamp the broken connection at once.
UNSTAMPED_LEAD_S = 0.2
LOST_HOST_STATUS = 1
# In the traceback of a rank that was told of another's error, or lost its connection to one that was ending.
_FROM_ANOTHER = re.compile(
    r"^(deepspeed\.[\w.]+\.Rank\w+Error|RuntimeError: \[.*/gloo/|torch\.distributed\.DistBackendError)", re.MULTILINE
)


@dataclass(frozen=True)
class Verdict:
    """Exit status of a job on every host, and the last words on the terminal (empty after a good end)."""

    status: int
    text: str = ""


@dataclass(frozen=True)
class RankEnd:
    """End of one rank. Times are seconds on the clock of the reader; ``exitcode`` is -S after signal S."""

    rank: int
    pid: int
    exitcode: int
    ended_at: float
    raised_at: float | None = None
    traceback: str = ""
    stopped_by_us: bool = False
    host: str = ""

    @property
    def failed_at(self) -> float:
        """Return the best estimate of the moment the rank went wrong."""
        return self.ended_at - UNSTAMPED_LEAD_S if self.raised_at is None else self.raised_at

    @property
    def is_consequence(self) -> bool:
        """Tell whether the launcher itself ended the rank (a SIGTERM counts as ours: survivors are sent that)."""
        return self.raised_at is None and (self.stopped_by_us or self.exitcode == -signal.SIGTERM)

    @property
    def from_another(self) -> bool:
        """Tell whether the rank raised because another one had, whose traceback says more."""
        return _FROM_ANOTHER.search(self.traceback) is not None

    @property
    def was_watched(self) -> bool:
        """Tell whether the ranks ended the job themselves, as it stood still, and this rank has said why."""
        return self.traceback.startswith(f"{JobHungError.__module__}.{JobHungError.__name__}: ")

    def verdict(self, *, show_traceback: bool) -> Verdict:
        """Return the verdict on a job that this rank ended: a sentence, and the traceback if any and wanted."""
        if self.was_watched:
            return Verdict(JobHungError.exit_status, f"deepspeed: {self.traceback.partition(': ')[2]}")
        # A rank that had raised before the launcher stopped it was about to end with 1.
        cut_short = self.raised_at is not None and self.exitcode in (-signal.SIGTERM, -signal.SIGKILL)
        code = 1 if cut_short else self.exitcode
        how = f"exit status {code}" if code >= 0 else f"signal {signal_name(-code)}"
        where = f" on {self.host}" if self.host else ""
        head = f"deepspeed: rank {self.rank}{where} (pid {self.pid}) failed first, with {how}"
        memory = ". The kernel sends that when memory runs out, and says so in dmesg" if code == -signal.SIGKILL else ""
        trace = f". Its traceback:\n{self.traceback}" if show_traceback and self.traceback else "\n"
        return Verdict(shell_status(code), f"{head}; all ranks have been stopped{memory}{trace}")

    def on_another_clock(self, ahead_s: float, *, host: str) -> "RankEnd":
        """Return this end on ``host`` with times on a clock that is ``ahead_s`` seconds ahead."""
        raised = None if self.raised_at is None else self.raised_at + ahead_s
        return replace(self, ended_at=self.ended_at + ahead_s, raised_at=raised, host=host)


def lost(host: str, node: int, how: str) -> Verdict:
    """Return the verdict on a job whose ``host`` is lost; ``how`` completes 'host X ...'."""
    where = f"host {host} (node {node})"
    return Verdict(LOST_HOST_STATUS, f"deepspeed: {where} {how}; the ranks of all other hosts have been stopped\n")


def interrupted(number: int) -> Verdict:
    """Return the verdict on a job that was sent signal ``number``."""
    return Verdict(128 + number, f"deepspeed: all ranks have been stopped after {signal_name(number)}\n")


def preempted() -> Verdict:
    """Return the verdict on a job whose ranks have saved a checkpoint and ended, because one was told to end."""
    status = PreemptedExit.exit_status
    return Verdict(status, f"deepspeed: a checkpoint was saved and all ranks have ended, as asked (status {status})\n")


def signal_name(number: int) -> str:
    """Return the name of a signal, ``SIGKILL`` for 9; the number itself when it has no name."""
    return next((sig.name for sig in signal.Signals if sig == number), str(number))


def shell_status(exitcode: int) -> int:
    """Return the exit status as a shell counts it: the status itself, or 128 + S for -S."""
    return exitcode if exitcode >= 0 else 128 - exitcode


def judge(ends: Sequence[RankEnd], losses: Sequence[tuple[float, Verdict]], *, show_traceback: bool) -> Verdict:
    """Judge failed ranks and lost hosts: whatever went wrong first is the cause, and its status the job's.

    ``losses``: when each lost host was last heard, and the verdict on it. Later failures of ranks count as its effect.
    """
    last_heard, loss = min(losses, key=lambda loss: loss[0], default=(float("inf"), None))
    watched = next((end for end in ends if end.was_watched), None)
    if watched is not None:
        return watched.verdict(show_traceback=show_traceback)
    if any(end.exitcode == PreemptedExit.exit_status for end in ends):  # no rank ends so before the save is complete
        return preempted()
    cause = min(ends, key=lambda end: (end.is_consequence, end.from_another, end.failed_at, end.rank), default=None)
    if loss and (cause is None or cause.is_consequence or cause.failed_at > last_heard - UNSTAMPED_LEAD_S):
        return loss
    return cause.verdict(show_traceback=show_traceback) if cause is not None else Verdict(0)
