"""What the updates of an engine came to, some of which the device decides after the program has gone on."""

import copy
from typing import Any

from deepspeed.comm.collectives import AxisGroup, gather_objects
from deepspeed.errors import UsageError
from deepspeed.zero.update.apply import captured_groups
from deepspeed.zero.update.result import StepResult


class Outcomes:
    """Results of an engine's updates, in their order; ``hear`` takes in what the device has decided."""

    def __init__(self) -> None:
        self.last = StepResult()
        self.overflowed = False  # whether the last update that is known was left out
        self.skipped = 0  # updates left out, in all
        self._in_a_row = 0  # left out, up to the last update that is known
        self._culprit = ""  # of the first in that row, as far as this rank knows
        self._unheard: list[StepResult] = []

    def add(self, result: StepResult) -> None:
        """Take the result of an update that has just been made."""
        self.last = result
        self._unheard.append(result)

    def restore(self, norm: float | None) -> None:
        """Begin with ``norm`` as the last update's, as a checkpoint has it."""
        self.last, self._in_a_row = StepResult(norm), 0

    def hear(self, *, wait: bool = True) -> "Outcomes":
        """Take in the outcome of updates; without ``wait`` only as far as it is known."""
        while self._unheard and (wait or self._unheard[0].known()):
            result = self._unheard.pop(0)
            self.overflowed = result.overflow
            self.skipped += self.overflowed
            self._in_a_row = self._in_a_row + 1 if self.overflowed else 0
            self._culprit = result.culprit if self._in_a_row == 1 else self._culprit
            if self.overflowed and result.undo is not None:
                result.undo()
        return self

    def end_after(self, limit: int, job: AxisGroup, step: int) -> None:
        """Take in known outcomes; raise UsageError, on all ranks, after ``limit`` skips in a row (0: never).

        ``step`` is the number of the last update.
        """
        self.hear(wait=0 < limit <= self._in_a_row + len(self._unheard))
        if 0 < limit <= self._in_a_row:
            name = next(filter(None, gather_objects(self._culprit, job)), "an unknown parameter")
            raise UsageError(
                f"{self._in_a_row} updates in a row were skipped (anomalies.nonfinite_updates; 0: go on): since step "
                f"{step - self._in_a_row + 1}, when the gradient of {name} was not finite. Lower the "
                "learning rate, set gradient_clipping, or check the data and the loss for inf/nan"
            )

    def step_schedule(self, schedule: Any, optimizer: Any, options: dict[str, Any]) -> None:
        """Step ``schedule`` after an update that was applied. One that the device may still skip counts as applied
        until its outcome is known, before the next update, save or load. Then the schedule is put back, and the values
        that it has written into groups, where nobody else has changed them.
        """
        if not self.hear(wait=False)._unheard:
            if not self.overflowed:
                schedule.step(**options)
            return
        state, before = copy.deepcopy(schedule.state_dict()), captured_groups(optimizer)
        schedule.step(**options)
        after = captured_groups(optimizer)

        def put_back() -> None:
            schedule.load_state_dict(state)
            for group, old, new in zip(optimizer.param_groups, before, after, strict=True):
                group.update({key: value for key, value in old.items() if group.get(key) == new.get(key)})

        self._unheard[-1].undo = put_back
