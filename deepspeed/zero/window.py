"""What one rank has of one unit's gradients, from the first backward of an accumulation window to its step."""

from collections.abc import Sequence
from enum import Enum

import torch
from torch import nn

from deepspeed.comm import collectives
from deepspeed.errors import InvalidStateError
from deepspeed.zero.layout import FlatLayout
from deepspeed.zero.param import requiring


class GradState(Enum):
    """Gradient states: EMPTY; LOCAL a full-size sum here; REDUCED (also) the rest shard; COLLAPSED ready to step."""

    EMPTY = "empty"
    LOCAL = "local"
    REDUCED = "reduced"
    COLLAPSED = "collapsed"


LEGAL_MOVES: dict[GradState, set[GradState]] = {  # gradients may be dropped at any time, or stay
    GradState.EMPTY: {GradState.EMPTY, GradState.LOCAL, GradState.COLLAPSED},
    GradState.LOCAL: {GradState.EMPTY, GradState.LOCAL, GradState.REDUCED},
    GradState.REDUCED: {*GradState},
    GradState.COLLAPSED: {GradState.EMPTY, GradState.LOCAL, GradState.COLLAPSED},
}


class GradientWindow:
    """Accumulation window of one unit. ``partial``: the flat local sum before its reduction, or None. Positions index
    the unit's parameters. ``square``: squared norm of a rest gradient that is not on the device.
    """

    def __init__(self, unit: str, params: Sequence[nn.Parameter], layout: FlatLayout) -> None:
        self._unit, self._layout = unit, layout
        self._params: Sequence[nn.Parameter] = params
        self.state = GradState.EMPTY
        self.partial: torch.Tensor | None = None
        self.square: torch.Tensor | None = None
        self.filled = False  # the rest gradient holds something
        # Positions whose gradients are in ``partial`` (of these, those of the running backward: ``arrived``), and that
        self.fired, self.trained = set[int](), set[int]()  # required one in some backward of the window
        self.arrived = set[int]()
        self._done, self._done_task = set[int](), -1
        self._spare: torch.Tensor | None = None  # memory of a local sum, for the next one

    def move(self, state: GradState) -> None:
        if state not in LEGAL_MOVES[self.state]:
            raise InvalidStateError(f"unit {self._unit}: gradients cannot go from {self.state.value} to {state.value}")
        self.state = state

    def open(self, dtype: torch.dtype, device: torch.device, *, begin: torch.Tensor | None = None) -> torch.Tensor:
        """Return the full-size local sum, made of ``begin`` or zeros where none exists. EMPTY or REDUCED -> LOCAL."""
        if self.partial is None:
            if begin is None:
                begin, self._spare = self._spare, None
                if begin is None or begin.dtype is not dtype:
                    begin = collectives.fresh(self._layout.numel, dtype, device)
            self.partial = begin
            for start, stop in self._layout.gaps:
                self.partial[start:stop].zero_()
            self.fired.clear()
        self.move(GradState.LOCAL)
        return self.partial

    def keep_spare(self, partial: torch.Tensor) -> None:
        """Keep the memory of a reduced local sum for the next one."""
        self._spare = partial

    def note_packed(self, position: int) -> None:
        """Note that the gradient of one parameter is in the local sum."""
        self.fired.add(position)
        self.arrived.add(position)

    def take(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Give the local sum away, with zeros for missing gradients; where none exists, a zero sum of ``dtype``."""
        partial = self.open(dtype, device)
        segments, fired = self._layout.segments, [*sorted(self.fired), len(self._layout.segments)]
        for before, position in zip([-1, *fired], fired, strict=False):  # what lies between two that fired is one piece
            if position - before > 1:
                partial[segments[before + 1].offset : segments[position - 1].stop].zero_()
        self.partial = None
        self.fired.clear()
        self.arrived.clear()
        return partial

    def restore(self, partial: torch.Tensor, positions: set[int]) -> None:
        """Set ``partial`` (flat, zero in the gaps) as the local sum of the parameters at ``positions``."""
        self.partial, self.fired = partial, positions
        self.move(GradState.LOCAL)

    def fill(self) -> bool:
        """Note that the rest gradient will hold something; return whether it did before."""
        filled, self.filled = self.filled, True
        return filled

    def reset(self) -> None:
        """Drop the gradient; its memory stays for the next window."""
        self.partial = None
        for noted in (self.fired, self.arrived, self.trained):
            noted.clear()
        self.filled = False
        self.move(GradState.EMPTY)

    def note_ready(self, position: int, task: int, *, packed: bool) -> bool:
        """Note that parameter ``position`` got its gradient in graph task ``task``; ``packed``: it is in the local sum.
        Return True when all parameters have theirs from that task. Autograd finishes a gradient after the parameter's
        last use in the task, so no op still reads the weights.
        """
        if packed:
            self.note_packed(position)
        self._done, self._done_task = self._done if task == self._done_task else set(), task
        self._done.add(position)
        return len(self._done) == len(self._params)

    def note_required(self) -> None:
        """Note which parameters require a gradient in the backward that is over."""
        self.trained.update(requiring(self._params))

    def end_pass(self) -> None:
        """Note that no backward is under way: it is over, or an error has ended it."""
        self._done.clear()
        self.arrived.clear()

    def drop(self) -> None:
        """Free all memory, and drop the references to the parameters."""
        self._params = ()
        self.partial = self.square = self._spare = None
