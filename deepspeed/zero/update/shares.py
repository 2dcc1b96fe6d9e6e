"""Which units the device updates where the rest is updated on the host, and how many. Pure.

Deep Optimizer States (Maurya et al. 2024): every k-th unit, so that both work at the same time from the first unit of
the update to the last.
"""

from collections.abc import Sequence
from dataclasses import dataclass

_ROUNDING = 1e-9  # of a share, which is a difference of two decimal numbers


def every_so_many(numels: Sequence[int], share: float) -> list[bool]:
    """Return for each unit, in the order of the update, whether the device updates it: as soon as the device then has
    no more than ``share`` of the elements so far. Of equal units with a share of 1/k every k-th.
    """
    chosen, total, taken = [], 0, 0
    for numel in numels:
        total += numel
        chosen.append(taken + numel <= share * total * (1 + _ROUNDING))
        taken += numel if chosen[-1] else 0
    return chosen


@dataclass(frozen=True)
class Rates:
    """Seconds an element: of the host's update; of optimizer state on its way to the device, and back."""

    host: float
    up: float
    down: float

    def device_share(self) -> float:
        """Return the share for which host and bus end together. Both directions of the bus work at once."""
        return self.host / (self.host + max(self.up, self.down))


def slowest(rates: Sequence[Rates]) -> Rates:
    """Return the slowest rate of all ranks in each respect, as ranks wait for each other."""
    return Rates(max(r.host for r in rates), max(r.up for r in rates), max(r.down for r in rates))
