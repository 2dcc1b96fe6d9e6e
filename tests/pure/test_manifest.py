"""The manifest round-trips exactly, and no byte of it can change unnoticed; boxes cover tensors as rectangles do."""

import itertools
import json
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from deepspeed.checkpoint.format.checksum import crc32c
from deepspeed.checkpoint.format.folders import MANIFEST
from deepspeed.checkpoint.format.manifest import Box, Entry, Manifest
from deepspeed.errors import CheckpointError
from deepspeed.zero.regions import Gap, Region, Span, faults, runs, uncovered


def example() -> Manifest:
    part = Box("rank_00001.bin", 64, (4 << 20) + 1, 2, 10, (0, 0xFFFFFFFF), Region((0, 1), (5, 2)))
    entries = [
        Entry("master", "a.weight", torch.float32, (4, 3), (Box("rank_00000.bin", 0, 64, 0, 12, (7,)),)),
        Entry("optim.exp_avg", 'odd "name"\n/../\u00e9', torch.bfloat16, (5, 4), (part, part)),
        Entry("param", "empty", torch.int8, (0, 3), ()),
        Entry("plain", "scalar", torch.float64, (), (Box("rank_00000.bin", 128, 64, 0, 1, (9,)),)),
    ]
    facts = {"engine": {"global_steps": 3}, "text": "\u2028 \U0001f600", "none": None, "list": [1, 2.5, True]}
    return Manifest({e.key: e for e in entries}, {"rank_00000.bin": 4096, "rank_00001.bin": 8192}, facts)


def parse(content: bytes) -> Manifest:
    return Manifest.from_bytes(content, where="here/manifest.json", checksum=crc32c)


def test_a_manifest_comes_back_as_it_was() -> None:
    assert parse(example().to_bytes(crc32c)) == example()
    assert parse(Manifest().to_bytes(crc32c)) == Manifest()


def test_a_manifest_is_json() -> None:
    text = json.loads(example().to_bytes(crc32c))
    assert text["format"] == "deepspeed-checkpoint" and text["version"] == 1 and len(text["tensors"]) == 4


def test_every_flipped_bit_of_a_manifest_is_refused() -> None:
    content = example().to_bytes(crc32c)
    for at in range(len(content)):
        for bit in (1, 32, 128):
            with pytest.raises(CheckpointError, match="manifest.json"):
                parse(content[:at] + bytes([content[at] ^ bit]) + content[at + 1 :])


def test_every_cut_of_a_manifest_is_refused() -> None:
    content = example().to_bytes(crc32c)
    for at in range(0, len(content), 7):
        with pytest.raises(CheckpointError):
            parse(content[:at])
    with pytest.raises(CheckpointError):
        parse(content + b" ")


def test_another_version_is_refused_by_its_number() -> None:
    with pytest.raises(CheckpointError, match="version 2"):
        parse(b'{"format":"deepspeed-checkpoint","version":2,"crc32c":"00000000",\n}')


@pytest.mark.parametrize("file", ["../x", "/etc/passwd", ".hidden", "a/b"])
def test_a_box_outside_the_folder_is_refused(file: str) -> None:
    bad = Manifest({("master", "w"): Entry("master", "w", torch.float32, (1,), (Box(file, 0, 64, 0, 1, (0,)),))})
    with pytest.raises(CheckpointError, match="not a manifest"):
        parse(bad.to_bytes(crc32c))


@pytest.mark.parametrize("box", [(64, 0, 1, ()), (64, 0, 1, (0, 0)), (-64, 0, 1, ()), (64, -1, 1, (0,))])
def test_a_place_that_cannot_be_is_refused(box: tuple[int, int, int, tuple[int, ...]]) -> None:
    bad = Manifest({("master", "w"): Entry("master", "w", torch.float32, (1,), (Box("a", 0, *box),))})
    with pytest.raises(CheckpointError, match="not a manifest"):
        parse(bad.to_bytes(crc32c))


def test_a_dtype_that_is_none_is_refused() -> None:
    content = example().to_bytes(crc32c).replace(b'"dtype":"float64"', b'"dtype":"load"')
    body = content.partition(b"\n")[2]
    head = f'{{"format":"deepspeed-checkpoint","version":1,"crc32c":"{crc32c(body):08x}",\n'.encode()
    with pytest.raises(CheckpointError, match="dtype"):
        parse(head + body)


def test_not_a_number_cannot_be_written() -> None:
    with pytest.raises(ValueError, match="JSON"):
        Manifest(facts={"x": float("nan")}).to_bytes(crc32c)
    assert MANIFEST == "manifest.json"


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
        whole = whole[tuple(slice(s, s + n) for s, n in zip(*span.region, strict=True))]
    return [int(n) for n in whole.reshape(-1)[span.lo : span.hi]]


@given(pairs())
@settings(max_examples=1500, deadline=None)
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
    assert list(runs((3, 4), Span(0, 12), Span(1, 7, Region((1, 0), (2, 4))))) == [
        (5, 1, 6)
    ]  # whole rows follow each other


@given(st.data())
@settings(max_examples=600, deadline=None)
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
    assert faults(0, []) == []
    assert list(itertools.chain(faults(4, [(0, 4)]))) == []
