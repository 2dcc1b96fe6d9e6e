"""Advice where a script does not call ``engine.step()`` as the engine counts micro-batches."""

import weakref
from dataclasses import dataclass
from logging import WARNING
from typing import Any

import torch

from deepspeed.monitor.log import log_dist

_ADVICE = "call it after every backward(), or see set_gradient_accumulation_boundary()"


@dataclass
class StepCalls:
    """Warn once where ``step`` is not called as the engine counts, by the order of calls between two of them; and at
    the end of an engine, or of the process, where it was never called.
    """

    backwards: int = 0  # since the last call of ``step``
    pairs: int = 0  # of these with a forward before each
    outside: int = 0  # of those outside no_sync
    length: int = 1  # of the window
    stepped: bool = False  # ever
    schedule_at: int | None = None  # the last update by the optimizer's own ``step``
    alike: int = 0  # calls in a row that came only after a whole window
    _forward: bool = False
    _warned: bool = False

    def __post_init__(self) -> None:
        weakref.finalize(self, _tell_at_end, vars(self))  # which does not keep this alive

    def restart(self, *, stepped: bool = False) -> None:
        """Reset the counts of calls since the last ``step``."""
        self.backwards = self.pairs = self.outside = 0
        self.stepped |= stepped

    def forward(self) -> None:
        self._forward |= torch.is_grad_enabled()

    def backward(self, length: int, *, local: bool) -> None:
        """Note that a backward has begun, in a window of ``length`` calls of ``step``; ``local``: inside no_sync."""
        self.backwards += 1
        self.pairs += self._forward
        self.outside += self._forward and not local
        self.length, self._forward = length, False
        # Several losses of a micro-batch are legal, and so is a sum by hand of many micro-batches.
        if self.outside >= (max(4 * length, 32) if length > 1 else 512):
            self._warn(f"{self.outside} micro-batches have come without engine.step(): nothing is updated")

    def step(self, length: int) -> None:
        self.alike = self.alike + 1 if length > 1 and self.pairs == self.backwards == length else 0
        if self.alike >= length > 1:
            self._warn(
                f"engine.step() comes after every {length} micro-batches only, and as gradient_accumulation_steps is "
                f"{length} the engine updates at every {length}th call, after {length * length} micro-batches"
            )
        self.restart(stepped=True)

    def optimizer_step(self, schedule: Any) -> None:
        """Note an update by ``engine.optimizer.step()``; warn where the learning-rate schedule stands still."""
        place = getattr(schedule, "last_batch_iteration", getattr(schedule, "last_epoch", None))
        if place is not None and place == self.schedule_at:
            text = "engine.optimizer.step() does not move the learning-rate schedule, which stands still"
            self._warn(text, "call engine.step(), or step the schedule yourself")
        self.schedule_at = place

    def _warn(self, text: str, advice: str = _ADVICE) -> None:
        if not self._warned:
            log_dist(f"{text}; {advice}", level=WARNING)
        self._warned = self.stepped = True


def _tell_at_end(calls: dict[str, Any]) -> None:
    """Warn where an engine ends that has never updated."""
    if calls["outside"] > calls["length"] and not calls["stepped"]:
        log_dist(f"{calls['outside']} micro-batches, and engine.step() was never called: {_ADVICE}", level=WARNING)
