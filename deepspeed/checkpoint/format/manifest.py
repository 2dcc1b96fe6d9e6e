"""``manifest.json``: what a checkpoint holds and where; pure, specified in docs/checkpoint-format.md."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from operator import itemgetter
from typing import Any

import torch

from deepspeed.errors import CheckpointError
from deepspeed.zero.regions import Gap, Region, Span, uncovered

FORMAT = "deepspeed-checkpoint"
VERSION = 1
PIECE_BYTES = 4 << 20  # what one checksum covers
ALIGN_BYTES = 64  # boxes begin there
_LARGEST = 1 << 59  # elements of a tensor or bytes of a file; what torch can count, whatever the dtype

Key = tuple[str, str]
Row = dict[str, Any]  # of one tensor, as in the file


@dataclass(frozen=True)
class Box:
    """Stored elements [lo, hi) of ``region`` (None: all) at ``offset`` of ``file``; crc32c per 4 MiB of ``extent``."""

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
    """Global tensor, and the boxes that hold its elements."""

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
        """List the gaps and overlaps of the boxes in the tensor."""
        return uncovered(self.shape, (box.span for box in self.boxes))


@dataclass
class Manifest:
    """Checkpoint contents but the bytes. ``files``: length of each; ``facts``: plain JSON (see the specification)."""

    entries: dict[Key, Entry] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def to_bytes(self, checksum: Callable[[bytes], int]) -> bytes:
        """Serialize the manifest to the bytes of its file. ``checksum`` is crc32c."""
        return text_of([_row(entry) for entry in self.entries.values()], self.files, self.facts, checksum)

    @classmethod
    def from_bytes(cls, content: bytes, *, where: str, checksum: Callable[[bytes], int]) -> "Manifest":
        """Parse and check a file. Raises CheckpointError when it is not such a file, of another version, or damaged."""
        try:
            text = parsed(content, where=where, checksum=checksum)
            entries = [_entry(row) for row in text["tensors"]]
            files = {_file(name): _sizes([nbytes])[0] for name, nbytes in text["files"].items()}
            if not isinstance(text["facts"], dict) or len({e.key for e in entries}) != len(entries):
                raise ValueError("the facts are no object, or a tensor is there twice")
            return cls({e.key: e for e in entries}, files, text["facts"])
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
            raise CheckpointError(
                f"{where} is not a manifest this release understands: {type(error).__name__}: {error}"
            ) from error


def parsed(content: bytes, *, where: str, checksum: Callable[[bytes], int]) -> dict[str, Any]:
    """Return the JSON of a file whose head and checksum are right: ``tensors`` (rows), ``files`` and ``facts``.

    Raises CheckpointError when it is not such a file, of another version, or damaged; ValueError or RecursionError for
    JSON that somebody forged with a right checksum.
    """
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
    text: dict[str, Any] = json.loads(b"{" + body)
    return text


def text_of(rows: list[Row], files: dict[str, int], facts: dict[str, Any], checksum: Callable[[bytes], int]) -> bytes:
    """Serialize rows, files and facts to the bytes of a manifest, one row a line, with its checksum."""
    lines = ",\n".join([_ENCODER.encode(row) for row in rows])
    files_text, facts_text = _ENCODER.encode(files), _ENCODER.encode(facts)
    body = f'"facts":{facts_text},\n"files":{files_text},\n"tensors":[\n{lines}\n]}}\n'.encode()
    return _head(checksum(body)) + body


def row_of(state: str, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Row:
    """Make the row of a tensor, without boxes."""
    return {"state": state, "name": name, "dtype": str(dtype).removeprefix("torch."), "shape": shape, "boxes": []}


def box_row(box: Box) -> list[Any]:
    """Return a box as it is listed in a row."""
    sums = " ".join([f"{crc:08x}" for crc in box.crcs])
    return [box.file, box.offset, box.extent, box.lo, box.hi, sums, *(box.region or ())]


def gaps_in(row: Row) -> list[Gap]:
    """List the gaps and overlaps of the boxes of a row in its tensor."""
    at = 0
    for box in sorted(row["boxes"], key=_FIRST):
        if len(box) > 6 or box[3] != at:  # a part of the tensor, or out of order
            parts = (Span(b[3], b[4], Region(tuple(b[6]), tuple(b[7])) if len(b) > 6 else None) for b in row["boxes"])
            return uncovered(tuple(row["shape"]), parts)
        at = box[4]
    numel = prod(row["shape"])
    return [] if at == numel else uncovered(tuple(row["shape"]), [Span(b[3], b[4]) for b in row["boxes"]])


_FIRST = itemgetter(3)
_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


def _head(crc: int) -> bytes:
    return f'{{"format":"{FORMAT}","version":{VERSION},"crc32c":"{crc:08x}",\n'.encode()


def _row(entry: Entry) -> Row:
    row = row_of(entry.state, entry.name, entry.dtype, entry.shape)
    row["boxes"] += map(box_row, entry.boxes)
    return row


def _entry(row: Row) -> Entry:
    state, name, dtype, boxes = row["state"], row["name"], getattr(torch, row["dtype"]), []
    if not (isinstance(state, str) and isinstance(name, str) and isinstance(dtype, torch.dtype)):
        raise TypeError(f"{state!r} of {name!r}, of dtype {row['dtype']!r}, is no tensor")
    for file, offset, extent, lo, hi, crcs, *part in row["boxes"]:
        for number in (offset, extent, lo, hi):
            if type(number) is not int or not 0 <= number < _LARGEST:
                raise ValueError(f"no place: {number}")
        sums = [int(crc, 16) for crc in crcs.split()]
        if len(sums) != -(-extent // PIECE_BYTES):
            raise ValueError(f"{len(sums)} checksums for {extent} bytes")
        region = Region(*map(_sizes, part)) if part else None
        boxes.append(Box(_file(file), offset, extent, lo, hi, tuple(sums), region))
    return Entry(state, name, dtype, _sizes(row["shape"]), tuple(boxes))


def _file(name: Any) -> str:
    """Return ``name``. Raises ValueError unless it is a visible file name in the checkpoint's own folder."""
    if not isinstance(name, str) or not name or "/" in name or "\0" in name or name.startswith("."):
        raise ValueError(f"{name!r} is no file of this folder")
    return name


def _sizes(values: Any) -> tuple[int, ...]:
    numel = 1
    for size in values:
        if type(size) is not int or size < 0:
            raise ValueError(f"no shape: {values}")
        numel *= max(size, 1)
    if numel >= _LARGEST:
        raise ValueError(f"no shape: {values}")
    return tuple(values)
