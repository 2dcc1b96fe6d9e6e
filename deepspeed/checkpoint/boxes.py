"""Parts of global tensors as spans of flat elements. Pure.

A box holds elements [lo, hi), in row-major order, of a rectangular part of a global tensor (the whole tensor when it has no ``start``).
Sharded state of any layout is a set of boxes: a flat cut of a parameter is a span of the whole, a tensor-parallel slice a part.
"""

import itertools
from collections.abc import Iterable, Iterator
from math import prod
from typing import NamedTuple


class Run(NamedTuple):
    """``numel`` elements that are contiguous both in the global tensor (from ``globe``) and in the box's own order (from ``own``)."""

    globe: int
    own: int
    numel: int


def runs(
    shape: tuple[int, ...], *, lo: int, hi: int, start: tuple[int, ...] | None = None, part: tuple[int, ...] | None = None
) -> Iterator[Run]:
    """The span [lo, hi) of the part ``part`` at ``start`` of a global tensor of ``shape``, as ascending runs.

    ``own`` counts from ``lo``. Without ``start`` the part is the whole tensor, and the span is one run.
    """
    if lo >= hi:
        return
    if start is None or part is None or (part == shape and not any(start)):
        yield Run(lo, 0, hi - lo)
        return
    # Trailing dimensions that the part covers wholly are contiguous together with the one before them.
    cut = len(shape)
    while cut > 0 and part[cut - 1] == shape[cut - 1]:
        cut -= 1
    inner = prod(part[max(cut - 1, 0) :])
    strides = [prod(shape[d + 1 :]) for d in range(len(shape))]
    outer = part[: max(cut - 1, 0)]
    base = sum(s * t for s, t in zip(start, strides, strict=True))
    # Only the rows that the span meets: a part may have far more.
    for row in range(lo // inner, min(-(-hi // inner), prod(outer))) if inner else ():
        first, last = max(lo, row * inner), min(hi, (row + 1) * inner)
        at, rest = base, row
        for d in reversed(range(len(outer))):
            rest, i = divmod(rest, outer[d])
            at += i * strides[d]
        yield Run(at + first - row * inner, first - lo, last - first)


class Gap(NamedTuple):
    """Elements [lo, hi) of a tensor that are covered by none (``times`` 0) or by several boxes."""

    lo: int
    hi: int
    times: int


def faults(numel: int, spans: Iterable[tuple[int, int]]) -> list[Gap]:
    """Where ``spans`` do not cover [0, numel) exactly once, in order."""
    edges: dict[int, int] = {0: 0, numel: 0}
    for lo, hi in spans:
        edges[lo] = edges.get(lo, 0) + 1
        edges[hi] = edges.get(hi, 0) - 1
    found, depth = [], 0
    points = sorted(edges)
    for here, there in itertools.pairwise(points):
        depth += edges[here]
        outside = here < 0 or there > numel
        if (depth != 1 and not outside) or (depth and outside):
            found.append(Gap(here, there, depth))
    return found
