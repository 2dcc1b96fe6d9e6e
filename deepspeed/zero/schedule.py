"""Recorded unit uses, and what they say about the near future. Pure.

One trace per phase ("train": forward and backward as one sequence; "eval"), so alternating train and eval passes keep
both. A use that the trace did not foresee resynchronises or, failing that, silences the forecast until the phase ends;
nothing is flushed and nothing is logged.
"""

from dataclasses import dataclass, field


@dataclass
class _Phase:
    trace: list[int] = field(default_factory=list)
    seen: list[int] = field(default_factory=list)
    position: int | None = 0


class Schedule:
    """``begin(phase)``, then ``use(unit)`` for each need in order, then ``end()``; forecasts in between.

    Phases nest: an eval pass between a forward and its backward suspends the train phase and resumes it afterwards.
    """

    def __init__(self) -> None:
        self._phases: dict[str, _Phase] = {}
        self._open: list[tuple[str, _Phase]] = []
        self.hits = 0
        self.uses = 0

    @property
    def phase(self) -> str | None:
        """Name of the phase that is recording now."""
        return self._open[-1][0] if self._open else None

    def begin(self, phase: str) -> None:
        """Start recording ``phase``; the phase that was recording is suspended."""
        now = self._phases.setdefault(phase, _Phase())
        now.seen = []
        now.position = 0
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
        if now.position < len(now.trace) and now.trace[now.position] == unit:
            now.position += 1
            self.hits += 1
            return
        try:
            now.position = now.trace.index(unit, now.position) + 1
        except ValueError:
            now.position = None

    def end(self) -> None:
        """Close the current phase: what was seen is the next forecast. The suspended phase, if any, goes on."""
        if self._open:
            _, now = self._open.pop()
            if now.seen:
                now.trace = now.seen

    def abandon(self) -> None:
        """Close all phases without learning from them (an error cut them short)."""
        self._open.clear()

    def upcoming(self) -> list[int]:
        """Forecast of the uses from here to the end of the phase; empty when there is none."""
        if not self._open or self._open[-1][1].position is None:
            return []
        now = self._open[-1][1]
        return now.trace[now.position :]

    def ahead(self, numel_of: list[int], *, first_numel: int, window_numel: int) -> list[int]:
        """Distinct upcoming units to fetch early: the first if it fits ``first_numel``, more while all fit ``window_numel``."""
        chosen: list[int] = []
        total = 0
        for unit in self.upcoming():
            if unit in chosen:
                continue
            total += numel_of[unit]
            if total > (window_numel if chosen else first_numel):
                break
            chosen.append(unit)
        return chosen

    def reuse_distance(self, unit: int, numel_of: list[int]) -> int | None:
        """Elements of other units needed before ``unit`` is needed again; None when that is not foreseen."""
        distance = 0
        for other in self.upcoming():
            if other == unit:
                return distance
            distance += numel_of[other]
        return None
