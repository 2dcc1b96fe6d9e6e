"""What the user's optimizer sees: plain tensors over this rank's master ranges, one per (unit, parameter group).

ELEMENT granularity gives 1-D views; PARAMETER granularity gives every owned parameter in its logical shape. The
optimizer object, its ``param_groups`` list and its group dicts stay the caller's own; only the ``params`` entries
change.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from deepspeed.errors import OptimizerConfigError
from deepspeed.zero.layout import Granularity
from deepspeed.zero.plan import StateKind
from deepspeed.zero.unit import Unit

_PAGE_NUMEL = 4096  # tiles end where pages do, in any dtype


@dataclass
class OptimView:
    """``param`` covers flat indices [start, stop) of ``unit``; its ``.grad`` is set for the time of a step."""

    unit: Unit
    group: int
    start: int
    stop: int
    param: nn.Parameter
    name: str

    @property
    def on_drive(self) -> bool:
        """Whether its values come into memory for the update only."""
        return self.unit.on_drive(StateKind.OPTIM)

    def output(self) -> torch.Tensor | None:
        """The part of PARAM at rest that the optimizer may round this view's weights into; None: rounded afterwards.

        So it is with PARAM elsewhere, and where a parameter frozen after ``initialize`` is put back behind it.
        """
        unit, resting = self.unit, self.unit.shard
        if unit.master_is_param or unit.on_drive(StateKind.PARAM) or resting.device != self.param.device:
            return None
        if not all(p.requires_grad for p in unit.params):
            return None
        return unit.within(StateKind.PARAM, resting, self.start, self.stop)

    def gradient(self, factor: float, *, source: torch.Tensor | None = None) -> torch.Tensor:
        """The matching part of the unit's mean gradient times ``factor``, in the view's shape and dtype.

        A gradient in another dtype is converted first: fp16 could not hold it without the loss scale. In the same dtype
        the rest gradient itself is multiplied. ``source`` is that part where the gradient does not rest in memory.
        """
        if source is None:
            assert self.unit.grad is not None
            source = self.unit.within(StateKind.GRAD, self.unit.grad, self.start, self.stop)
        factor *= self.unit.facts.after
        piece = source.view(self.param.shape).to(self.param.dtype)
        return piece if factor == 1.0 else piece.mul_(factor)

    def frozen_parts(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(part of the view's values, its copy) of parameters frozen later: momentum must not move them."""
        layout, flat = self.unit.layout, self.param.detach().reshape(-1)
        frozen = [s for p, s in zip(self.unit.params, layout.segments, strict=True) if not p.requires_grad]
        spans = (layout.overlap(segment, self.start, self.stop) for segment in frozen)
        parts = (flat[lo - self.start : hi - self.start] for lo, hi in spans if lo < hi)
        return [(part, part.clone()) for part in parts]


def build_views(units: list[Unit], group_count: int, *, tile_numel: int = 0) -> list[OptimView]:
    """Cut every unit's master range into views. Groups are numbered from 0; segments of group -1 are not optimised.

    Views of what rests on a drive have at most ``tile_numel`` elements where the granularity allows it.
    """
    views: list[OptimView] = []
    for unit in units:
        if unit.master is None:
            continue
        for name, group, lo, hi, shape in _spans(unit, max(_PAGE_NUMEL, tile_numel // _PAGE_NUMEL * _PAGE_NUMEL)):
            if 0 <= group < group_count:
                param = nn.Parameter(unit.within(StateKind.OPTIM, unit.master, lo, hi).view(shape))
                views.append(OptimView(unit, group, lo, hi, param, name))
                unit.add_view(views[-1])
    return views


def _spans(unit: Unit, tile_numel: int) -> Iterator[tuple[str, int, int, int, tuple[int, ...]]]:
    """Name, group, flat range and shape of each view: a parameter, or what is here of a group, on a drive in tiles.

    Padding between segments of a group holds zeros and zero gradients: a longer loop is cheaper than a cut. Tiles end
    on page boundaries of this rank's range.
    """
    start, stop = unit.range_of(StateKind.OPTIM)
    parts = [(s, *unit.layout.overlap(s, start, stop)) for s in unit.layout.segments]
    parts = [(s, lo, hi) for s, lo, hi in parts if lo < hi]
    if unit.layout.granularity is Granularity.PARAMETER:
        yield from ((s.name, s.group, lo, hi, s.shape) for s, lo, hi in parts)
        return
    for group, those in itertools.groupby(parts, key=lambda part: part[0].group):
        bounds = [bound for _, *both in those for bound in both]
        lo, hi = bounds[0], bounds[-1]
        first_edge = start + ((lo - start) // tile_numel + 1) * tile_numel
        edges = range(first_edge, hi, tile_numel) if unit.on_drive(StateKind.OPTIM) else ()
        for first, last in itertools.pairwise((lo, *edges, hi)):
            yield f"{unit.name}[{group}]", group, first, last, (last - first,)


def attach(optimizer: torch.optim.Optimizer, views: list[OptimView]) -> None:
    """Point the optimizer's groups at the views. Raises OptimizerConfigError when it has already taken steps."""
    initial = check_fresh(optimizer)
    optimizer.state.clear()
    for index, group in enumerate(optimizer.param_groups):
        group["params"][:] = [v.param for v in views if v.group == index]
    for view in views if initial else ():
        optimizer.state[view.param] = {key: _like(value, view.param) for key, value in initial[view.group].items()}


def check_fresh(optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Any]]:
    """Raise OptimizerConfigError when ``optimizer`` has already taken steps.

    Returns one parameter's state per group of an optimizer that fills it at construction (torch's Adagrad).
    """
    if not optimizer.state:
        return {}
    steps = [float(s["step"]) for s in optimizer.state.values() if "step" in s]
    tensors = (v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor) and v.numel())
    if len(steps) != len(optimizer.state) or any(steps) or not all((v == v.reshape(-1)[0]).all() for v in tensors):
        raise OptimizerConfigError(
            f"the {type(optimizer).__name__} passed to initialize() has already taken steps (it holds state for "
            f"{len(optimizer.state)} tensors); pass a fresh optimizer, or load its state through the engine"
        )
    return {i: optimizer.state[group["params"][0]] for i, group in enumerate(optimizer.param_groups) if group["params"]}


def _like(value: Any, param: nn.Parameter) -> Any:
    """An initial slot for ``param``: scalars are copied, constant tensors are spread over its shape."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.dim() == 0:
        return value.clone()
    return torch.full_like(param, value.reshape(-1)[0].item(), requires_grad=False)
