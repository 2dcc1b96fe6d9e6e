"""The rule of an optimizer over some of its views: from gradients new weights and slots, and PARAM in passing.

Parameters frozen after ``initialize`` stand still, as for an optimizer that finds no gradient of them: an update
changes neither their values nor what is kept for them, though momentum and decay of their neighbours go on.
"""

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from deepspeed.optim.base import GroupStep
from deepspeed.optim.host import Scalar
from deepspeed.tier.store import TierStore
from deepspeed.zero.layout import Segment
from deepspeed.zero.optim_view import OptimView, copied
from deepspeed.zero.param import requiring
from deepspeed.zero.plan import StateKind
from deepspeed.zero.unit import Unit

Groups = list[dict[str, Any]]  # the settings of an optimizer's groups, without parameters
Frozen = dict[Unit, list[Segment]]  # by unit the parameters that stand still
_Spans = list[tuple[int, int]]


def apply_rule(
    optimizer: torch.optim.Optimizer,
    views: Sequence[OptimView],
    step: Callable[[], object],
    factor: Scalar,
    *,
    source: torch.Tensor | None = None,
    skip: torch.Tensor | None = None,
    frozen: Frozen | None = None,
    apart: Mapping[Unit, TierStore] | None = None,
    undisturbed: bool = False,
) -> list[OptimView]:
    """Call ``step``, which updates ``views``, with their gradients (one view's may be ``source``) times ``factor``;
    returns those whose PARAM at rest the optimizer has written in the same pass. ``skip``, which only optimizers with
    ``skips_alone`` understand: a number on the device; where it is not 0 nothing changes. ``frozen``: if that was asked
    before. ``apart``: where the units' gradients are, and PARAM is rounded into what is free behind each.
    ``undisturbed``: no code of the user's runs in ``step``, as the caller knows.
    """
    places: Mapping[Unit, TierStore] = apart or {}
    frozen = frozen_since(views) if frozen is None else frozen
    # Asked of the class: an object that passes attributes on to an optimizer inside it has steps of its own.
    ours: Any = optimizer
    writes = hasattr(type(optimizer), "writing_outputs")
    outputs = _outputs(views, places, frozen) if writes else {}
    scales = _scales(views, factor) if undisturbed or (writes and ours.undisturbed()) else {}
    guard = FrozenGuard(optimizer, frozen)
    written: Any = ()
    try:
        for view in views:
            place = places.get(view.unit)
            piece = source if place is None else view.within(StateKind.GRAD, place.tensor)
            grad = view.gradient(factor, source=piece, plain=view.param in scales)
            if grad.dtype is not view.param.dtype:
                view.param.grad_dtype = None  # any
            view.param.grad = grad if guard.hold(view) else None
        asked: Any = contextlib.nullcontext(())
        if outputs or scales or skip is not None:
            asked = ours.writing_outputs(outputs, skip=skip, scales=scales, undisturbed=undisturbed)
        with asked as written:
            step()
    finally:
        guard.put_back()
        for view in views:
            view.param.grad = None
    return [view for view in views if view.param in written]


def apply_to_part(
    optimizer: GroupStep,
    views: Sequence[OptimView],
    groups: Groups,
    factor: Scalar,
    *,
    source: torch.Tensor | None = None,
    frozen: Frozen | None = None,
    apart: Mapping[Unit, TierStore] | None = None,
) -> list[OptimView]:
    """Apply the rule of one of this package's optimizers to ``views`` alone, with the settings ``groups``, whatever
    the optimizer's own are by now; as ``apply_rule``.
    """
    params: list[list[torch.Tensor]] = [[] for _ in groups]
    for view in views:
        params[view.group].append(view.param)
    theirs = [{**group, "params": some} for group, some in zip(groups, params, strict=True) if some]
    step = functools.partial(optimizer.update, theirs)
    return apply_rule(optimizer, views, step, factor, source=source, frozen=frozen, apart=apart, undisturbed=True)


def captured_groups(optimizer: torch.optim.Optimizer) -> Groups:
    """The settings of the groups as they are now, without parameters."""
    return [{k: copied(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def _outputs(
    views: Sequence[OptimView], places: Mapping[Unit, TierStore], frozen: Frozen
) -> dict[torch.Tensor, torch.Tensor]:
    """Where the optimizer may round weights to; not for units with frozen parameters, which are put back."""
    outputs = {view.param: view.output(places.get(view.unit)) for view in views if view.unit not in frozen}
    return {param: out for param, out in outputs.items() if out is not None}


def _scales(views: Sequence[OptimView], factor: Scalar) -> dict[torch.Tensor, Scalar]:
    """What the kernels multiply each gradient by: on the host a number, on a device one tensor for equal ones."""
    scales: dict[torch.Tensor, Scalar] = {}
    each: dict[tuple[float, bool], Scalar] = {}
    for view in views:
        key = view.unit.facts.after, view.param.device.type == "cpu"
        if key not in each:
            scale = factor * key[0]
            each[key] = float(scale) if key[1] else scale
        scales[view.param] = each[key]
    return scales


def frozen_since(views: Iterable[OptimView], before: Mapping[Unit, Collection[int]] | None = None) -> Frozen:
    """By unit, where there are any, the parameters that stand still: frozen, and not in the middle of the window, which
    has given them a gradient. The same answer on all ranks, whatever branches their batches have taken. ``before``:
    positions of those that earlier steps, of which the update is also, have given one.
    """
    still: Frozen = {}
    for unit in dict.fromkeys(view.unit for view in views):
        trains = unit.window.trained.union((before or {}).get(unit, ()))
        if len(trains) < len(unit.params):
            trains.update(requiring(unit.params))
            if segments := [s for i, s in enumerate(unit.layout.segments) if i not in trains]:
                still[unit] = segments
    return still


class FrozenGuard:
    """Of one call of ``optimizer``; ``frozen`` as by ``frozen_since``."""

    def __init__(self, optimizer: torch.optim.Optimizer, frozen: Frozen) -> None:
        self._frozen = frozen
        self._state = vars(optimizer).get("state", {})  # not by its door, which waits for this very update
        self._kept: list[tuple[OptimView, _Spans, list[torch.Tensor], list[str]]] = []

    def hold(self, view: OptimView) -> bool:
        """Whether the optimizer is to see ``view``; what of it must stand still is kept for ``put_back``. Once, when it
        makes the slots that checkpoints count on, it sees also what stands still as a whole.
        """
        if view.unit not in self._frozen:
            return True
        spans = _spans(view, self._frozen[view.unit])
        if not spans:
            return True
        whole = sum(hi - lo for lo, hi in _spans(view, view.unit.layout.segments))
        if sum(hi - lo for lo, hi in spans) == whole and self._state.get(view.param):
            return False
        slots = self._slots(view)
        parts = _parts([view.param, *slots.values()], spans)
        self._kept.append((view, spans, [part.clone() for part in parts], [*slots]))
        return True

    def put_back(self) -> None:
        """After the call. Slots that are new are as before a first gradient."""
        for view, spans, copies, known in self._kept:
            slots = self._slots(view)
            for part, values in zip(_parts([view.param, *map(slots.get, known)], spans), copies, strict=True):
                part.copy_(values)
            for part in _parts([slot for name, slot in slots.items() if name not in known], spans):
                part.zero_()

    def _slots(self, view: OptimView) -> dict[str, torch.Tensor]:
        state = self._state.get(view.param, {})
        return {k: v for k, v in state.items() if isinstance(v, torch.Tensor) and v.shape == view.param.shape}


def _spans(view: OptimView, segments: Iterable[Segment]) -> _Spans:
    """Where these parameters are in the view, as far as they are."""
    pairs = (view.unit.layout.overlap(segment, view.start, view.stop) for segment in segments)
    return [(lo - view.start, hi - view.start) for lo, hi in pairs if lo < hi]


def _parts(tensors: Iterable[torch.Tensor | None], spans: _Spans) -> list[torch.Tensor]:
    flat = [tensor.detach().reshape(-1) for tensor in tensors if tensor is not None]
    return [values[lo:hi] for values in flat for lo, hi in spans]
