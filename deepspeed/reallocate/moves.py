"""Plan which rank sends which region of which tensor to whom, to move weights between any two layouts. Pure.

Spans of global tensors (`zero.regions`) describe the parts that a rank has and needs, for any sharding. ``holders``
says who has what is needed, also for streams of whole weights. A span consists of a few rectangular regions. Two
regions intersect in one region, so a transfer is one region of one tensor. A rank receives no element it already has,
and every other element once: this is the lower bound of traffic. Planned as in ReaL (Mei et al. 2024, arXiv
2406.14088): where several ranks hold the same region, the sender is a rank on the receiver's node, if there is one, and
among those the one with the least to send so far.
"""

import functools
import itertools
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from deepspeed.errors import UsageError
from deepspeed.zero.regions import Region, Span, apart, common, cut, regions_of, without

PIECE_BYTES = 4 << 20  # what one of several ranks is chosen for

Spans = Mapping[str, Sequence[Span]]  # by name of the tensor


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


def holders(
    shape: tuple[int, ...], needs: Iterable[Span], has: Mapping[int, Sequence[Span]]
) -> list[tuple[Span, list[int]]]:
    """Split ``needs`` into spans that each rank has wholly or not at all, with the ranks that have each.

    ``has``: the spans of each rank. Parts of a region both sides are cut in are found as ranges; of others, as regions.
    """
    needs, whole = list(needs), Region((0,) * len(shape), shape)
    if apart({span.region or whole for spans in (needs, *has.values()) for span in spans}):
        ranges: dict[Region, list[tuple[int, int, int]]] = {}
        for rank, (lo, hi, region) in ((rank, span) for rank, spans in has.items() for span in spans):
            ranges.setdefault(region or whole, []).append((lo, hi, rank))
        return [part for need in needs for part in _in_ranges(need, ranges.get(need.region or whole, []))]
    of_ranks: dict[Region, list[int]] = {}
    for rank, region in ((rank, r) for rank, spans in has.items() for span in spans for r in regions_of(shape, span)):
        of_ranks.setdefault(region, []).append(rank)
    parts: list[tuple[Region, list[int]]] = [(region, []) for span in needs for region in regions_of(shape, span)]
    for place, ranks in of_ranks.items():
        split: list[tuple[Region, list[int]]] = []
        for region, owners in parts:
            both = common(region, place)
            if both is None:
                split.append((region, owners))
            else:
                split.append((both, [*owners, *ranks]))
                split += [(rest, owners) for rest in without(region, both)]
        parts = split
    return [(Span(0, prod(region.shape), region), owners) for region, owners in parts]


def _in_ranges(need: Span, ranges: Sequence[tuple[int, int, int]]) -> Iterator[tuple[Span, list[int]]]:
    """Split ``need`` at the ends of ``ranges`` [lo, hi) of ranks in the same region."""
    ends = sorted({need.lo, need.hi, *(end for lo, hi, _ in ranges for end in (lo, hi) if need.lo < end < need.hi)})
    for first, last in itertools.pairwise(ends):
        owners = [rank for lo, hi, rank in ranges if lo <= first and last <= hi]
        yield Span(first, last, need.region), owners


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
        has = {rank: resting[rank].get(name, ()) for rank in sent}
        parts = functools.cache(functools.partial(_parts, shape, has))  # replicas need the same
        for target in received if prod(shape) else ():
            needs = tuple(needed[target].get(name, ()))
            bound += width * _lacking(shape, needs, has.get(target, ()))
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


def _parts(
    shape: tuple[int, ...], has: Mapping[int, Sequence[Span]], needs: Sequence[Span]
) -> list[tuple[Region, list[int]]]:
    """Return ``holders`` by regions."""
    return [(region, ranks) for span, ranks in holders(shape, needs, has) for region in regions_of(shape, span)]


def _lacking(shape: tuple[int, ...], needs: Sequence[Span], has: Sequence[Span]) -> int:
    """Count the elements of ``needs`` that are not in ``has``; neither has any element twice."""
    one, two = ([region for span in spans for region in regions_of(shape, span)] for spans in (needs, has))
    both = (common(a, b) for a in one for b in two)
    return sum(prod(a.shape) for a in one) - sum(prod(region.shape) for region in both if region is not None)


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
