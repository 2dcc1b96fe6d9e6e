"""The manifest round-trips exactly, and no byte of it can change unnoticed; boxes cover tensors as rectangles do."""

import json
from typing import Any

import pytest
import torch

from deepspeed.checkpoint.format.checksum import crc32c
from deepspeed.checkpoint.format.folders import MANIFEST
from deepspeed.checkpoint.format.manifest import Box, Entry, Manifest
from deepspeed.errors import CheckpointError
from deepspeed.zero.regions import Region
from tests.harness.rows import for_each


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


@for_each(
    ("file", "box"),
    [
        *((file, (64, 0, 1, (0,))) for file in ("../x", "/etc/passwd", ".hidden", "a/b")),
        *(("a", box) for box in ((64, 0, 1, ()), (64, 0, 1, (0, 0)), (-64, 0, 1, ()), (64, -1, 1, (0,)))),
    ],
)
def test_a_box_outside_the_folder_or_its_file_is_refused(file: str, box: tuple[Any, ...]) -> None:
    bad = Manifest({("master", "w"): Entry("master", "w", torch.float32, (1,), (Box(file, 0, *box),))})
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
