"""How DeepSpeed cuts parameters over ranks, for reading its files and for writing them.

Levels 1 and 2 lay a whole optimizer group end to end, pad it and cut it into columns, one per rank. Level 3 cuts every
parameter into rows of equal length, one per rank, and joins a rank's rows, in sub-groups.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

Members = Sequence[tuple[str, int]]  # (name, elements) of parameters, in flattening order


class Slice(NamedTuple):
    """Elements [lo, hi) of parameter ``name`` lie from ``at`` on in flat tensor ``part`` of ``rank``."""

    name: str
    lo: int
    hi: int
    rank: int
    part: int
    at: int


def column_width(members: Members, world: int) -> int:
    """Elements of a column, of which all ranks together have a multiple of 2 x ``world``."""
    return -(-sum(numel for _, numel in members) // (2 * world)) * 2


def row_width(numel: int, world: int) -> int:
    """Elements of a parameter's row, the last rank's padded."""
    return -(-numel // world)


def columns(
    members: Members, part: int, *, width: int, world: int, gaps: Sequence[int] | None = None
) -> Iterator[Slice]:
    """Levels 1 and 2: a group, which is flat tensor ``part`` of every rank. ``gaps``: padding after each parameter."""
    offset = 0
    for (name, numel), gap in zip(members, gaps or [0] * len(members), strict=True):
        for rank in range(world):
            lo, hi = max(offset, rank * width), min(offset + numel, (rank + 1) * width)
            if lo < hi:
                yield Slice(name, lo - offset, hi - offset, rank, part, lo - rank * width)
        offset += numel + int(gap)


def rows(members: Members, part: int, world: int) -> Iterator[Slice]:
    """Level 3: a sub-group, which is flat tensor ``part`` of every rank."""
    at = 0
    for name, numel in members:
        width = row_width(numel, world)
        for rank, lo in enumerate(range(0, numel, width or 1)):
            yield Slice(name, lo, min(numel, lo + width), rank, part, at)
        at += width


def sub_groups(members: Members, world: int, limit: int) -> list[list[tuple[str, int]]]:
    """Level 3: runs of a group's parameters whose rows together reach ``limit`` elements."""
    runs: list[list[tuple[str, int]]] = []
    filled = limit
    for member in members:
        if filled >= limit:
            runs.append([])
            filled = 0
        runs[-1].append(member)
        filled += row_width(member[1], world)
    return runs
