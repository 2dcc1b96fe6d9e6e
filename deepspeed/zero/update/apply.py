"""The rule of an optimizer over some of its views: from gradients new weights and slots, and PARAM in passing.

Parameters frozen after ``initialize`` stand still, as for an optimizer that finds no gradient of them: an update
changes neither their values nor what is kept for them (``pieces``), though their neighbours train on.
"""

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from deepspeed.optim.base import GroupStep
from deepspeed.optim.host import Scalar
from deepspeed.tier.store import TierStore
from deepspeed.zero.optim_view import OptimView, copied
from deepspeed.zero.param import requiring
from deepspeed.zero.plan import StateKind
from deepspeed.zero.unit import Unit
from deepspeed.zero.update.partial import by_group, step_over
from deepspeed.zero.update.pieces import Divided, Frozen

Groups = list[dict[str, Any]]  # the settings of an optimizer's groups, without parameters


def apply_rule(
    optimizer: torch.optim.Optimizer,
    views: Sequence[OptimView],
    step: Callable[[Sequence[OptimView]], object],
    factor: Scalar,
    *,
    source: torch.Tensor | None = None,
    skip: torch.Tensor | None = None,
    frozen: Frozen | None = None,
    apart: Mapping[Unit, TierStore] | None = None,
    undisturbed: bool = False,
) -> list[OptimView]:
    """Call ``step``, which updates ``views`` or pieces of them, with their gradients (one view's may be ``source``)
    times ``factor``; return the views whose PARAM at rest the optimizer has written in the same pass. ``skip``, which
    only optimizers with ``skips_alone`` understand: a number on the device; nothing changes where it is not 0.
    ``frozen``: result of ``frozen_since``, if known. ``apart``: the units' gradients; PARAM is rounded into the free
    memory behind each. ``undisturbed``: the caller knows that no code of the user's runs in ``step``.
    """
    places: Mapping[Unit, TierStore] = apart or {}
    frozen = frozen_since(views) if frozen is None else frozen
    # Asked of the class: an object that passes attributes on to an optimizer inside it has steps of its own.
    ours: Any = optimizer
    writes = hasattr(type(optimizer), "writing_outputs")
    outputs = _outputs(views, places, frozen) if writes else {}
    written: Any = ()
    divided = Divided(optimizer, views, frozen)
    try:
        shown = divided.show()
        scales = _scales(shown, factor) if undisturbed or (writes and ours.undisturbed()) else {}
        for view in shown:
            place = places.get(view.unit)
            part = _part_of(source, views[0], view) if place is None else view.within(StateKind.GRAD, place.tensor)
            grad = view.gradient(factor, source=part, plain=view.param in scales)
            if grad.dtype is not view.param.dtype:
                view.param.grad_dtype = None  # any
            view.param.grad = grad
        asked: Any = contextlib.nullcontext(())
        if outputs or scales or skip is not None:
            asked = ours.writing_outputs(outputs, skip=skip, scales=scales, undisturbed=undisturbed)
        with asked as written:
            step(shown)
    finally:
        divided.join()
        for view in divided.shown:
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
    """Apply the rule of one of this package's optimizers to ``views`` alone, as ``apply_rule`` does, with the settings
    ``groups``, whatever the optimizer's own are by now.
    """

    def step(shown: Sequence[OptimView]) -> None:
        pairs = zip(groups, by_group(shown, len(groups)), strict=True)
        optimizer.update([{**group, "params": params} for group, params in pairs if params])

    return apply_rule(optimizer, views, step, factor, source=source, frozen=frozen, apart=apart, undisturbed=True)


def apply_whole(
    optimizer: torch.optim.Optimizer, views: Sequence[OptimView], factor: Scalar, **facts: Any
) -> list[OptimView]:
    """Apply the rule by one call of the optimizer's own ``step``, which hooks of the user's see; as ``apply_rule``."""

    def step(shown: Sequence[OptimView]) -> None:
        if shown is views:
            optimizer.step()
        else:
            step_over(optimizer, by_group(shown, len(optimizer.param_groups)))

    return apply_rule(optimizer, views, step, factor, **facts)


def captured_groups(optimizer: torch.optim.Optimizer) -> Groups:
    """Copy the current settings of the groups, without parameters."""
    return [{k: copied(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def _outputs(
    views: Sequence[OptimView], places: Mapping[Unit, TierStore], frozen: Frozen
) -> dict[torch.Tensor, torch.Tensor]:
    """Return the memory that the optimizer may round each view's weights to; none for views that it sees in pieces."""
    whole = (view for view in views if not view.missed and view.unit not in frozen)
    outputs = {view.param: view.output(places.get(view.unit)) for view in whole}
    return {param: out for param, out in outputs.items() if out is not None}


def _part_of(source: torch.Tensor | None, view: OptimView, piece: OptimView) -> torch.Tensor | None:
    if source is None or piece is view:
        return source
    return source.view(-1)[piece.start - view.start : piece.stop - view.start]


def _scales(views: Sequence[OptimView], factor: Scalar) -> dict[torch.Tensor, Scalar]:
    """Return the factor of each gradient for the kernels: on the host a number, on a device a tensor per value."""
    scales: dict[torch.Tensor, Scalar] = {}
    cached: dict[tuple[float, bool], Scalar] = {}
    for view in views:
        key = view.unit.facts.after, view.param.device.type == "cpu"
        if key not in cached:
            scale = factor * key[0]
            cached[key] = float(scale) if key[1] else scale
        scales[view.param] = cached[key]
    return scales


def frozen_since(views: Iterable[OptimView], before: Mapping[Unit, Collection[int]] | None = None) -> Frozen:
    """Return, by unit, the parameters that stand still: frozen, and without a gradient in the open window. Units
    without any are left out. The answer is equal on all ranks, whatever branches their batches have taken. ``before``:
    positions of parameters that got a gradient in earlier steps of the same update.
    """
    still: Frozen = {}
    for unit in dict.fromkeys(view.unit for view in views):
        trains = unit.window.trained.union((before or {}).get(unit, ()))
        if len(trains) < len(unit.params):
            trains.update(requiring(unit.params))
            if names := {s.name for i, s in enumerate(unit.layout.segments) if i not in trains}:
                still[unit] = names
    return still
