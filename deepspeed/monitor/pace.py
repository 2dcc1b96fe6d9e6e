"""How fast each rank is, and which one the others wait for. Pure.

Where ranks meet at every step, all take as long as the slowest, so the time of a step tells nothing of who that is. Its
own work does: what is left of the step without the time that a rank waits for others (as C4 and MegaScale do).
"""

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


def tail(values: Sequence[float], share: float = 0.95) -> float:
    """Return the smallest value that at least ``share`` of the ``values`` do not exceed; 0 without values."""
    return sorted(values)[max(0, -int(-share * len(values) // 1) - 1)] if values else 0.0


class PaceSpread(NamedTuple):
    """Median and 95th percentile of the last steps, in milliseconds."""

    median: float
    p95: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "PaceSpread":
        """Return the spread of ``values``; zeros without values."""
        return cls(statistics.median(values), tail(values)) if values else cls(0.0, 0.0)


class Pace:
    """Keep own work and waits of one rank's last ``most`` steps, in milliseconds."""

    def __init__(self, most: int) -> None:
        self._work, self._wait = deque[float](maxlen=most), deque[float](maxlen=most)

    def add(self, work_ms: float, wait_ms: float) -> None:
        """Add one step."""
        self._work.append(work_ms)
        self._wait.append(wait_ms)

    @property
    def steps(self) -> int:
        """Return the number of steps kept."""
        return len(self._work)

    work = property(lambda self: PaceSpread.of(self._work))
    wait = property(lambda self: PaceSpread.of(self._wait))


@dataclass(frozen=True)
class RankPace:
    """Pace that a rank reports: the number of its last update, over how many steps, and its host."""

    rank: int
    step: int
    steps: int
    work: PaceSpread
    wait: PaceSpread
    host: str = ""


@dataclass(frozen=True)
class SlowRank:
    """Rank whose own work takes ``times`` as long as that of the median rank, ``median_ms``."""

    pace: RankPace
    times: float
    median_ms: float

    def text(self) -> str:
        """Return the sentence for the log."""
        p, where = self.pace, f" ({self.pace.host})" if self.pace.host else ""
        return (
            f"rank {p.rank}{where} is slow: its own work takes {p.work.median:.1f} ms a step (p95 {p.work.p95:.1f}), "
            f"{self.times:.2f} times that of the median rank ({self.median_ms:.1f} ms), over the last {p.steps} steps; "
            f"the others wait for it. By itself it waits {p.wait.median:.1f} ms a step"
        )


def slow_ranks(paces: Mapping[int, RankPace], *, ranks: int, factor: float, steps: int) -> list[SlowRank]:
    """Return ranks whose work takes ``factor`` times the median's, slowest first, once all report ``steps`` steps."""
    if len(paces) < max(2, ranks) or any(pace.steps < steps for pace in paces.values()):
        return []
    middle = statistics.median_low([pace.work.median for pace in paces.values()])
    if middle <= 0:
        return []
    slow = [SlowRank(p, p.work.median / middle, middle) for p in paces.values() if p.work.median >= factor * middle]
    return sorted(slow, key=lambda entry: -entry.times)
