"""``manifest.json``: what a checkpoint holds and where; pure, specified in docs/checkpoint-format.md."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from deepspeed.checkpoint.format.boxes import Gap, Region, Span, uncovered
from deepspeed.checkpoint.format.names import MANIFEST as MANIFEST
from deepspeed.errors import CheckpointError

FORMAT = "deepspeed-checkpoint"
VERSION = 1
PIECE_BYTES = 4 << 20  # what one checksum covers
ALIGN_BYTES = 64  # boxes begin there
_LARGEST = 1 << 59  # elements of a tensor or bytes of a file; what torch can count, whatever the dtype

Key = tuple[str, str]


@dataclass(frozen=True)
class Box:
    """Elements [lo, hi) of ``region`` (None: all), at ``offset`` of ``file``; a crc32c per 4 MiB of ``extent``."""

    file: str
    offset: int
    extent: int
    lo: int
    hi: int
    crcs: tuple[int, ...]
    region: Region | None = None

    @property
    def span(self) -> Span:
        return Span(self.lo, self.hi, self.region)


@dataclass(frozen=True)
class Entry:
    """One global tensor."""

    state: str
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]

    @property
    def key(self) -> Key:
        return self.state, self.name

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def faults(self) -> list[Gap]:
        """Where the boxes do not cover the tensor exactly once."""
        return uncovered(self.shape, (box.span for box in self.boxes))


@dataclass
class Manifest:
    """Everything but the bytes. ``files``: length of each in bytes; ``facts``: plain JSON, see the specification."""

    entries: dict[Key, Entry] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def to_bytes(self, checksum: Callable[[bytes], int]) -> bytes:
        """The file. ``checksum`` is crc32c."""
        rows = ",\n".join(map(_row, self.entries.values()))
        body = f'"facts":{_text(self.facts)},\n"files":{_text(self.files)},\n"tensors":[\n{rows}\n]}}\n'.encode()
        return _head(checksum(body)) + body

    @classmethod
    def from_bytes(cls, content: bytes, *, where: str, checksum: Callable[[bytes], int]) -> "Manifest":
        """Parse and check a file. Raises CheckpointError when it is not such a file, of another version, or damaged."""
        head, newline, body = content.partition(b"\n")
        try:
            line = json.loads(head.rstrip(b",") + b"}")
            version = int(line["version"]) if line["format"] == FORMAT else None
        except (ValueError, KeyError, TypeError):
            version = None
        if version is None:
            raise CheckpointError(f"{where} does not begin like a manifest of this package; it is damaged or another's")
        if version != VERSION:
            raise CheckpointError(f"{where} is of format version {version}; this release reads version {VERSION}")
        if not newline or head + newline != _head(checksum(body)):
            raise CheckpointError(f"{where} is damaged: its checksum does not match; use another checkpoint or a copy")
        try:
            text = json.loads(b"{" + body)
            entries = [_entry(row) for row in text["tensors"]]
            files = {_file(name): _sizes([nbytes])[0] for name, nbytes in text["files"].items()}
            if not isinstance(text["facts"], dict) or len({e.key for e in entries}) != len(entries):
                raise ValueError("the facts are no object, or a tensor is there twice")
            return cls({e.key: e for e in entries}, files, text["facts"])
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
            raise CheckpointError(
                f"{where} is not a manifest this release understands: {type(error).__name__}: {error}"
            ) from error


def _head(crc: int) -> bytes:
    return f'{{"format":"{FORMAT}","version":{VERSION},"crc32c":"{crc:08x}",\n'.encode()


def _text(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _row(entry: Entry) -> str:
    boxes = [
        [b.file, b.offset, b.extent, b.lo, b.hi, " ".join(f"{c:08x}" for c in b.crcs), *(b.region or ())]
        for b in entry.boxes
    ]
    dtype = str(entry.dtype).removeprefix("torch.")
    return _text({"state": entry.state, "name": entry.name, "dtype": dtype, "shape": entry.shape, "boxes": boxes})


def _entry(row: dict[str, Any]) -> Entry:
    state, name, dtype, boxes = row["state"], row["name"], getattr(torch, row["dtype"]), []
    if not (isinstance(state, str) and isinstance(name, str) and isinstance(dtype, torch.dtype)):
        raise TypeError(f"{state!r} of {name!r}, of dtype {row['dtype']!r}, is no tensor")
    for file, offset, extent, lo, hi, crcs, *part in row["boxes"]:
        for number in (offset, extent, lo, hi):
            _sizes([number])
        sums, region = tuple(int(c, 16) for c in crcs.split()), Region(*map(_sizes, part)) if part else None
        if len(sums) != -(-extent // PIECE_BYTES):
            raise ValueError(f"{len(sums)} checksums for {extent} bytes")
        boxes.append(Box(_file(file), offset, extent, lo, hi, sums, region))
    return Entry(state, name, dtype, _sizes(row["shape"]), tuple(boxes))


def _file(name: Any) -> str:
    """``name``, which must be that of a visible file in the checkpoint's own folder."""
    if not isinstance(name, str) or not name or "/" in name or "\0" in name or name.startswith("."):
        raise ValueError(f"{name!r} is no file of this folder")
    return name


def _sizes(values: Any) -> tuple[int, ...]:
    if any(type(v) is not int or v < 0 for v in values) or prod(max(v, 1) for v in values) >= _LARGEST:
        raise ValueError(f"no shape: {values}")
    return tuple(values)
