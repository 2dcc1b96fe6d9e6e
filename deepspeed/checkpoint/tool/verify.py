"""``ds_checkpoint verify``: read every byte, and name every tensor that is damaged, missing or stored twice."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from deepspeed.checkpoint.format import folders
from deepspeed.checkpoint.format.checksum import crc32c
from deepspeed.checkpoint.format.manifest import MANIFEST, PIECE_BYTES, Box, Entry, Manifest
from deepspeed.checkpoint.load.reader import OwnSource, open_checkpoint, read_manifest
from deepspeed.checkpoint.save.writer import progress
from deepspeed.checkpoint.tool.common import say, sized
from deepspeed.checkpoint.weights.safetensors_file import as_bytes
from deepspeed.checkpoint.weights.weight_files import Progress
from deepspeed.checkpoint.weights.weights import stream, total_bytes
from deepspeed.errors import CheckpointError

_LISTED = 50


def verify(folder: Path) -> list[str]:
    """Everything that is wrong with the checkpoint in the tag's folder ``folder``, a sentence each; empty when nothing
    is.

    Raises CheckpointError when it cannot be understood at all.
    """
    if not folders.is_complete(folder):
        return _read_all(folder)
    manifest = read_manifest(folder)
    wrong = [*_coverage(manifest), *_layout(manifest)]
    with progress("verify", sum(manifest.files.values())) as told:
        for name, nbytes in manifest.files.items():
            wrong += _file(manifest, folder / name, nbytes, told)
    return wrong or _facts(folder)


def _name(entry: Entry) -> str:
    return f"{entry.state} of {entry.name}"


def _coverage(manifest: Manifest) -> Iterator[str]:
    """Every element exactly once."""
    for entry in manifest.entries.values():
        for gap in entry.faults():
            what = "is missing" if gap.times == 0 else f"is stored {gap.times} times"
            yield f"{_name(entry)}: {MANIFEST}: elements {gap.lo} to {gap.hi} of {entry.numel}: {what}"


def _layout(manifest: Manifest) -> Iterator[str]:
    """Every byte of a file belongs to exactly one box, and every box has its checksums."""
    ends = dict.fromkeys(manifest.files, 0)
    for box, entry in sorted(_boxes(manifest), key=lambda pair: (pair[0].file, pair[0].offset)):
        where = f"{_name(entry)}: {box.file} at byte {box.offset}"
        if box.file not in ends:
            yield f"{where}: {MANIFEST} has no such file"
            continue
        if box.offset != ends[box.file]:
            yield f"{where}: {'overlaps' if box.offset < ends[box.file] else 'leaves a gap to'} the tensor before it"
        if len(box.crcs) != -(-box.extent // PIECE_BYTES) or (box.hi - box.lo) * entry.dtype.itemsize > box.extent:
            yield f"{where}: {MANIFEST} contradicts itself about its size"
        ends[box.file] = box.offset + box.extent
    for name, end in ends.items():
        if end != manifest.files[name]:
            yield f"{name}: {manifest.files[name]} bytes, of which tensors use {end}"


def _boxes(manifest: Manifest) -> Iterator[tuple[Box, Entry]]:
    return ((box, entry) for entry in manifest.entries.values() for box in entry.boxes)


def _file(manifest: Manifest, path: Path, nbytes: int, told: Progress) -> Iterator[str]:
    """Sizes and checksums of one file."""
    mine = sorted(((b, e) for b, e in _boxes(manifest) if b.file == path.name), key=lambda pair: pair[0].offset)
    names = ", ".join(dict.fromkeys(_name(e) for _, e in mine))
    try:
        size = path.stat().st_size
        if size != nbytes:
            yield f"{path.name}: has {size} bytes, not {nbytes}"
        with path.open("rb") as file:
            buffer = torch.empty(PIECE_BYTES, dtype=torch.uint8)
            for box, entry in mine:
                for piece, crc in enumerate(box.crcs):
                    start = box.offset + piece * PIECE_BYTES
                    length = min(PIECE_BYTES, box.offset + box.extent - start)
                    file.seek(start)
                    got = file.readinto(as_bytes(buffer[:length]))
                    if got < length or crc32c(buffer[:length]) != crc:
                        how = "is cut off" if got < length else "is damaged: the checksum does not match"
                        yield f"{_name(entry)}: {path.name} at bytes {start} to {start + length}: {how}"
                    told(length)
    except OSError as error:
        yield f"{path.name}: {error.strerror}; it holds {names}"


def _facts(folder: Path) -> list[str]:
    """Whether what is not a tensor can be decoded; pickled client state is compared with its checksum, never opened."""
    try:
        source = OwnSource(folder)
        try:
            ranks = source.manifest.facts.get("ranks") or []
            pickled = [rank["pickled"] for rank in ranks if isinstance(rank, dict) and rank.get("pickled")]
            if not pickled:
                _ = source.facts
            return [sentence for known in pickled for sentence in _pickled(folder, known)]
        finally:
            source.close()
    except (CheckpointError, ValueError, KeyError, TypeError) as error:
        return [str(error)]


def _pickled(folder: Path, known: dict[str, Any]) -> Iterator[str]:
    name = Path(str(known["file"])).name
    try:
        content = (folder / name).read_bytes()
    except OSError as error:
        yield f"{name}: {error.strerror}; it holds pickled client state"
        return
    if len(content) != known["nbytes"] or f"{crc32c(content):08x}" != known["crc32c"]:
        yield f"{name}: pickled client state is damaged: the checksum does not match"


def _read_all(folder: Path) -> list[str]:
    """Another program's layout has no checksums of its own: read every tensor once."""
    source = open_checkpoint(folder)
    wrong = []
    try:
        with progress("verify", total_bytes(stream(source, key) for key in source.entries)) as told:
            for key in source.entries:
                try:
                    for chunk in stream(source, key).chunks():
                        told(chunk.nbytes)
                except (CheckpointError, OSError) as error:
                    wrong.append(f"{key[0]} of {key[1]}: {error}")
    finally:
        source.close()
    return wrong


def run(folder: Path) -> int:
    """Print the verdict; 0 or 1."""
    try:
        wrong = verify(folder)
    except CheckpointError as error:
        say(f"DAMAGED {folder}")
        say(f"  {error}")
        return 1
    if wrong:
        say(f"DAMAGED {folder}")
        for sentence in wrong[:_LISTED]:
            say(f"  {sentence}")
        if len(wrong) > _LISTED:
            say(f"  and {len(wrong) - _LISTED} more")
        return 1
    if folders.is_complete(folder):
        manifest = read_manifest(folder)
        total, pieces = sum(manifest.files.values()), sum(len(b.crcs) for b, _ in _boxes(manifest))
        say(
            f"ok {folder}: {len(manifest.entries)} tensors, {len(manifest.files)} files, {sized(total)}, "
            f"{pieces} checksums match"
        )
    else:
        say(
            f"ok {folder}: every tensor can be read (files in DeepSpeed's layout; only the checksums of their "
            "archives exist)"
        )
    return 0
