"""What the user's optimizer sees: plain tensors over this rank's master ranges, one per (unit, parameter group).

ELEMENT granularity gives 1-D views; PARAMETER granularity gives every owned parameter in its logical shape. The optimizer object,
its ``param_groups`` list and its group dicts stay the caller's own; only the ``params`` entries change.
"""

from dataclasses import dataclass

import torch
from torch import nn

from deepspeed.errors import OptimizerConfigError
from deepspeed.zero.layout import Granularity
from deepspeed.zero.plan import StateKind
from deepspeed.zero.unit import Unit


@dataclass
class OptimView:
    """``param`` covers flat indices [start, stop) of ``unit``; its ``.grad`` is set for the time of a step."""

    unit: Unit
    group: int
    start: int
    stop: int
    param: nn.Parameter
    name: str

    def gradient(self) -> torch.Tensor:
        """The matching part of the unit's rest gradient, in the view's shape and dtype."""
        assert self.unit.grad is not None
        base, _ = self.unit.range_of(StateKind.GRAD)
        piece = self.unit.grad[self.start - base : self.stop - base].view(self.param.shape)
        return piece if piece.dtype == self.param.dtype else piece.to(self.param.dtype)


def build_views(units: list[Unit], group_count: int) -> list[OptimView]:
    """Cut every unit's master range into views. Groups are numbered from 0; segments of group -1 are not optimised."""
    views: list[OptimView] = []
    for unit in units:
        if unit.master is None:
            continue
        start, stop = unit.range_of(StateKind.OPTIM)
        whole = unit.layout.granularity is Granularity.PARAMETER
        for name, group, lo, hi, shape in _spans(unit, start, stop, whole=whole):
            if 0 <= group < group_count:
                data = unit.master[lo - start : hi - start]
                views.append(OptimView(unit, group, lo, hi, nn.Parameter(data.view(shape) if shape is not None else data), name))
    return views


def _spans(unit: Unit, start: int, stop: int, *, whole: bool) -> list[tuple[str, int, int, int, tuple[int, ...] | None]]:
    spans: list[tuple[str, int, int, int, tuple[int, ...] | None]] = []
    for segment in unit.layout.segments:
        lo, hi = unit.layout.overlap(segment, start, stop)
        if lo >= hi:
            continue
        if whole:
            spans.append((segment.name, segment.group, lo, hi, segment.shape))
        elif spans and spans[-1][1] == segment.group:
            # Padding between two segments of a group holds zeros and zero gradients: one longer loop is cheaper than a cut.
            name, group, first, _, _ = spans[-1]
            spans[-1] = (name, group, first, hi, None)
        else:
            spans.append((f"{unit.name}[{segment.group}]", segment.group, lo, hi, None))
    return spans


def attach(optimizer: torch.optim.Optimizer, views: list[OptimView]) -> None:
    """Point the optimizer's groups at the views. Raises OptimizerConfigError when it already holds state of its own."""
    if optimizer.state:
        raise OptimizerConfigError(
            f"the {type(optimizer).__name__} passed to initialize() has already taken steps (it holds state for "
            f"{len(optimizer.state)} tensors); pass a fresh optimizer, or load its state through the engine"
        )
    for index, group in enumerate(optimizer.param_groups):
        group["params"][:] = [v.param for v in views if v.group == index]
