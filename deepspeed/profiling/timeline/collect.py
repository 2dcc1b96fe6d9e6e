"""One trace of all ranks, between two updates: their clocks compared, their spans sent to rank 0, which writes them."""

import gzip
import json
from collections.abc import Iterator, Sequence
from typing import Any

from deepspeed.comm.collectives import AxisGroup, gather_objects
from deepspeed.comm.point_to_point import Wire
from deepspeed.profiling.timeline.spans import COLLECTIVES, ROWS, TIERS, MarkClock, StepSpans
from deepspeed.profiling.timeline.tracefile import TraceFile, lanes

# One span for the journey: row, name, begin and length in nanoseconds (None: a moment), facts.
Row = tuple[int, str, int, int | None, dict[str, Any] | None]
_Offset = tuple[int, int]  # from the first rank's clock, and when


def on_first_clock(moment_ns: int, before: _Offset, after: _Offset) -> int:
    """Convert a moment of this rank to the first rank's clock; clocks are taken to drift evenly between comparisons."""
    (first, begin), (last, end) = before, after
    share = (moment_ns - begin) / (end - begin) if end > begin else 0.0
    return moment_ns - first - round((last - first) * share)


def rows_of(
    steps: Sequence[StepSpans], clock: MarkClock, base: tuple[Any, int], offsets: tuple[_Offset, _Offset]
) -> Iterator[Row]:
    """Yield the spans of ``steps``, which have all passed, in first-rank time. ``base``: see ``MarkClock.sync``."""
    mark, base_ns = base

    def at(moment: Any) -> int:
        return on_first_clock(base_ns + clock.between_ns(mark, moment), *offsets)

    for step in steps:
        begin = at(step.begin)
        yield 0, f"step {step.number}", begin, at(step.end) - begin, None
        for row, name, first, last, facts in step.spans:
            begin = at(first)
            yield row, name, begin, None if last is None else at(last) - begin, facts


def write_trace(path: str, title: str, rows: list[Row], group: AxisGroup, left_out: int) -> None:
    """Write every rank's ``rows`` to ``path``, by ``title``; ``left_out`` had no room. Collective. Raises OSError."""
    content = json.dumps([title, rows, left_out]).encode()
    begins = gather_objects(min((row[2] for row in rows), default=None), group)
    if group.index and not group.alike:
        Wire(group).number(0)  # its turn
        Wire(group).send_bytes(gzip.compress(content, 1), 0)
        return
    begin_ns = min((begin for begin in begins if begin is not None), default=0)  # of all: no moment is before it
    parts = _parts(content, group)
    try:
        with TraceFile(path) as file:
            for rank, (name, theirs, lost) in parts:
                _write_rank(file, rank, name, theirs, begin_ns, lost)
    finally:
        for _ in parts:  # what the others have to send
            pass


def _parts(content: bytes, group: AxisGroup) -> Iterator[tuple[int, Any]]:
    yield 0, json.loads(content)
    for rank in range(1, 1 if group.alike else group.size):
        Wire(group).send_number(0, rank)
        yield rank, json.loads(gzip.decompress(Wire(group).bytes(rank)))


def _write_rank(file: TraceFile, process: int, title: str, rows: list[Row], begin_ns: int, lost: int) -> None:
    """Write one process of the trace; spans that overlap in a row get rows of their own."""
    places: dict[int, list[Row]] = {}
    for row in sorted(rows, key=lambda row: (row[2], -(row[3] or 0))):
        places.setdefault(row[0], []).append(row)
    names: list[str] = []
    events: list[tuple[int, Row]] = []
    for kind, title_of in enumerate(ROWS):
        spans = places.get(kind, [])
        several = kind in (COLLECTIVES, TIERS)
        taken = lanes((r[2], r[2] + (r[3] or 0)) for r in spans) if several else [0] * len(spans)
        events += [(len(names) + lane, row) for lane, row in zip(taken, spans, strict=True)]
        names += [title_of] * max(1, 1 + max(taken, default=0))
    file.process(process, f"{title}; {lost} spans had no room" if lost else title, names)
    for place, (kind, name, at_ns, length, facts) in events:
        at_us = (at_ns - begin_ns) / 1e3
        if length is None:
            file.instant(process, place, name, ROWS[kind], at_us, facts or {})
        else:
            file.span(process, place, name, ROWS[kind], at_us, length / 1e3, facts or {})
