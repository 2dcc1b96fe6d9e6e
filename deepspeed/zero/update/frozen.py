"""Parameters frozen after ``initialize`` stand still, as for an optimizer that finds no gradient of them: an update
changes neither their values nor what is kept for them, though momentum and decay of their neighbours go on.
"""

from collections.abc import Collection, Iterable, Mapping

import torch

from deepspeed.zero.layout import Segment
from deepspeed.zero.optim_view import OptimView
from deepspeed.zero.param import requiring
from deepspeed.zero.unit import Unit

Frozen = dict[Unit, list[Segment]]  # by unit the parameters that stand still
_Spans = list[tuple[int, int]]


def frozen_since(views: Iterable[OptimView], before: Mapping[Unit, Collection[int]] | None = None) -> Frozen:
    """By unit, where there are any, the parameters that stand still: frozen, and not in the middle of the window, which
    has given them a gradient. The same answer on all ranks, whatever branches their batches have taken. ``before``:
    positions of those that earlier steps, of which the update is also, have given one.
    """
    found: Frozen = {}
    for unit in dict.fromkeys(view.unit for view in views):
        trains = unit.trained.union((before or {}).get(unit, ()))
        if len(trains) < len(unit.params):
            trains.update(requiring(unit.params))
            if segments := [s for i, s in enumerate(unit.layout.segments) if i not in trains]:
                found[unit] = segments
    return found


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
