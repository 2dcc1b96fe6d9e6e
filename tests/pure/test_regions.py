"""Parts of global tensors: intersections, gaps, rectangles and owners are what counting single elements says."""

import itertools
from math import prod

import numpy as np
import pytest
from hypothesis import given, strategies as st

from deepspeed.reallocate.moves import holders
from deepspeed.zero.layout import Place, Segment
from deepspeed.zero.regions import (
    Gap,
    Region,
    Span,
    cut,
    faults,
    regions_of,
    runs,
    spans_of,
    uncovered,
    without,
)


def slices(region: Region) -> tuple[slice, ...]:
    return tuple(slice(s, s + n) for s, n in zip(*region, strict=True))


@st.composite
def spans(draw: st.DrawFn, shape: tuple[int, ...]) -> Span:
    """Some elements of some part of a tensor of ``shape``."""
    if draw(st.integers(0, 3)) == 0:
        region, size = None, prod(shape)
    else:
        start = tuple(draw(st.integers(0, n)) for n in shape)
        region = Region(start, tuple(draw(st.integers(0, n - s)) for n, s in zip(shape, start, strict=True)))
        size = prod(region.shape)
    lo = draw(st.integers(0, size))
    return Span(lo, draw(st.integers(lo, size)), region)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[tuple[int, ...], Span, Span]:
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=0, max_size=4)))
    return shape, draw(spans(shape)), draw(spans(shape))


def elements(shape: tuple[int, ...], span: Span) -> list[int]:
    """The numbers that the elements of a span have in the whole tensor, in the span's order."""
    whole = np.arange(prod(shape)).reshape(shape)
    if span.region is not None:
        whole = whole[slices(span.region)]
    return [int(n) for n in whole.reshape(-1)[span.lo : span.hi]]


@given(pairs())
def test_runs_are_what_slicing_says(case: tuple[tuple[int, ...], Span, Span]) -> None:
    shape, a, b = case
    one, two = elements(shape, a), elements(shape, b)
    found: list[int] = []
    ends = (0, 0)
    for first, second, numel in runs(shape, a, b):
        assert numel > 0 and first >= ends[0] and second >= ends[1]
        mine, theirs = (x[at - lo : at - lo + numel] for x, at, lo in ((one, first, a.lo), (two, second, b.lo)))
        assert mine == theirs and len(mine) == numel
        found, ends = found + mine, (first + numel, second + numel)
    assert found == sorted(set(one) & set(two))


def test_a_span_of_the_same_region_is_one_run() -> None:
    part = Region((1, 0, 2), (2, 2, 2))
    for region in (None, part):
        assert list(runs((3, 4, 4), Span(2, 7, region), Span(0, 8, region))) == [(2, 2, 5)]
        assert list(runs((3, 4, 4), Span(2, 2, region), Span(0, 8, region))) == []
    rows = Span(1, 7, Region((1, 0), (2, 4)))  # whole rows follow each other
    assert list(runs((3, 4), Span(0, 12), rows)) == [(5, 1, 6)]


@given(st.data())
def test_uncovered_is_what_counting_says(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=0, max_size=3)))
    given_spans = data.draw(st.lists(spans(shape), max_size=4))
    if data.draw(st.booleans()) and shape:  # cut it in two, and each half in two spans, so that it may well be covered
        cut = data.draw(st.integers(0, shape[-1]))
        for start, width in ((0, cut), (cut, shape[-1] - cut)):
            region = Region((*[0] * (len(shape) - 1), start), (*shape[:-1], width))
            middle = data.draw(st.integers(0, prod(region.shape)))
            given_spans += [Span(0, middle, region), Span(middle, prod(region.shape), region)]
    counts = [0] * prod(shape)
    for span in given_spans:
        for at in elements(shape, span):
            counts[at] += 1
    wrong = {at: times for at, times in enumerate(counts) if times != 1}
    assert {at: gap.times for gap in uncovered(shape, given_spans) for at in range(gap.lo, gap.hi)} == wrong


def test_elements_behind_the_end_are_a_fault() -> None:
    assert uncovered((2, 3), [Span(0, 6), Span(6, 9)]) == [Gap(6, 9, 1)]
    assert uncovered((0, 3), []) == [] and uncovered((), [Span(0, 1)]) == []


@given(st.integers(0, 12), st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=6))
def test_faults_are_the_places_not_covered_once(numel: int, spans: list[tuple[int, int]]) -> None:
    spans = [(min(s), max(s)) for s in spans]
    counts = [sum(lo <= at < hi for lo, hi in spans) for at in range(13)]
    wrong = {at for at in range(13) if counts[at] != (1 if at < numel else 0)}
    found = {at for gap in faults(numel, spans) for at in range(gap.lo, gap.hi)}
    assert found == wrong


def test_faults_say_how_often() -> None:
    assert faults(10, [(0, 6), (4, 8)]) == [Gap(4, 6, 2), Gap(8, 10, 0)]
    assert faults(0, []) == [] == faults(4, [(0, 4)])


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 4), (1, 3, 1, 2)])
def test_a_span_is_a_few_regions_in_its_order(shape: tuple[int, ...]) -> None:
    numel = prod(shape)
    index = np.arange(numel).reshape(shape)
    for lo, hi in itertools.combinations(range(numel + 1), 2):
        regions = list(regions_of(shape, Span(lo, hi)))
        assert len(regions) <= max(1, 2 * len(shape) - 1)
        assert [i for region in regions for i in index[slices(region)].ravel()] == list(range(lo, hi))


def test_regions_are_cut_and_taken_away_exactly() -> None:
    whole = Region((1, 0, 2), (4, 3, 5))
    everything = set(itertools.product(range(1, 5), range(3), range(2, 7)))

    def elements(region: Region) -> list[tuple[int, ...]]:
        return list(itertools.product(*(range(s, s + n) for s, n in zip(*region, strict=True))))

    for most in range(1, 61):
        parts = list(cut(whole, most))
        assert sorted(e for p in parts for e in elements(p)) == sorted(everything)
        assert all(prod(p.shape) <= most for p in parts)
    for start in itertools.product(range(1, 5), range(3), range(2, 7)):
        for shape in itertools.product(*(range(1, e - s + 1) for s, e in zip(start, (5, 3, 7), strict=True))):
            inner = Region(start, shape)
            left = [e for region in without(whole, inner) for e in elements(region)]
            assert len(left) == len(set(left)) and set(left) == everything - set(elements(inner))


@given(st.data())
def test_holders_of_every_part_are_the_ranks_that_have_all_of_it(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=0, max_size=3)))
    parts = st.lists(spans(shape), max_size=3)
    if shape and data.draw(st.booleans()):  # all are cut in the same regions
        middle = data.draw(st.integers(0, shape[0]))
        halves = [
            Region((at, *[0] * (len(shape) - 1)), (n, *shape[1:]))
            for at, n in ((0, middle), (middle, shape[0] - middle))
        ]
        ends = [st.tuples(*[st.integers(0, prod(half.shape))] * 2).map(sorted) for half in halves]
        parts = st.tuples(*ends).map(
            lambda pairs: [Span(lo, hi, half) for (lo, hi), half in zip(pairs, halves, strict=True)]
        )
    needs, has = data.draw(parts), {rank: data.draw(parts) for rank in (5, 0, 2)}
    found = holders(shape, needs, has)
    listed = [at for span, _ in found for at in elements(shape, span)]
    needed = sorted(at for need in needs for at in elements(shape, need))
    assert sorted(listed) == needed, "each once, as often as needed"
    for span, ranks in found:
        for rank, theirs in has.items():
            common = set(elements(shape, span)) & {at for part in theirs for at in elements(shape, part)}
            assert len(common) == (len(elements(shape, span)) if rank in ranks else 0)


def test_parts_of_shards_are_ranges_however_they_lie() -> None:
    """Elements 3 to 9 of 10 columns, which 5 ranks have in shards of 20: three parts, not nine rectangles."""
    has = {rank: [Span(20 * rank, 20 * rank + 20)] for rank in range(5)}
    assert holders((10, 10), [Span(33, 93)], has) == [
        (Span(33, 40), [1]), (Span(40, 60), [2]), (Span(60, 80), [3]), (Span(80, 93), [4]),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "place",
    [
        None,
        Place((((1, 0), (2, 4)),), (2, 4), (3, 4)),
        Place((((0, 0), (2, 2)), ((0, 3), (2, 1))), (2, 3), (2, 4)),
    ],
)
def test_a_range_of_a_unit_is_spans_of_the_global_tensor(place: Place | None) -> None:
    segment, whole = Segment("w", (3, 4), 32), np.arange(12).reshape(3, 4)
    local = whole.reshape(-1)
    if place is not None:
        segment = Segment("w", place.size, 32).at(place)
        whole = np.arange(prod(place.shape)).reshape(place.shape)
        local = np.concatenate([whole[slices(Region(*box))].reshape(-1) for box in place.boxes])
        assert [span for *_, span in spans_of(map(Region._make, place.boxes), 0, 12)] == [
            span for *_, span in segment.spans(0, 99)
        ]
    for start, stop in itertools.combinations(range(30, 48), 2):
        got, end = [], max(start, 32)
        for lo, hi, span in segment.spans(start, stop):
            assert (lo, hi - lo) == (end, span.hi - span.lo), "in order, without gaps"
            got, end = got + elements(whole.shape, span), hi
        assert got == list(local[max(0, start - 32) : max(0, stop - 32)])
