"""Parts of global tensors. A span is flat elements, row-major, of a rectangular region; any layout is a set of them."""

import bisect
import itertools
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import NamedTuple

_LARGEST = 1 << 62


class Region(NamedTuple):
    """Rectangular part of a global tensor: of ``shape``, beginning at index ``start``."""

    start: tuple[int, ...]
    shape: tuple[int, ...]


class Span(NamedTuple):
    """Elements [lo, hi), in row-major order, of ``region`` (None: of the whole tensor)."""

    lo: int
    hi: int
    region: Region | None = None


def bounds(numel: int, parts: int) -> list[int]:
    """Return the ``parts`` + 1 edges that cut ``numel`` elements into ``parts`` parts that differ by at most one."""
    length, more = divmod(numel, parts)
    return [part * length + min(part, more) for part in range(parts + 1)]


def widths(edges: Sequence[int]) -> list[int]:
    """Return the sizes of the parts between ``edges``."""
    return [stop - start for start, stop in zip(edges, edges[1:], strict=False)]


def spans_of(regions: Iterable[Region], lo: int, hi: int) -> Iterator[tuple[int, int, Span]]:
    """Split elements [lo, hi) of ``regions``, flattened one after the other: yield the part [lo, hi) of each, and its
    span of the global tensor.
    """
    at = 0
    for region in regions:
        end = at + prod(region.shape)
        if max(lo, at) < min(hi, end):
            yield max(lo, at), min(hi, end), Span(max(lo, at) - at, min(hi, end) - at, region)
        at = end


def runs(shape: tuple[int, ...], a: Span, b: Span) -> Iterator[tuple[int, int, int]]:
    """Yield the runs that two spans of a tensor of ``shape`` share, ascending: start in each span, and length."""
    one, two = (s.region or Region((0,) * len(shape), shape) for s in (a, b))
    if one == two:
        if max(a.lo, b.lo) < min(a.hi, b.hi):
            yield max(a.lo, b.lo), max(a.lo, b.lo), min(a.hi, b.hi) - max(a.lo, b.lo)
        return
    start = [max(pair) for pair in zip(one.start, two.start, strict=True)]
    stop = [min(s + n, t + m) for s, n, t, m in zip(*one, *two, strict=True)]
    part = [max(0, e - s) for s, e in zip(start, stop, strict=True)]
    # Trailing dimensions that both regions have wholly in common are contiguous together with the one before them.
    cut = len(part)
    while cut > 1 and part[cut - 1] == one.shape[cut - 1] == two.shape[cut - 1]:
        cut -= 1
    numel, outer = prod(part[cut - 1 :]), part[: cut - 1]

    def at(row: int, region: Region) -> int:
        """Return the flat index in ``region`` where row number ``row`` of the common part begins."""
        index = []
        for width in reversed(outer):
            row, i = divmod(row, width)
            index.append(i)
        index, where = [*reversed(index), *[0] * (len(part) - len(index))], 0
        for i, s, origin, width in zip(index, start, *region, strict=True):
            where = where * width + i + s - origin
        return where

    # Only the rows that both spans meet: there may be far more.
    rows = range(prod(outer)) if numel else range(0)
    first = max(bisect.bisect_right(rows, s.lo - numel, key=lambda row: at(row, r)) for s, r in ((a, one), (b, two)))
    last = min(bisect.bisect_left(rows, s.hi, key=lambda row: at(row, r)) for s, r in ((a, one), (b, two)))
    for row in rows[first:last]:
        first_at, second_at = at(row, one), at(row, two)
        skip, end = max(a.lo - first_at, b.lo - second_at, 0), min(a.hi - first_at, b.hi - second_at, numel)
        if skip < end:
            yield first_at + skip, second_at + skip, end - skip


def regions_of(shape: tuple[int, ...], span: Span) -> Iterator[Region]:
    """Yield the regions of a tensor of ``shape`` that make up ``span``, in order: at most 2 * dims - 1."""
    origin, size = span.region or Region((0,) * len(shape), shape)
    for start, part in _rectangles(size, span.lo, span.hi):
        yield Region(tuple(o + s for o, s in zip(origin, start, strict=True)), part)


def _rectangles(shape: tuple[int, ...], lo: int, hi: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield start and shape of the boxes that cover elements [lo, hi), in row-major order, of an array of ``shape``."""
    if lo >= hi:
        return
    if not shape:
        yield (), ()
        return
    row = prod(shape[1:])
    first, end = -(-lo // row), hi // row
    if lo % row:  # the end of a row, which may be the end of the range too
        for start, part in _rectangles(shape[1:], lo % row, min(row, hi - (first - 1) * row)):
            yield (first - 1, *start), (1, *part)
    if first < end:
        yield (first, *(0 for _ in shape[1:])), (end - first, *shape[1:])
    if hi % row and end >= first:
        for start, part in _rectangles(shape[1:], 0, hi % row):
            yield (end, *start), (1, *part)


def common(one: Region, two: Region) -> Region | None:
    """Return the intersection of two regions; None when it is empty."""
    start, shape = list[int](), list[int]()
    for s, n, t, m in zip(*one, *two, strict=True):
        lo, hi = max(s, t), min(s + n, t + m)
        if lo >= hi:
            return None
        start.append(lo)
        shape.append(hi - lo)
    return Region(tuple(start), tuple(shape))


def without(region: Region, part: Region) -> Iterator[Region]:
    """Yield ``region`` without ``part``, which lies inside, as at most 2 * dims regions."""
    start, shape = list(region.start), list(region.shape)
    for dim, (lo, n) in enumerate(zip(*part, strict=True)):
        for begin, size in ((start[dim], lo - start[dim]), (lo + n, start[dim] + shape[dim] - lo - n)):
            if size > 0:
                yield Region((*start[:dim], begin, *start[dim + 1 :]), (*shape[:dim], size, *shape[dim + 1 :]))
        start[dim], shape[dim] = lo, n


def cut(region: Region, most: int) -> Iterator[Region]:
    """Split ``region`` into regions of at most ``most`` elements."""
    dim = next((d for d, n in enumerate(region.shape) if n > 1), None)
    if prod(region.shape) <= most or dim is None:
        yield region
        return
    rows = max(1, most // prod(region.shape[dim + 1 :]))
    for at in range(0, region.shape[dim], rows):
        n = min(rows, region.shape[dim] - at)
        start = (*region.start[:dim], region.start[dim] + at, *region.start[dim + 1 :])
        yield from cut(Region(start, (*region.shape[:dim], n, *region.shape[dim + 1 :])), most)


def apart(regions: Iterable[Region]) -> bool:
    """Tell whether no two of ``regions``, which are distinct, have an element in common."""
    return all(
        any(s + n <= t or t + m <= s for s, n, t, m in zip(*one, *two, strict=True))
        for one, two in itertools.combinations(regions, 2)
    )


class Gap(NamedTuple):
    """Elements [lo, hi) of a tensor that are covered by none (``times`` 0) or by several spans."""

    lo: int
    hi: int
    times: int


def uncovered(shape: tuple[int, ...], spans: Iterable[Span]) -> list[Gap]:
    """List the gaps and overlaps of ``spans`` in a tensor of ``shape``, in order. Their regions lie inside it."""
    by_region: dict[Region, list[tuple[int, int]]] = {}
    for span in spans:
        by_region.setdefault(span.region or Region((0,) * len(shape), shape), []).append((span.lo, span.hi))
    tiled = apart(by_region) and sum(prod(region.shape) for region in by_region) == prod(shape)
    if tiled and not any(faults(prod(region.shape), flat) for region, flat in by_region.items()):
        return []  # without counting rows, of which there may be millions
    everything = Span(0, _LARGEST)  # what lies behind the end is a fault too
    per_span = (runs(shape, everything, Span(lo, hi, region)) for region, flat in by_region.items() for lo, hi in flat)
    return faults(prod(shape), ((at, at + numel) for at, _, numel in itertools.chain.from_iterable(per_span)))


def faults(numel: int, spans: Iterable[tuple[int, int]]) -> list[Gap]:
    """List the gaps and overlaps of flat ``spans`` over [0, numel), in order; spans outside it count as faults too."""
    edges: dict[int, int] = {0: 0, numel: 0}
    for lo, hi in spans:
        edges[lo] = edges.get(lo, 0) + 1
        edges[hi] = edges.get(hi, 0) - 1
    gaps, depth = [], 0
    for lo, hi in itertools.pairwise(sorted(edges)):
        depth += edges[lo]
        if depth != (0 if lo < 0 or hi > numel else 1):
            gaps.append(Gap(lo, hi, depth))
    return gaps
