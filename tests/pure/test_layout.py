"""FlatLayout: every element has one place, shards are equal, and owned ranges tile the flat space."""

import random
from math import prod

import pytest

from deepspeed.zero.layout import ALIGNMENT_NUMEL, FlatLayout, Granularity, Segment, build_layout

Items = list[tuple[str, tuple[int, ...], int]]


def _random_items(seed: int, count: int) -> Items:
    draw = random.Random(seed)
    shapes = [(), (0,), (1,), (0, 4), (3,), (7, 5), (32,), (33,), (64, 2), (5, 1, 3)]
    return [(f"p{i}", draw.choice(shapes), draw.randrange(3)) for i in range(count)]


@pytest.mark.parametrize("granularity", list(Granularity))
@pytest.mark.parametrize("shards", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [0, 1, 2, 17])
def test_every_parameter_has_one_aligned_place(count: int, shards: int, granularity: Granularity) -> None:
    for seed in range(8):
        items = _random_items(seed, count)
        layout = build_layout(items, shards, granularity)
        assert sorted(s.name for s in layout.segments) == sorted(name for name, _, _ in items)
        shapes = {name: (shape, group) for name, shape, group in items}
        assert all((s.shape, s.group) == shapes[s.name] and s.numel == prod(s.shape) for s in layout.segments)
        assert layout.numel == layout.shard_numel * shards and layout.numel > 0
        assert layout.shard_numel % ALIGNMENT_NUMEL == 0
        assert all(s.offset % ALIGNMENT_NUMEL == 0 for s in layout.segments if s.numel)
        covered = sum(s.numel for s in layout.segments) + sum(stop - start for start, stop in layout.gaps)
        assert covered == layout.numel


@pytest.mark.parametrize("granularity", list(Granularity))
def test_owned_ranges_tile_every_segment(granularity: Granularity) -> None:
    layout = build_layout(_random_items(3, 20), 4, granularity)
    for segment in layout.segments:
        parts = [layout.overlap(segment, r * layout.shard_numel, (r + 1) * layout.shard_numel) for r in range(4)]
        pieces = [(lo, hi) for lo, hi in parts if lo < hi]
        assert sum(hi - lo for lo, hi in pieces) == segment.numel
        if granularity is Granularity.PARAMETER:
            assert len(pieces) <= 1, "a whole-tensor owner holds only a part"


def test_groups_are_contiguous_in_element_layouts() -> None:
    layout = build_layout(_random_items(5, 30), 2, Granularity.ELEMENT)
    groups = [s.group for s in layout.segments]
    assert groups == sorted(groups)


def test_element_padding_is_small() -> None:
    items: Items = [(f"p{i}", (1000,), 0) for i in range(10)]
    layout = build_layout(items, 8, Granularity.ELEMENT)
    assert layout.numel <= 10 * 1024 + 8 * ALIGNMENT_NUMEL


def test_whole_tensors_are_balanced() -> None:
    layout = build_layout([(f"p{i}", (100 * (i + 1),), 0) for i in range(9)], 3, Granularity.PARAMETER)
    fill = [0, 0, 0]
    for segment in layout.segments:
        fill[segment.offset // layout.shard_numel] += segment.numel
    assert max(fill) <= 1.2 * min(fill)


@pytest.mark.parametrize(
    ("segments", "numel", "shards", "granularity"),
    [
        ((Segment("a", (4,), 0), Segment("b", (4,), 2)), 32, 1, Granularity.ELEMENT),
        ((Segment("a", (40,), 0),), 32, 1, Granularity.ELEMENT),
        ((Segment("a", (4,), 0),), 33, 2, Granularity.ELEMENT),
        ((Segment("a", (4,), 14),), 32, 2, Granularity.PARAMETER),
    ],
    ids=["overlap", "too long", "uneven shards", "cut tensor"],
)
def test_a_layout_proves_its_own_invariants(
    segments: tuple[Segment, ...], numel: int, shards: int, granularity: Granularity
) -> None:
    with pytest.raises(AssertionError):
        FlatLayout(segments, numel, shards, granularity)
