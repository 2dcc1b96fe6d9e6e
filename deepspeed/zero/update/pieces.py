"""Pieces of views: an optimizer sees apart the parameters that train, where others of their view are or were frozen.

Plain PyTorch counts the updates of each parameter, and Adam's bias correction is by that count. A view has one count
for all of its parameters; those that were frozen for a while have missed some of it (``OptimView.missed``).
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from deepspeed.zero.layout import Segment
from deepspeed.zero.optim_view import OptimView, copied, segments_of
from deepspeed.zero.unit import Unit

Frozen = dict[Unit, set[str]]  # by unit the names of the parameters that stand still


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
    """Cut one view into runs of parameters with the same count. Those that stand still are shown only until the view
    has slots, which checkpoints need: as zeros, so that the slots are those of no update, and are put back.
    """

    def __init__(self, view: OptimView, optimizer: torch.optim.Optimizer, frozen: Frozen) -> None:
        self._states = vars(optimizer)["state"]  # the optimizer's own ``state`` would wait for this very update
        self._view, self._state = view, self._states.get(view.param) or {}
        self._missed = view.missed if self._state else {}  # a client may have cleared it
        still, self._segments = frozen.get(view.unit, set()), segments_of(view)
        runs = itertools.groupby(self._segments, lambda s: (s.name in still, self._missed.get(s.name, 0)))
        self._pieces = [self._piece([*run], still=stands) for (stands, _), run in runs if not (stands and self._state)]

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
