"""The last collectives of this rank: which, of what, for which unit, from which line of the user's.

Engines tell it of theirs; torch numbers those of every process group by itself, the user's too.
"""

import contextlib
import itertools
import sys
from collections import deque
from collections.abc import Callable
from types import CodeType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from deepspeed.accelerator.device import get_accelerator
from deepspeed.comm.hang.stacks import group_title, line_of, origin, unit_of

_KEPT = 64


class LedgerEntry(NamedTuple):
    """Record of one collective: its number in this process, its group, its tensor, the unit, and the user's line."""

    number: int
    group: str
    op: str
    numel: int
    dtype: torch.dtype
    unit: str
    place: tuple[CodeType, int] | None  # and the index of the instruction there

    def text(self) -> str:
        """Format the entry as ``all_gather of 4096 float32 (layers.3) on zero, train.py:41``."""
        unit = f" ({self.unit})" if self.unit else ""
        line = f", {line_of(self.place[0], _number(*self.place))}" if self.place else ""
        return f"{self.op} of {self.numel} {str(self.dtype).removeprefix('torch.')}{unit} on {self.group}{line}"


def _number(code: CodeType, instruction: int) -> int:
    """Return the line of the instruction at that byte."""
    lines = (line for start, stop, line in code.co_lines() if line is not None and start <= instruction < stop)
    return next(lines, code.co_firstlineno)


class Ledger:
    """Ring of the last collectives, with those under way. One per process, written by its engines."""

    def __init__(self) -> None:
        self.entries: deque[LedgerEntry] = deque(maxlen=_KEPT)
        self.events = 0  # collectives that began, and those that ended
        self._numbers = itertools.count(1)
        self._under_way: dict[int, tuple[LedgerEntry, Any]] = {}  # with the event behind which a device has done it
        self._device: int | None = None
        self._whose: dict[CodeType, tuple[bool, bool]] = {}  # whether it is a user's; whether it may know a unit

    def listener(self, group: str) -> Callable[[str, int, torch.dtype, int], Callable[[], None] | None]:
        """Return the function that ``AxisGroup.ledger`` calls for the collectives of one group."""

        def begin(op: str, numel: int, dtype: torch.dtype, size: int) -> Callable[[], None] | None:
            if size == 1:
                return None
            unit, place = self._origin(op)
            entry = LedgerEntry(next(self._numbers), group, op, numel, dtype, unit, place)
            self.entries.append(entry)
            self._under_way[entry.number] = entry, None
            if (oldest := next(iter(self._under_way))) <= entry.number - _KEPT:  # it has raised, and never ends
                self._under_way.pop(oldest, None)
            self.events += 1
            return lambda: self._end(entry)

        return begin

    def _end(self, entry: LedgerEntry) -> None:
        """Note that the host has waited; the device may finish much later, which only an event can tell."""
        self.events += 1
        if entry.number in self._under_way and not get_accelerator().is_synchronized_device():
            self._device, event = get_accelerator().current_device(), get_accelerator().Event()
            event.record()
            self._under_way[entry.number] = entry, event
        else:
            self._under_way.pop(entry.number, None)

    def _origin(self, op: str) -> tuple[str, tuple[CodeType, int] | None]:
        """Return the unit of the collective that begins, and the user's place in the code."""
        frame: Any = sys._getframe(2)
        unit, cached = "", self._whose
        while frame is not None:
            code = frame.f_code
            facts = cached.get(code)
            if facts is None:
                users, ours = (origin(code.co_filename) == owner for owner in ("user", "deepspeed"))
                ours = ours and ("unit" in code.co_varnames or code.co_filename.endswith("unit.py"))
                facts = cached[code] = users, ours
            if facts[0]:
                return unit, (code, frame.f_lasti)
            if facts[1] and not unit and op != "merge":  # that is about what all ask for
                unit = unit_of(frame)
            frame = frame.f_back
        return unit, None

    @property
    def waiting(self) -> LedgerEntry | None:
        """Return the oldest collective that has not ended; callable from any thread, whatever its device."""
        with contextlib.suppress(RuntimeError), get_accelerator().device(self._device):  # of a device that has failed
            for entry, event in list(self._under_way.values()):
                if event is None or not event.query():
                    return entry
                self._under_way.pop(entry.number, None)
        return None


def torch_numbers() -> dict[str, int] | None:
    """Return the number of collectives issued on each process group, by torch's count; None while that changes.

    (Private torch names: ``_world.pg_map``, ``_get_sequence_number_for_group``.)
    """
    numbers: dict[str, int] = {}
    try:
        for group in list(dist.distributed_c10d._world.pg_map):
            numbers[group_title(group)] = group._get_sequence_number_for_group()  # type: ignore[attr-defined]
    except (RuntimeError, ValueError):
        return None
    return numbers
