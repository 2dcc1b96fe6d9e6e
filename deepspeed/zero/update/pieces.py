"""Views of which some parameters stand still, or once did: the optimizer sees their parts as tensors of their own.

Plain PyTorch counts the updates of each parameter, and Adam's bias correction is by that count. A view has one count
for all of its parameters until some of them are frozen; from then on these have their own (``OptimView.numbers``).
"""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from deepspeed.zero.layout import Segment
from deepspeed.zero.optim_view import OptimView, copied, segments_of
from deepspeed.zero.unit import Unit

Frozen = dict[Unit, list[Segment]]  # by unit the parameters that stand still


@contextlib.contextmanager
def divided(
    optimizer: torch.optim.Optimizer, views: Sequence[OptimView], frozen: Frozen
) -> Iterator[Sequence[OptimView]]:
    """Inside, ``optimizer`` keeps state for what is given: ``views``, or pieces in place of those with parameters that
    are ``frozen``, which are left out, or have numbers of their own. On leaving, the views have the state again.
    """
    cut = {id(view): _Cut(view, optimizer, frozen) for view in views if view.numbers or view.unit in frozen}
    if not cut:
        yield views
        return
    try:
        yield [shown for view in views for shown in (cut[id(view)].shown() if id(view) in cut else [view])]
    finally:
        for one in cut.values():
            one.join()


@dataclass
class _Piece:
    """Consecutive parameters with the same numbers. ``values``: those that stand still are to have again."""

    view: OptimView
    names: list[str]
    values: torch.Tensor | None


class _Cut:
    """The pieces of one view. What stands still is among them only until its slots are made, as checkpoints need it."""

    def __init__(self, view: OptimView, optimizer: torch.optim.Optimizer, frozen: Frozen) -> None:
        self._states = vars(optimizer)["state"]  # not by its door, which waits for this very update
        self._view, self._state = view, self._states.get(view.param) or {}
        still = {segment.name for segment in frozen.get(view.unit, ())}
        segments = segments_of(view)
        names = [segment.name for segment in segments]
        if self._state and not still.issuperset(names):
            stops = [name for name in names if name in still and name not in view.numbers]
            view.numbers |= dict.fromkeys(stops, self._numbers(self._state, view.param))
        runs = itertools.groupby(segments, lambda s: (s.name in still, id(view.numbers.get(s.name))))
        self._pieces = [self._piece([*run], still=stands) for (stands, _), run in runs if not (stands and self._state)]

    def shown(self) -> Iterator[OptimView]:
        """Let the optimizer have the state of each piece."""
        own = self._numbers(self._state, self._view.param)
        for piece in self._pieces:
            numbers = self._view.numbers.get(piece.names[0], own)
            if self._state and numbers.get("step", 1):  # without an update it makes a state of its own
                slots = {k: self._of(piece, v) for k, v in self._state.items() if _is_slot(v, self._view.param)}
                self._states[piece.view.param] = slots | {k: copied(v) for k, v in numbers.items()}
            yield piece.view

    def join(self) -> None:
        """Give the view what the optimizer has made of its pieces."""
        own = self._view.numbers
        for piece in self._pieces:
            made = self._states.pop(piece.view.param, {})
            for key, value in made.items():
                if _is_slot(value, piece.view.param):
                    self._take(piece, key, value)
            numbers = self._numbers(made, piece.view.param)
            if piece.values is not None:  # as before a first update
                piece.view.param.detach().copy_(piece.values)
                numbers |= {key: 0 * value for key, value in numbers.items() if key == "step"}
            whole = (piece.view.start, piece.view.stop) == (self._view.start, self._view.stop)
            if piece.values is not None or (piece.names[0] in own and not whole):
                own |= dict.fromkeys(piece.names, numbers)
                continue
            self._state |= numbers
            for name in piece.names:
                own.pop(name, None)
        if self._state:
            self._states[self._view.param] = self._state

    def _piece(self, run: list[Segment], *, still: bool) -> _Piece:
        view = self._view
        start, stop = max(run[0].offset, view.start), min(run[-1].stop, view.stop)
        values = view.param.detach()
        if (start, stop) != (view.start, view.stop):
            values = values[start - view.start : stop - view.start]
        name = f"{view.name}[{start}:{stop}]"
        piece = OptimView(view.unit, view.group, start, stop, nn.Parameter(values), name)
        return _Piece(piece, [segment.name for segment in run], values.clone() if still else None)

    def _of(self, piece: _Piece, slot: torch.Tensor) -> torch.Tensor:
        if piece.view.param.shape == slot.shape:
            return slot
        return slot[piece.view.start - self._view.start : piece.view.stop - self._view.start]

    def _take(self, piece: _Piece, key: str, value: torch.Tensor) -> None:
        if key not in self._state:
            self._state[key] = value.new_zeros(self._view.param.shape)
        part = self._of(piece, self._state[key])
        if piece.values is not None:
            part.zero_()
        elif part.data_ptr() != value.data_ptr():
            part.copy_(value)

    @staticmethod
    def _numbers(state: dict[str, Any], param: torch.Tensor) -> dict[str, Any]:
        """What is kept beside slots, each a copy."""
        return {key: copied(value) for key, value in state.items() if not _is_slot(value, param)}


def _is_slot(value: Any, param: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == param.shape
