"""Views of which some parameters stand still, or once did: the optimizer sees their parts as tensors of their own.

Plain PyTorch counts the updates of each parameter, and Adam's bias correction is by that count. A view has one count
for all of its parameters until some of them are frozen; from then on these have their own (``OptimView.numbers``).
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from deepspeed.zero.layout import Segment
from deepspeed.zero.optim_view import OptimView, copied, segments_of
from deepspeed.zero.unit import Unit

Frozen = dict[Unit, set[str]]  # by unit the names of the parameters that stand still


class Divided:
    """The views that an optimizer is shown (``shown``): ``views``, or pieces in place of those with parameters that are
    ``frozen``, which are left out, or have numbers of their own. It keeps state for these until ``join``.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, views: Sequence[OptimView], frozen: Frozen) -> None:
        self._cut = {id(view): _Cut(view, optimizer, frozen) for view in views if view.numbers or view.unit in frozen}
        self.shown = views
        if cut := self._cut:
            self.shown = [piece for v in views for piece in (cut[id(v)].show() if id(v) in cut else [v])]

    def join(self) -> None:
        """Give the views the state of their pieces."""
        for cut in self._cut.values():
            cut.join()


class _Cut:
    """Cut one view into runs of parameters with the same numbers. Those that stand still are shown only until the
    view has slots, which checkpoints need, and are put back.
    """

    def __init__(self, view: OptimView, optimizer: torch.optim.Optimizer, frozen: Frozen) -> None:
        self._states = vars(optimizer)["state"]  # the optimizer's own ``state`` would wait for this very update
        self._view, self._state = view, self._states.get(view.param) or {}
        self._numbers = _numbers(self._state, view.param)
        self._pieces: list[tuple[OptimView, torch.Tensor | None]] = []  # with the values to be put back
        still, segments = frozen.get(view.unit, set()), segments_of(view)
        if self._state and any(segment.name not in still for segment in segments):
            stops = [s.name for s in segments if s.name in still and s.name not in view.numbers]
            view.numbers |= dict.fromkeys(stops, self._numbers)
        for (stands, _), run in itertools.groupby(segments, lambda s: (s.name in still, id(view.numbers.get(s.name)))):
            if not (stands and self._state):
                piece = self._piece([*run])
                self._pieces.append((piece, piece.param.detach().clone() if stands else None))

    def show(self) -> Iterator[OptimView]:
        """Let the optimizer have the state of each piece."""
        for piece, _ in self._pieces:
            numbers = next(iter(piece.numbers.values()))
            if numbers.get("step", self._state):  # what has had no update gets a new state
                slots = {k: self._of(piece, v) for k, v in self._state.items() if _is_slot(v, self._view.param)}
                self._states[piece.param] = slots | {k: copied(v) for k, v in numbers.items()}
            yield piece

    def join(self) -> None:
        """Give the view what the optimizer has made of its pieces."""
        view = self._view
        for piece, before in self._pieces:
            made = self._states.pop(piece.param, {})
            for key in (key for key, value in made.items() if _is_slot(value, piece.param)):
                whole = self._state.setdefault(key, made[key].new_zeros(view.param.shape))
                self._of(piece, whole).copy_(made[key] if before is None else torch.zeros_like(made[key]))
            numbers = _numbers(made, piece.param)
            if before is not None:
                piece.param.detach().copy_(before)
                numbers |= {key: 0 * value for key, value in numbers.items() if key == "step"}
            if before is None and (piece.param.shape == view.param.shape or not view.numbers.keys() & piece.numbers):
                self._state |= numbers
                view.numbers = {k: v for k, v in view.numbers.items() if k not in piece.numbers}
            else:
                view.numbers |= dict.fromkeys(piece.numbers, numbers)
        if self._state:
            self._states[view.param] = self._state

    def _piece(self, run: list[Segment]) -> OptimView:
        view = self._view
        start, stop = max(run[0].offset, view.start), min(run[-1].stop, view.stop)
        numbers = {segment.name: view.numbers.get(segment.name, self._numbers) for segment in run}
        piece = OptimView(view.unit, view.group, start, stop, view.param, f"{view.name}[{start}:{stop}]", numbers)
        piece.param = nn.Parameter(self._of(piece, view.param.detach()))
        return piece

    def _of(self, piece: OptimView, values: torch.Tensor) -> torch.Tensor:
        first, last = piece.start - self._view.start, piece.stop - self._view.start
        return values if last - first == values.numel() else values[first:last]


def _numbers(state: dict[str, Any], param: torch.Tensor) -> dict[str, Any]:
    """Copy what is kept beside slots."""
    return {key: copied(value) for key, value in state.items() if not _is_slot(value, param)}


def _is_slot(value: Any, param: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == param.shape
