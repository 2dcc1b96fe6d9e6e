"""The manifest round-trips exactly, and no byte of it can change unnoticed; boxes cover tensors as rectangles do."""

import itertools
import json
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from deepspeed.checkpoint.boxes import Gap, faults, runs
from deepspeed.checkpoint.checksum import crc32c
from deepspeed.checkpoint.manifest import MANIFEST, Box, Entry, Manifest
from deepspeed.errors import CheckpointError


def example() -> Manifest:
    part = Box("rank_00001.bin", 64, 128, 2, 10, (0, 0xFFFFFFFF), (0, 1), (5, 2))
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
def parts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int, int]:
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=0, max_size=4)))
    start = tuple(draw(st.integers(0, n - 1)) for n in shape)
    part = tuple(draw(st.integers(1, n - s)) for n, s in zip(shape, start, strict=True))
    lo = draw(st.integers(0, prod(part)))
    return shape, start, part, lo, draw(st.integers(lo, prod(part)))


@given(parts())
@settings(max_examples=400, deadline=None)
def test_runs_are_what_slicing_says(case: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int, int]) -> None:
    shape, start, part, lo, hi = case
    globe = np.arange(prod(shape)).reshape(shape)
    wanted = globe[tuple(slice(s, s + n) for s, n in zip(start, part, strict=True))].reshape(-1)[lo:hi]
    found = np.full(hi - lo, -1)
    last = -1
    for run in runs(shape, lo=lo, hi=hi, start=start, part=part):
        assert run.globe > last and run.numel > 0
        last = run.globe + run.numel - 1
        found[run.own : run.own + run.numel] = globe.reshape(-1)[run.globe : run.globe + run.numel]
    assert (found == wanted).all()


def test_a_span_of_the_whole_is_one_run() -> None:
    assert list(runs((3, 4), lo=2, hi=11)) == [(2, 0, 9)]
    assert list(runs((3, 4), lo=2, hi=2)) == []


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
