"""Where each parameter sits in a unit's one flat, padded index space. Pure.

ELEMENT granularity packs parameters back to back and cuts the flat space into equal shards wherever they fall.
PARAMETER granularity gives every parameter wholly to one shard, for optimizers that need whole tensors.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from math import prod

from deepspeed.zero.regions import Region, Span, spans_of

ALIGNMENT_NUMEL = 32  # segments start on 64-byte (bf16) or 128-byte (fp32) boundaries: vector loads and matmul inputs


class Granularity(Enum):
    """Smallest piece that no shard boundary cuts."""

    ELEMENT = "element"
    PARAMETER = "parameter"


Box = tuple[tuple[int, ...], tuple[int, ...]]  # a rectangular part of a global tensor: where it starts, its shape


@dataclass(frozen=True)
class Place:
    """Position of a tensor-parallel rank's part of a parameter in the global ``shape``.

    ``boxes``: the boxes of the part, flattened one after the other into a tensor of ``size``. ``copies``: number of
    ranks of the tensor-parallel group that hold the same part.
    """

    boxes: tuple[Box, ...]
    size: tuple[int, ...]
    shape: tuple[int, ...]
    copies: int = 1

    def __post_init__(self) -> None:
        assert sum(prod(shape) for _, shape in self.boxes) == prod(self.size), self
        assert len(self.boxes) > 1 or self.boxes[0][1] == self.size, self


@dataclass(frozen=True)
class Segment:
    """Place of one parameter: ``numel`` elements from ``offset``; ``group`` is its optimizer parameter group.

    ``norm_weight``: weight of its squares in the job's gradient norm; less than 1 where other ranks hold it too. For a
    tensor-parallel one ``shape`` is this rank's part, from ``global_start`` of ``global_shape`` (None: the whole), or
    the ``boxes`` of it, one after the other.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    group: int = 0
    norm_weight: float = 1.0
    global_start: tuple[int, ...] | None = None
    global_shape: tuple[int, ...] | None = None
    boxes: tuple[Box, ...] = ()

    def __post_init__(self) -> None:
        if not self.boxes and (self.global_start is not None or self.global_shape is not None):
            ends = zip(self.global_start or (), self.shape, self.global_shape or (), strict=True)
            assert all(0 <= start <= start + size <= whole for start, size, whole in ends), self

    def at(self, place: Place) -> "Segment":
        """Return this segment for a parameter that is a part of a larger one, or is on several ranks."""
        start, boxes = place.boxes[0][0], place.boxes if len(place.boxes) > 1 else ()
        weight = self.norm_weight / place.copies
        return replace(self, norm_weight=weight, global_start=start, global_shape=place.shape, boxes=boxes)

    @cached_property
    def place(self) -> Place | None:
        """Return the position of the part in the global tensor; None where it is the whole."""
        if self.global_start is None or self.global_shape in (None, self.shape):
            return None
        return Place(self.boxes or ((self.global_start, self.shape),), self.shape, self.global_shape or self.shape)

    @cached_property
    def region(self) -> Region | None:
        """Return the region of the global tensor that this one is, of several boxes the first; None: the whole."""
        return Region(*self.place.boxes[0]) if self.place is not None else None

    def spans(self, start: int, stop: int) -> Iterator[tuple[int, int, Span]]:
        """Split the part of this segment in the flat range [start, stop): yield flat [lo, hi), span of the tensor."""
        lo, hi = max(self.offset, start) - self.offset, min(self.stop, stop) - self.offset
        boxes = self.boxes or (self.place.boxes if self.place is not None else ())
        if lo < hi and not boxes:
            yield lo + self.offset, hi + self.offset, Span(lo, hi)
        for first, last, span in spans_of((Region(*box) for box in boxes), lo, hi):
            yield first + self.offset, last + self.offset, span

    @cached_property
    def whole_shape(self) -> tuple[int, ...]:
        """Return the shape of the global tensor."""
        return self.shape if self.global_shape is None else self.global_shape

    @cached_property
    def numel(self) -> int:
        return prod(self.shape)

    @cached_property
    def stop(self) -> int:
        return self.offset + self.numel


@dataclass(frozen=True)
class FlatLayout:
    """Segments in ascending, disjoint order inside ``numel`` elements, which divide into ``shards`` equal pieces."""

    segments: tuple[Segment, ...]
    numel: int
    shards: int
    granularity: Granularity = Granularity.ELEMENT

    def __post_init__(self) -> None:
        end = 0
        for s in self.segments:
            assert s.offset >= end, f"segment {s.name} overlaps its predecessor"
            end = s.stop
        assert end <= self.numel and self.numel % self.shards == 0, self
        for s in self.segments if self.granularity is Granularity.PARAMETER else ():
            whole = s.numel == 0 or s.offset // self.shard_numel == (s.stop - 1) // self.shard_numel
            assert whole, f"{s.name} is cut"

    @property
    def shard_numel(self) -> int:
        return self.numel // self.shards

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Return the padding ranges [start, stop), which must hold zeros in gradient buffers."""
        ends = (0, *(s.stop for s in self.segments))
        starts = (*(s.offset for s in self.segments), self.numel)
        return tuple((end, start) for end, start in zip(ends, starts, strict=True) if start > end)

    def overlap(self, segment: Segment, start: int, stop: int) -> tuple[int, int]:
        """Return the part [lo, hi) of ``segment`` (flat indices) inside [start, stop); empty when lo >= hi."""
        return max(segment.offset, start), min(segment.stop, stop)


Item = tuple[str, tuple[int, ...], int]  # name, shape, optimizer group


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple


def build_layout(items: list[Item], shards: int, granularity: Granularity, *, first: int = 0) -> FlatLayout:
    """Lay out (name, shape, group) ``items`` in ``shards`` equal aligned shards.

    ELEMENT: back to back in the order of groups. PARAMETER: each to the least filled shard so far, largest first; of
    several such shards to the first one from ``first`` on, which differs between units: all ranks get the same work.
    """
    whole = granularity is Granularity.PARAMETER
    numels = [prod(shape) for _, shape, _ in items]
    fill = [0] * (shards if whole else 1)
    inside: list[list[int]] = [[] for _ in fill]
    for i in sorted(range(len(items)), key=lambda i: (-numels[i], i)):
        owner = min(range(len(fill)), key=lambda shard: (fill[shard], (shard - first) % shards))
        inside[owner].append(i)
        fill[owner] += round_up(numels[i], ALIGNMENT_NUMEL)
    numel = shards * max(*fill, ALIGNMENT_NUMEL) if whole else round_up(max(*fill, 1), ALIGNMENT_NUMEL * shards)
    segments = []
    for shard, indices in enumerate(inside):
        offset = shard * (numel // shards)
        # Empty tensors come first in their shard: behind a full one they would start in the next shard.
        for i in sorted(indices, key=lambda i: (whole and numels[i] > 0, items[i][2], i)):
            name, shape, group = items[i]
            segments.append(Segment(name, shape, offset, group))
            offset += round_up(numels[i], ALIGNMENT_NUMEL)
    return FlatLayout(tuple(segments), numel, shards, granularity)
