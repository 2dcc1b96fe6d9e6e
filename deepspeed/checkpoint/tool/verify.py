"""``ds_checkpoint verify``: read every byte, and name every tensor that is damaged, missing or stored twice."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch

from deepspeed.checkpoint.foreign.pickled import checked
from deepspeed.checkpoint.format import folders
from deepspeed.checkpoint.format.checksum import crc32c
from deepspeed.checkpoint.format.manifest import MANIFEST, PIECE_BYTES, Box, Entry, Manifest
from deepspeed.checkpoint.load.reader import OwnSource, open_checkpoint, read_manifest
from deepspeed.checkpoint.save.writer import progress
from deepspeed.checkpoint.tool.common import say, sized
from deepspeed.checkpoint.weights.weight_files import Progress, as_bytes
from deepspeed.checkpoint.weights.weights import stream, total_bytes
from deepspeed.errors import CheckpointError

_LISTED = 50


def verify(folder: Path) -> list[str]:
    """Everything that is wrong with the checkpoint in the tag's folder, a sentence each. Raises CheckpointError."""
    if not folders.is_complete(folder):
        return _read_all(folder)
    manifest = read_manifest(folder)
    wrong = [*_coverage(manifest), *_layout(manifest)]
    with progress("verify", sum(manifest.files.values())) as advance:
        for name in manifest.files:
            wrong += _file(manifest, folder / name, advance)
    return wrong or _facts(folder)


def _name(entry: Entry) -> str:
    return f"{entry.state} of {entry.name}"


def _boxes(manifest: Manifest) -> list[tuple[Box, Entry]]:
    """In the order of their bytes."""
    boxes = ((box, entry) for entry in manifest.entries.values() for box in entry.boxes)
    return sorted(boxes, key=lambda pair: (pair[0].file, pair[0].offset))


def _coverage(manifest: Manifest) -> Iterator[str]:
    """Every element exactly once."""
    for entry in manifest.entries.values():
        for gap in entry.faults():
            what = "is missing" if gap.times == 0 else f"is stored {gap.times} times"
            yield f"{_name(entry)}: {MANIFEST}: elements {gap.lo} to {gap.hi} of {entry.numel}: {what}"


def _layout(manifest: Manifest) -> Iterator[str]:
    """Every byte of a file belongs to exactly one box, and every box has its checksums."""
    ends = dict.fromkeys(manifest.files, 0)
    for box, entry in _boxes(manifest):
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


def _file(manifest: Manifest, path: Path, advance: Progress) -> Iterator[str]:
    """Sizes and checksums of one file."""
    mine = [(box, entry) for box, entry in _boxes(manifest) if box.file == path.name]
    try:
        size, nbytes = path.stat().st_size, manifest.files[path.name]
        if size != nbytes:
            yield f"{path.name}: has {size} bytes, not {nbytes}"
        with path.open("rb") as file:
            buffer = torch.empty(PIECE_BYTES, dtype=torch.uint8)
            for box, entry in mine:
                for start, crc in zip(range(box.offset, box.offset + box.extent, PIECE_BYTES), box.crcs, strict=False):
                    length = min(PIECE_BYTES, box.offset + box.extent - start)
                    file.seek(start)
                    got = file.readinto(as_bytes(buffer[:length]))
                    if got < length or crc32c(buffer[:length]) != crc:
                        how = "is cut off" if got < length else "is damaged: the checksum does not match"
                        yield f"{_name(entry)}: {path.name} at bytes {start} to {start + length}: {how}"
                    advance(length)
    except OSError as error:
        names = dict.fromkeys(_name(entry) for _, entry in mine)
        yield f"{path.name}: {error.strerror}; it holds {', '.join(names)}"


def _facts(folder: Path) -> list[str]:
    """Whether what is not a tensor can be decoded; pickled client state is compared with its checksum, never opened."""
    wrong: list[str] = []
    try:
        with contextlib.closing(OwnSource(folder)) as source:
            ranks = source.manifest.facts.get("ranks") or []
            pickled = [rank["pickled"] for rank in ranks if isinstance(rank, dict) and rank.get("pickled")]
            if not pickled:
                _ = source.facts
        for known in pickled:
            try:
                checked(folder, known)
            except (CheckpointError, OSError) as error:
                wrong.append(str(error))
    except (CheckpointError, ValueError, KeyError, TypeError) as error:
        wrong.append(str(error))
    return wrong


def _read_all(folder: Path) -> list[str]:
    """Another program's layout has no checksums of its own: read every tensor once."""
    wrong = []
    with contextlib.closing(open_checkpoint(folder)) as source:
        streams = {f"{key[0]} of {key[1]}": stream(source, key) for key in source.entries}
        with progress("verify", total_bytes(streams.values())) as advance:
            for what, values in streams.items():
                try:
                    for chunk in values.chunks():
                        advance(chunk.nbytes)
                except (CheckpointError, OSError) as error:
                    wrong.append(f"{what}: {error}")
    return wrong


def run(folder: Path) -> int:
    """Print the verdict; 0 or 1."""
    try:
        wrong = verify(folder)
    except CheckpointError as error:
        wrong = [str(error)]
    if wrong:
        more = [f"and {len(wrong) - _LISTED} more"] if len(wrong) > _LISTED else []
        say("\n  ".join([f"DAMAGED {folder}", *wrong[:_LISTED], *more]))
        return 1
    what = "every tensor can be read (files in DeepSpeed's layout; only the checksums of their archives exist)"
    if folders.is_complete(folder):
        manifest = read_manifest(folder)
        total, pieces = sum(manifest.files.values()), sum(len(box.crcs) for box, _ in _boxes(manifest))
        what = f"{len(manifest.entries)} tensors, {len(manifest.files)} files, {sized(total)}, {pieces} checksums match"
    say(f"ok {folder}: {what}")
    return 0
