"""Plan which rank sends which region of which tensor to whom, to move weights between any two layouts. Pure.

Spans of global tensors (`zero.regions`) describe the parts that a rank has and needs, for any sharding. A
span consists of a few rectangular regions. Two regions intersect in one region, so a transfer is one region of one
tensor. A rank receives no element it already has, and every other element once: this is the lower bound of traffic.
Planned as in ReaL (Mei et al. 2024, arXiv 2406.14088): where several ranks hold the same region, the sender is a
rank on the receiver's node, if there is one, and among those the one with the least to send so far.
"""

import functools
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from deepspeed.errors import UsageError
from deepspeed.zero.regions import Region, Span

PIECE_BYTES = 4 << 20  # what one of several ranks is chosen for

Spans = Mapping[str, Sequence[Span]]  # by name of the tensor
_Part = tuple[Region, list[int]]


class GlobalShape(NamedTuple):
    """Shape of a global tensor; ``width``: bytes per element on the wire."""

    shape: tuple[int, ...]
    width: int


class RegionTransfer(NamedTuple):
    """Move of ``region`` of the global tensor ``name`` from rank ``source`` to rank ``target``, maybe the same."""

    source: int
    target: int
    name: str
    region: Region


@dataclass(frozen=True)
class ReallocationPlan:
    """Plan: ``transfers`` between ranks, in their common order, and ``copies`` within a rank. All numbers are bytes.

    ``lower_bound``: bytes that ranks need and do not have, counted independently of the transfers. ``sent``,
    ``received``: by rank. ``across_nodes``: the part of ``bytes_moved`` between ranks of different nodes.
    """

    transfers: tuple[RegionTransfer, ...]
    copies: tuple[RegionTransfer, ...]
    lower_bound: int
    sent: dict[int, int] = field(default_factory=dict)
    received: dict[int, int] = field(default_factory=dict)
    across_nodes: int = 0

    @property
    def bytes_moved(self) -> int:
        """Return the bytes sent over all ranks."""
        return sum(self.sent.values())

    @property
    def most_sent(self) -> int:
        """Return the most bytes sent by one rank."""
        return max(self.sent.values(), default=0)

    @property
    def most_received(self) -> int:
        """Return the most bytes received by one rank."""
        return max(self.received.values(), default=0)


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


def plan_reallocation(
    shapes: Mapping[str, GlobalShape],
    resting: Mapping[int, Spans],
    needed: Mapping[int, Spans],
    *,
    nodes: Mapping[int, Hashable] | None = None,
    piece_bytes: int = PIECE_BYTES,
) -> ReallocationPlan:
    """Plan the transfers for tensors of ``shapes``, where ranks have ``resting`` and are to get ``needed``, by rank.

    ``nodes``: node of each rank (None: all on one). Raises UsageError where no rank has a region that a rank needs.
    """
    places = nodes or {}
    sent = dict.fromkeys(sorted(resting), 0)
    received = dict.fromkeys(sorted(needed), 0)
    transfers, copies = list[tuple[int, RegionTransfer]](), list[RegionTransfer]()
    bound = across = 0
    for name, (shape, width) in shapes.items():
        has = {rank: [r for s in resting[rank].get(name, ()) for r in regions_of(shape, s)] for rank in sent}
        parts = functools.cache(lambda spans, shape=shape, has=has: _parts(shape, spans, has))  # replicas need the same
        for target in received if prod(shape) else ():
            needs = tuple(needed[target].get(name, ()))
            bound += width * _lacking([r for span in needs for r in regions_of(shape, span)], has.get(target, ()))
            for region, ranks in parts(needs):
                if target in ranks:
                    copies.append(RegionTransfer(target, target, name, region))
                    continue
                if not ranks:
                    raise UsageError(f"no rank of the source has {name}{list(region.start)}, which rank {target} needs")
                near = [rank for rank in ranks if places.get(rank) == places.get(target)] or ranks
                for piece in cut(region, max(1, piece_bytes // width)):
                    source, nbytes = _choose(near, target, sent), width * prod(piece.shape)
                    transfers.append((sent[source], RegionTransfer(source, target, name, piece)))
                    sent[source] += nbytes
                    received[target] += nbytes
                    across += nbytes if places.get(source) != places.get(target) else 0
    # Side by side: everybody sends what it has in its own order.
    side_by_side = sorted(transfers, key=lambda item: item[0])
    return ReallocationPlan(tuple(t for _, t in side_by_side), tuple(copies), bound, sent, received, across)


def _lacking(needs: Iterable[Region], has: Sequence[Region]) -> int:
    """Count the elements of ``needs`` that are not in ``has``; neither has any element twice."""
    both = (common(one, other) for one in needs for other in has)
    return sum(prod(one.shape) for one in needs) - sum(prod(region.shape) for region in both if region is not None)


def _parts(shape: tuple[int, ...], needs: Iterable[Span], has: Mapping[int, Sequence[Region]]) -> list[_Part]:
    """Split ``needs`` into regions that each rank has wholly or not at all, with the ranks that have each region."""
    holders: dict[Region, list[int]] = {}
    for rank, regions in has.items():
        for region in regions:
            holders.setdefault(region, []).append(rank)
    parts: list[_Part] = [(region, []) for span in needs for region in regions_of(shape, span)]
    for place, ranks in holders.items():
        split: list[_Part] = []
        for region, owners in parts:
            both = common(region, place)
            if both is None:
                split.append((region, owners))
            else:
                split.append((both, [*owners, *ranks]))
                split += [(rest, owners) for rest in without(region, both)]
        parts = split
    return parts


def _choose(ranks: Sequence[int], target: int, sent: Mapping[int, int]) -> int:
    """Choose the rank with the least to send; ties go to the next rank after the target."""
    return min(ranks, key=lambda rank: (sent[rank], rank < target, rank))


def in_rounds(
    plan: ReallocationPlan, shapes: Mapping[str, GlobalShape], most: int
) -> list[list[tuple[RegionTransfer, int]]]:
    """Group the transfers, with their bytes, in rounds; no rank sends or receives over ``most`` bytes in a round."""
    senders, receivers = {r: (0, 0) for r in plan.sent}, {r: (0, 0) for r in plan.received}  # round, bytes in it
    rounds: list[list[tuple[RegionTransfer, int]]] = []
    for transfer in plan.transfers:
        nbytes = prod(transfer.region.shape) * shapes[transfer.name].width
        sends, takes = senders[transfer.source], receivers[transfer.target]
        number = max(sends[0], takes[0])
        before = [filled if at == number else 0 for at, filled in (sends, takes)]
        if max(before) and max(before) + nbytes > most:
            number, before = number + 1, [0, 0]
        senders[transfer.source], receivers[transfer.target] = (
            (number, before[0] + nbytes), (number, before[1] + nbytes),
        )  # fmt: skip
        rounds += [[] for _ in range(number + 1 - len(rounds))]
        rounds[number].append((transfer, nbytes))
    return rounds
