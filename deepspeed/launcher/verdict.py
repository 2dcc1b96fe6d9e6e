"""Which rank failed first, and how to say so; pure functions of what was observed."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass

# A rank that ends without an exception cannot stamp the moment itself; the launcher sees its end a little late, while a
# peer may stamp the broken connection at once.
UNSTAMPED_LEAD_S = 0.2


@dataclass(frozen=True)
class RankEnd:
    """How one rank ended. Times are seconds since the epoch; ``exitcode`` is -S after signal S."""

    rank: int
    pid: int
    exitcode: int
    ended_at: float
    raised_at: float | None = None
    traceback: str = ""
    stopped_by_us: bool = False

    @property
    def failed_at(self) -> float:
        """The best estimate of the moment the rank went wrong."""
        return self.ended_at - UNSTAMPED_LEAD_S if self.raised_at is None else self.raised_at

    @property
    def is_consequence(self) -> bool:
        """Whether the launcher itself ended the rank (a SIGTERM counts as ours: that is what survivors are sent)."""
        return self.stopped_by_us or (self.exitcode == -signal.SIGTERM and self.raised_at is None)

    def describe(self, *, show_traceback: bool) -> str:
        """One sentence for the terminal, followed by the traceback where there is one and it is wanted."""
        how = f"exit status {self.exitcode}" if self.exitcode >= 0 else f"signal {_signal_name(-self.exitcode)}"
        head = f"deepspeed: rank {self.rank} (pid {self.pid}) failed first, with {how}; all ranks have been stopped"
        return f"{head}. Its traceback:\n{self.traceback}" if show_traceback and self.traceback else f"{head}\n"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def first_failure(ends: Sequence[RankEnd]) -> RankEnd:
    """Return the end that caused the others; ``ends`` holds the failed ranks only and at least one."""
    return min(ends, key=lambda end: (end.is_consequence, end.failed_at, end.rank))


def shell_status(exitcode: int) -> int:
    """Exit status as a shell counts it: the status itself, or 128 + S for -S."""
    return exitcode if exitcode >= 0 else 128 - exitcode
