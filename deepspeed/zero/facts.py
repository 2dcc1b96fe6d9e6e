"""What holds for a unit whatever is in it: who shares it, what its states are called, which moves are legal."""

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch
from torch import nn

from deepspeed.errors import InvalidStateError
from deepspeed.mesh.groups import Mesh
from deepspeed.zero.plan import Spread, Spreads


class UnitState(Enum):
    """Which memory of PARAM exists: ABSENT the shard; FETCHING shard and a full buffer being filled; READY both."""

    ABSENT = "absent"
    FETCHING = "fetching"
    READY = "ready"


class GradState(Enum):
    """EMPTY nothing; LOCAL a sum of this rank, full-size; REDUCED (also) the rest shard; COLLAPSED ready to step."""

    EMPTY = "empty"
    LOCAL = "local"
    REDUCED = "reduced"
    COLLAPSED = "collapsed"


_LEGAL: dict[Enum, set[Enum]] = {
    UnitState.ABSENT: {UnitState.FETCHING},
    UnitState.FETCHING: {UnitState.READY},
    UnitState.READY: {UnitState.ABSENT},
    # gradients may be dropped at any time, or stay
    GradState.EMPTY: {GradState.EMPTY, GradState.LOCAL, GradState.COLLAPSED},
    GradState.LOCAL: {GradState.EMPTY, GradState.LOCAL, GradState.REDUCED},
    GradState.REDUCED: {*GradState},
    GradState.COLLAPSED: {GradState.EMPTY, GradState.LOCAL, GradState.COLLAPSED},
}


def check_move(unit: str, before: Enum, after: Enum) -> None:
    """Raise InvalidStateError when a unit cannot go from one state to the other."""
    if after not in _LEGAL[before]:
        what = "gradients" if isinstance(after, GradState) else "parameters"
        raise InvalidStateError(f"unit {unit}: {what} cannot go from {before.value} to {after.value}")


@dataclass(frozen=True)
class UnitFacts:
    """Who shares a unit, and how its gradient becomes a mean.

    ``divisor``: what the sum over ranks is divided by, of it ``early`` before the sum travels. ``wire``: dtype of
    gradients on their way; None for the parameters' own. ``tie``: parameters of units with the same name are one and
    the same on several stages.
    """

    mesh: Mesh
    divisor: float = 1.0
    early: float = 1.0
    wire: torch.dtype | None = None
    tie: str | None = None

    @property
    def before(self) -> float:
        """What a local gradient is multiplied by when it is packed."""
        return 1.0 / self.early

    @property
    def after(self) -> float:
        """What the reduced gradient has still to be multiplied by."""
        return self.early / self.divisor


class View(Protocol):
    """What an optimizer sees of the master: ``param`` covers flat indices [start, stop)."""

    start: int
    stop: int
    param: nn.Parameter


def castable(dtype: torch.dtype) -> bool:
    """Whether values may change to another precision: 8-bit floats are codes that mean nothing without their scales."""
    return dtype.is_floating_point and dtype.itemsize > 1


def owned_range(numel: int, spread: Spreads, mesh: Mesh) -> tuple[int, int]:
    """This rank's [start, stop) of a flat space under ``spread``: cut inner axis first, then outer within the piece."""
    start = 0
    for way, axis in zip(spread, mesh.axes, strict=True):
        if way is Spread.SHARDED:
            numel //= axis.size
            start += numel * axis.index
    return start, start + numel


def square_sum(values: torch.Tensor) -> torch.Tensor:
    """Sum of squares in float64, from a norm in fp32 or wider."""
    wide = torch.promote_types(values.dtype, torch.float32)
    return torch.linalg.vector_norm(values, dtype=wide).double().square()
