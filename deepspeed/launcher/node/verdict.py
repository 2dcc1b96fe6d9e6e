"""What ended a job first, and how to say so; pure functions of what was observed."""

import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

# A rank that ends without an exception cannot stamp the moment itself; the launcher sees its end a little late, while a
# peer may stamp the broken connection at once.
UNSTAMPED_LEAD_S = 0.2

LOST_HOST_STATUS = 1
TRACEBACK_CHARACTERS = 16_384  # what is kept of one, from its end: reports of many ranks travel in one message


@dataclass(frozen=True)
class RankEnd:
    """How one rank ended. Times are seconds on the clock of the reader; ``exitcode`` is -S after signal S."""

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
        """The best estimate of the moment the rank went wrong."""
        return self.ended_at - UNSTAMPED_LEAD_S if self.raised_at is None else self.raised_at

    @property
    def is_consequence(self) -> bool:
        """Whether the launcher itself ended the rank (a SIGTERM counts as ours: that is what survivors are sent)."""
        return self.raised_at is None and (self.stopped_by_us or self.exitcode == -signal.SIGTERM)

    @property
    def true_exitcode(self) -> int:
        """The status the rank was about to end with: 1 for one that had raised before the launcher stopped it."""
        cut_short = self.raised_at is not None and self.exitcode in (-signal.SIGTERM, -signal.SIGKILL)
        return 1 if cut_short else self.exitcode

    def describe(self, *, show_traceback: bool) -> str:
        """One sentence for the terminal, followed by the traceback where there is one and it is wanted."""
        code = self.true_exitcode
        how = f"exit status {code}" if code >= 0 else f"signal {signal_name(-code)}"
        where = f" on {self.host}" if self.host else ""
        head = f"deepspeed: rank {self.rank}{where} (pid {self.pid}) failed first, with {how}"
        trace = f". Its traceback:\n{self.traceback}" if show_traceback and self.traceback else "\n"
        return f"{head}; all ranks have been stopped{trace}"

    def to_message(self, now: float) -> dict[str, Any]:
        """The same with ages instead of times: the clocks of two hosts differ."""
        ages = {"ended_at": now - self.ended_at, "raised_at": None if self.raised_at is None else now - self.raised_at}
        return asdict(self) | ages | {"traceback": self.traceback[-TRACEBACK_CHARACTERS:]}

    @classmethod
    def from_message(cls, message: Mapping[str, Any], now: float) -> "RankEnd":
        """Inverse of :meth:`to_message` on the clock of the receiver."""
        raised = message["raised_at"]
        times = {"ended_at": now - message["ended_at"], "raised_at": None if raised is None else now - raised}
        return cls(**{**message, **times})


@dataclass(frozen=True)
class HostLoss:
    """A host no longer heard, ``last_heard`` on the clock of the reader; ``how`` completes 'host X ...'."""

    host: str
    node_rank: int
    last_heard: float
    how: str

    def describe(self) -> str:
        """One sentence for the terminal."""
        where = f"host {self.host} (node {self.node_rank})"
        return f"deepspeed: {where} {self.how}; the ranks of all other hosts have been stopped\n"


@dataclass(frozen=True)
class Verdict:
    """The exit status of a job on every host, and the last words on the terminal (empty after a good end)."""

    status: int
    text: str = ""


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9; the number itself when it has no name."""
    return next((known.name for known in signal.Signals if known == number), str(number))


def first_failure(ends: Sequence[RankEnd]) -> RankEnd:
    """Return the end that caused the others; ``ends`` holds the failed ranks only and at least one."""
    return min(ends, key=lambda end: (end.is_consequence, end.failed_at, end.rank))


def shell_status(exitcode: int) -> int:
    """Exit status as a shell counts it: the status itself, or 128 + S for -S."""
    return exitcode if exitcode >= 0 else 128 - exitcode


def judge(ends: Sequence[RankEnd], losses: Sequence[HostLoss], *, show_traceback: bool) -> Verdict:
    """The verdict on failed ranks and lost hosts: whatever went wrong first is the cause, and its status the job's.

    Ranks that failed after a host was last heard failed because of it: their connections to that host broke.
    """
    loss = min(losses, key=lambda loss: loss.last_heard, default=None)
    cause = first_failure(ends) if ends else None
    if loss and (cause is None or cause.is_consequence or cause.failed_at > loss.last_heard - UNSTAMPED_LEAD_S):
        return Verdict(LOST_HOST_STATUS, loss.describe())
    if cause is not None:
        return Verdict(shell_status(cause.true_exitcode), cause.describe(show_traceback=show_traceback))
    return Verdict(0)
