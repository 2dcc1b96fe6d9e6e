"""What the user's optimizer sees: plain tensors over this rank's master ranges, one per (unit, parameter group).

ELEMENT granularity gives 1-D views; PARAMETER granularity gives every owned parameter in its logical shape. The
optimizer object, its ``param_groups`` list and its group dicts stay the caller's own; only the ``params`` entries
change.
"""

import itertools
from dataclasses import dataclass
from typing import Any

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
        base, _ = unit.range_of(StateKind.PARAM)
        return resting[self.start - base : self.stop - base]

    def gradient(self, factor: float, *, source: torch.Tensor | None = None) -> torch.Tensor:
        """The matching part of the unit's mean gradient times ``factor``, in the view's shape and dtype.

        A gradient in another dtype is converted first: fp16 could not hold it without the loss scale. In the same dtype
        the rest gradient itself is multiplied. ``source`` is that part where the gradient does not rest in memory.
        """
        if source is None:
            assert self.unit.grad is not None
            base, _ = self.unit.range_of(StateKind.GRAD)
            source = self.unit.grad[self.start - base : self.stop - base]
        factor *= self.unit.facts.after
        piece = source.view(self.param.shape)
        piece = piece if piece.dtype == self.param.dtype else piece.to(self.param.dtype)
        return piece if factor == 1.0 else piece.mul_(factor)

    def frozen_parts(self, values: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(part of the view's ``values``, its copy) of parameters frozen later: momentum must not move them."""
        if all(p.requires_grad for p in self.unit.params):
            return []
        flat, frozen = values.reshape(-1), []
        for param, segment in zip(self.unit.params, self.unit.layout.segments, strict=True):
            lo, hi = self.unit.layout.overlap(segment, self.start, self.stop)
            if lo < hi and not param.requires_grad:
                part = flat[lo - self.start : hi - self.start]
                frozen.append((part, part.clone()))
        return frozen


def build_views(units: list[Unit], group_count: int, *, tile_numel: int = 0) -> list[OptimView]:
    """Cut every unit's master range into views. Groups are numbered from 0; segments of group -1 are not optimised.

    Views of what rests on a drive have at most ``tile_numel`` elements where the granularity allows it.
    """
    views: list[OptimView] = []
    for unit in units:
        if unit.master is None:
            continue
        start, stop = unit.range_of(StateKind.OPTIM)
        whole = unit.layout.granularity is Granularity.PARAMETER
        spans = _spans(unit, start, stop, whole=whole)
        if unit.on_drive(StateKind.OPTIM) and not whole:
            spans = [part for span in spans for part in _cut(span, start, tile_numel)]
        for name, group, lo, hi, shape in spans:
            if 0 <= group < group_count:
                data = unit.master[lo - start : hi - start]
                param = nn.Parameter(data if shape is None else data.view(shape))
                views.append(OptimView(unit, group, lo, hi, param, name))
                unit.add_view(views[-1])
    return views


_Span = tuple[str, int, int, int, tuple[int, ...] | None]
_PAGE_NUMEL = 4096  # tiles end where pages do, in any dtype


def _cut(span: _Span, base: int, tile_numel: int) -> list[_Span]:
    """``span`` in tiles that end on page boundaries of the range that begins at ``base``."""
    name, group, lo, hi, _ = span
    each = max(_PAGE_NUMEL, tile_numel // _PAGE_NUMEL * _PAGE_NUMEL)
    edges = [lo, *range(base + ((lo - base) // each + 1) * each, hi, each), hi]
    return [(name, group, first, last, None) for first, last in itertools.pairwise(edges)]


def _spans(unit: Unit, start: int, stop: int, *, whole: bool) -> list[_Span]:
    spans: list[_Span] = []
    for segment in unit.layout.segments:
        lo, hi = unit.layout.overlap(segment, start, stop)
        if lo >= hi:
            continue
        if whole:
            spans.append((segment.name, segment.group, lo, hi, segment.shape))
        elif spans and spans[-1][1] == segment.group:
            # Padding between segments of a group holds zeros and zero gradients: a longer loop is cheaper than a cut.
            name, group, first, _, _ = spans[-1]
            spans[-1] = (name, group, first, hi, None)
        else:
            spans.append((f"{unit.name}[{segment.group}]", segment.group, lo, hi, None))
    return spans


def attach(optimizer: torch.optim.Optimizer, views: list[OptimView]) -> None:
    """Point the optimizer's groups at the views. Raises OptimizerConfigError when it has already taken steps."""
    initial = _initial_state(optimizer)
    optimizer.state.clear()
    for index, group in enumerate(optimizer.param_groups):
        group["params"][:] = [v.param for v in views if v.group == index]
    for view in views:
        if initial:
            optimizer.state[view.param] = {key: _like(value, view.param) for key, value in initial[view.group].items()}


def check_fresh(optimizer: torch.optim.Optimizer) -> None:
    """Raise OptimizerConfigError when ``optimizer`` has already taken steps."""
    _initial_state(optimizer)


def _initial_state(optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Any]]:
    """One parameter's state per group of an optimizer that fills it at construction (torch's Adagrad); else nothing."""
    if not optimizer.state:
        return {}
    steps = [float(s["step"]) for s in optimizer.state.values() if "step" in s]
    constant = all(
        not isinstance(v, torch.Tensor) or v.numel() == 0 or bool((v == v.reshape(-1)[0]).all())
        for state in optimizer.state.values()
        for v in state.values()
    )
    if len(steps) != len(optimizer.state) or any(steps) or not constant:
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
