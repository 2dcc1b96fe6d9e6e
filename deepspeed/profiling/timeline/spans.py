"""Spans of one rank in time: by the host's clock, or on a device by events that are read when it has passed them."""

import time
from collections.abc import Callable, Iterable
from typing import Any

from deepspeed.accelerator.device import get_accelerator

PHASES, COMPUTE, WAITS, COLLECTIVES, TIERS, PREFETCH = range(6)  # rows of a trace, from the top
SAMPLED = ("wait_ms", "communication_ms", "prefetch_hits", "prefetch_misses", "sent_bytes")  # of updates noted alone
ROWS = ("phases", "compute", "waits", "collectives", "tier transfers", "prefetch")


# Something that lasted: row, name, two marks of a clock (the second None: a moment), and facts shown beside it. A plain
# tuple, of which a step has many: quick to make, and nothing that the garbage collection has to follow.
TimedSpan = tuple[int, str, Any, Any, dict[str, Any] | None]


class MarkClock:
    """Mark moments of running work; here, computation is over when its call returns."""

    mark: Callable[[], Any] = staticmethod(time.perf_counter_ns)  # now; on a device, where the current stream is now

    def known(self, mark: Any) -> bool:
        """Return whether that moment has passed."""
        return True

    def between_ns(self, begin: Any, end: Any) -> int:
        """Return the nanoseconds between two moments that have passed."""
        return int(end - begin)

    def sync(self) -> tuple[Any, int]:
        """Return a mark, and the host's clock (``perf_counter_ns``) at that moment."""
        now = time.perf_counter_ns()
        return now, now


class DeviceClock(MarkClock):
    """Mark moments by events on the current stream; only ``sync`` waits. Host-only moments cannot be told apart."""

    def mark(self) -> Any:
        event = get_accelerator().Event(enable_timing=True)
        event.record()
        return event

    def known(self, mark: Any) -> bool:
        """Return whether the device has passed the event."""
        return bool(mark.query())

    def between_ns(self, begin: Any, end: Any) -> int:
        """Return nanoseconds as the device measured them, to about a microsecond within seconds of each other."""
        return round(begin.elapsed_time(end) * 1e6)

    def sync(self) -> tuple[Any, int]:
        """Return an event that has passed, and the host's clock at that moment."""
        event = self.mark()
        event.synchronize()
        return event, time.perf_counter_ns()


def clock_for(device: str) -> MarkClock:
    """Return the clock of computation on that type of device."""
    return MarkClock() if device == "cpu" else DeviceClock()


def union_ns(intervals: Iterable[tuple[int, int]]) -> int:
    """Return how long at least one of the (begin, end) intervals lasts."""
    total, until = 0, -(1 << 62)
    for begin, end in sorted(intervals):
        if end > until:
            total += end - (begin if begin > until else until)
            until = end
    return total


class StepSpans:
    """Hold the spans of one update from its ``begin`` on, at most ``most``, and counts."""

    def __init__(self, clock: MarkClock, begin: Any, most: int) -> None:
        self.clock, self.begin, self.most = clock, begin, most
        self.end: Any = None
        self.spans: list[TimedSpan] = []
        self.left_out = self.hits = self.misses = self.bytes_sent = 0
        self.number = 0
        self.noted = True  # else phases alone are known of it

    def add(self, row: int, name: str, begin: Any, end: Any, facts: dict[str, Any] | None = None) -> None:
        """Add a span if there is room, else count it in ``left_out``."""
        if len(self.spans) < self.most:
            self.spans.append((row, name, begin, end, facts))
        else:
            self.left_out += 1

    def known(self) -> bool:
        """Return whether the whole update has passed; the span begun last may end last."""
        past = self.end is not None and self.clock.known(self.end)
        return past and (isinstance(self.end, int) or all(map(self._over, reversed(self.spans))))

    def _over(self, span: TimedSpan) -> bool:
        _, _, begin, end, _ = span
        return isinstance(begin, int) or self.clock.known(begin if end is None else end)

    def summary(self) -> dict[str, float]:
        """Return milliseconds, once ``known``: the step, each phase and the time outside phases; if ``noted``, also
        collectives under way, and waits, which nothing hid. ``prefetch_hits`` and ``prefetch_misses`` count uses of
        units that were on their way or there, and that had to be asked for; ``sent_bytes``: sizes of collectives.
        """
        since, start = self.clock.between_ns, self.begin
        whole, phases = since(start, self.end), dict[str, int]()
        rows: dict[int, list[tuple[int, int]]] = {WAITS: [], COLLECTIVES: []}
        for row, name, begin, end, _ in self.spans:
            if row == PHASES:
                phases[name] = phases.get(name, 0) + since(begin, end)
            elif row in rows:  # what is measured on the host has its moments as numbers
                host = isinstance(begin, int)
                rows[row].append((begin, end) if host else (since(start, begin), since(start, end)))
        wait, flight = union_ns(rows[WAITS]), union_ns(rows[COLLECTIVES] + rows[WAITS])
        times = {"total_ms": whole, **{f"{name}_ms": ns for name, ns in phases.items()}}
        times |= {"other_ms": max(0, whole - sum(phases.values()))}
        counts = dict[str, int]()
        if self.noted:
            times |= {"wait_ms": wait, "communication_ms": flight}
            counts |= {"prefetch_hits": self.hits, "prefetch_misses": self.misses, "sent_bytes": self.bytes_sent}
        return {name: ns / 1e6 for name, ns in times.items()} | counts
