"""What was done, and what it says about the near future: unit uses on this rank, intervals of decisions on all. Pure.

Of unit uses there is one trace per phase ("train": forward and backward as one sequence; "eval"). A use that the trace
did not foresee resynchronises or, failing that, silences the forecast until the phase ends.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass
class _Phase:
    trace: list[int] = field(default_factory=list)
    seen: list[int] = field(default_factory=list)
    position: int | None = 0


class Schedule:
    """Forecast of unit uses: ``begin(phase)``, then ``use(unit)`` for each need in order, then ``end()``.

    Phases nest: an eval pass between a forward and its backward suspends the train phase and resumes it afterwards.
    """

    def __init__(self) -> None:
        self._phases: dict[str, _Phase] = {}
        self._open: list[tuple[str, _Phase]] = []
        self.hits = 0
        self.uses = 0

    @property
    def phase(self) -> str | None:
        """Return the name of the phase that is recording now, or None."""
        return self._open[-1][0] if self._open else None

    def begin(self, phase: str) -> None:
        """Start recording ``phase``; the phase that was recording is suspended."""
        now = self._phases.setdefault(phase, _Phase())
        now.seen, now.position = [], 0
        self._open.append((phase, now))

    def use(self, unit: int) -> None:
        """Record that ``unit`` is needed now and move the forecast behind it."""
        if not self._open:
            return
        now = self._open[-1][1]
        now.seen.append(unit)
        self.uses += 1
        if now.position is None:
            return
        self.hits += now.position < len(now.trace) and now.trace[now.position] == unit
        try:
            now.position = now.trace.index(unit, now.position) + 1
        except ValueError:
            now.position = None

    def end(self) -> None:
        """Close the current phase: its record is the next forecast. The suspended phase, if any, goes on."""
        if self._open:
            _, now = self._open.pop()
            if now.seen:
                now.trace = now.seen

    def abandon(self) -> None:
        """Close all phases without learning from them (an error cut them short)."""
        self._open.clear()

    def upcoming(self) -> Iterator[int]:
        """Return the predicted uses from here to the end of the phase. Read them before the next use."""
        now = self._open[-1][1] if self._open else _Phase()
        positions = range(len(now.trace) if now.position is None else now.position, len(now.trace))
        return map(now.trace.__getitem__, positions)

    def ahead(
        self, numel_of: list[int], *, window_numel: int, besides: Collection[int] = (), most: int = 7
    ) -> list[int]:
        """Return upcoming units to fetch early, not ``besides``: the next, more while all fit ``window_numel``."""
        chosen: list[int] = []
        total = 0
        for unit in self.upcoming():
            if unit not in chosen and unit not in besides:
                total += numel_of[unit]
                if len(chosen) == most or (chosen and total > window_numel):
                    break
                chosen.append(unit)
        return chosen

    def needed_within(self, unit: int, numel_of: list[int], limit: int) -> bool:
        """Tell whether ``unit`` is predicted to be needed again within ``limit`` elements of other units."""
        distance = 0
        for other in self.upcoming():
            if other == unit:
                return True
            distance += numel_of[other]
            if distance > limit:
                break
        return False


_REACH = 64  # intervals that are compared
_EQUAL = 2  # as many have to agree, at first


class IntervalPredictor:
    """Record intervals in the order in which they came, and predict the next one from that order.

    The follower of the longest earlier run of intervals equal to the latest ones is predicted, if enough of them agree:
    two, twice as many after each forecast that was wrong, one less after each that was right.
    """

    def __init__(self) -> None:
        self._past: list[tuple[Any, ...] | None] = []
        self._caution = _EQUAL

    def close(self, interval: tuple[Any, ...] | None, *, predicted: bool) -> None:
        """Append the interval that has ended, None: not to be learnt; ``predicted``: it had a forecast."""
        if predicted:
            self._caution = min(2 * self._caution, _REACH // 2) if interval is None else max(_EQUAL, self._caution - 1)
        interned = next((p for p in reversed(self._past) if p == interval), interval)  # equal ones are one object
        self._past = [*self._past[-2 * _REACH :], interned]

    def forecast(self) -> tuple[Any, ...]:
        """Return the next interval; empty when none is predicted."""
        past, longest, follower = self._past, 0, None
        for end in range(len(past) - 1, 0, -1):
            length, most = 0, min(end, _REACH)
            while length < most and past[end - 1 - length] is past[-1 - length] is not None:
                length += 1
            if length > longest:
                longest, follower = length, past[end]
            if longest == _REACH:
                break
        return follower if follower is not None and longest >= self._caution else ()
