"""The rule of an optimizer over some of its views: from gradients new weights and slots, and PARAM in passing.

Parameters frozen after ``initialize`` stand still, as for an optimizer that finds no gradient of them: an update
changes neither their values nor what is kept for them, though their neighbours train on. So the optimizer sees apart,
as *pieces* of a view, the parameters that train where others of their view are or were frozen. Plain PyTorch counts the
updates of each parameter, and Adam's bias correction is by that count. A view has one count for all of its parameters;
those that were frozen for a while have missed some of it (``OptimView.missed``).
"""

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from deepspeed.optim.base import GroupStep
from deepspeed.optim.host import Scalar
from deepspeed.tier.store import TierStore
from deepspeed.zero.layout import Granularity, Segment
from deepspeed.zero.optim_view import OptimView, copied, segments_of
from deepspeed.zero.param import requiring
from deepspeed.zero.plan import StateKind
from deepspeed.zero.unit import Unit

Groups = list[dict[str, Any]]  # the settings of an optimizer's groups, without parameters
Frozen = dict[Unit, set[str]]  # by unit the names of the parameters that stand still


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
            part, base = source, views[0].start
            if source is not None:
                part = source.view(-1)[view.start - base : view.stop - base]
            elif (place := places.get(view.unit)) is not None:
                part = view.within(StateKind.GRAD, place.tensor)
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


def by_group(views: Iterable[OptimView], count: int) -> list[list[torch.Tensor]]:
    """Sort the tensors of ``views`` into one list for each of ``count`` groups."""
    lists: list[list[torch.Tensor]] = [[] for _ in range(count)]
    for view in views:
        lists[view.group].append(view.param)
    return lists


def step_over(optimizer: torch.optim.Optimizer, lists: Sequence[list[torch.Tensor]]) -> None:
    """Call ``step`` once so that it sees of each group only the parameters in one of ``lists``."""
    groups = optimizer.param_groups
    before = [group["params"] for group in groups]
    for group, params in zip(groups, lists, strict=True):
        group["params"] = params
    try:
        optimizer.step()
    finally:
        for group, params in zip(groups, before, strict=True):
            group["params"] = params


class Divided:
    """Divide ``views`` where a parameter is ``frozen`` or has missed updates. ``optimizer`` keeps its state for the
    pieces from ``show`` to ``join``, and for the views otherwise.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, views: Sequence[OptimView], frozen: Frozen) -> None:
        self._cut = {id(view): _Cut(view, optimizer, frozen) for view in views if view.missed or view.unit in frozen}
        self.shown = views

    def show(self) -> Sequence[OptimView]:
        """Return the views without those that are divided, and the pieces that train in place of these."""
        if cut := self._cut:
            self.shown = [piece for v in self.shown for piece in (cut[id(v)].show() if id(v) in cut else [v])]
        return self.shown

    def join(self) -> None:
        """Move the state of the pieces to their views. Also after an error in ``show``."""
        for cut in self._cut.values():
            cut.join()


class _Cut:
    """Cut one view into runs of parameters with the same count. Those that stand still beside others are shown only
    until the view has slots, which it has for all: as zeros, so that the slots are those of no update, and are put
    back. A parameter that is a view of its own has none before its first update, as in plain PyTorch.
    """

    def __init__(self, view: OptimView, optimizer: torch.optim.Optimizer, frozen: Frozen) -> None:
        self._states = vars(optimizer)["state"]  # the optimizer's own ``state`` would wait for this very update
        self._view, self._state = view, self._states.get(view.param) or {}
        self._missed = view.missed if self._state else {}  # a client may have cleared it
        still, self._segments = frozen.get(view.unit, set()), segments_of(view)
        runs = itertools.groupby(self._segments, lambda s: (s.name in still, self._missed.get(s.name, 0)))
        hides = self._state or view.unit.layout.granularity is Granularity.PARAMETER
        self._pieces = [self._piece([*run], still=stands) for (stands, _), run in runs if not (stands and hides)]

    def show(self) -> list[OptimView]:
        """Give the optimizer the state of each piece; return the pieces."""
        for piece, names, before in self._pieces:
            if before is not None:
                piece.param.detach().zero_()
            if self._state and piece is not self._view:
                state = {k: self._of(piece, v) if self._is_slot(k, v) else copied(v) for k, v in self._state.items()}
                if "step" in state:
                    state["step"] -= self._missed.get(names[0], 0)
                self._states[piece.param] = state
        return [piece for piece, *_ in self._pieces]

    def join(self) -> None:
        """Move slots and counts of the pieces to the view."""
        view, whole = self._view, self._state
        last = float(whole.get("step", 0))
        counts = {segment.name: last - self._missed.get(segment.name, 0) for segment in self._segments}
        for piece, names, before in self._pieces:
            if before is not None:
                piece.param.detach().copy_(before)
            made = self._states.get(view.param, {}) if piece is view else self._states.pop(piece.param, {})
            counts |= dict.fromkeys(names, 0.0 if before is not None else float(made.get("step", counts[names[0]])))
            for key, value in made.items():
                if piece is view or not isinstance(value, torch.Tensor) or value.shape != piece.param.shape:
                    whole[key] = value
                else:
                    slot = whole.setdefault(key, value.new_zeros(view.param.shape))
                    self._of(piece, slot).copy_(value)
        if whole:
            self._states[view.param] = whole
        top = max(counts.values())
        view.missed = (
            {name: int(top - count) for name, count in counts.items() if count < top} if "step" in whole else {}
        )
        if "step" in whole:
            step = whole["step"]
            whole["step"] = torch.full_like(step, top) if isinstance(step, torch.Tensor) else type(step)(top)

    def _piece(self, run: list[Segment], *, still: bool) -> tuple[OptimView, list[str], torch.Tensor | None]:
        """Return the piece, the names of its parameters, and the values that it is to have again if it stands still."""
        view, piece = self._view, self._view
        start, stop = max(run[0].offset, view.start), min(run[-1].stop, view.stop)
        if len(run) < len(self._segments):
            piece = OptimView(view.unit, view.group, start, stop, view.param, f"{view.name}[{start}:{stop}]")
            piece.param = nn.Parameter(self._of(piece, view.param.detach()))
        return piece, [segment.name for segment in run], piece.param.detach().clone() if still else None

    def _of(self, piece: OptimView, values: torch.Tensor) -> torch.Tensor:
        return values[piece.start - self._view.start : piece.stop - self._view.start]

    def _is_slot(self, key: str, value: Any) -> bool:
        return key != "step" and isinstance(value, torch.Tensor) and value.shape == self._view.param.shape
