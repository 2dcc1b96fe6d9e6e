"""``ds_checkpoint verify``: read every byte, and name every tensor that is damaged, missing or stored twice."""

import contextlib
from argparse import Namespace
from pathlib import Path

import torch

from deepspeed.checkpoint.foreign.unpickle import Records, checked
from deepspeed.checkpoint.foreign.weights import stream, total_bytes
from deepspeed.checkpoint.format import folders
from deepspeed.checkpoint.format.files import ChunkReader, Wanted
from deepspeed.checkpoint.format.manifest import PIECE_BYTES, Manifest
from deepspeed.checkpoint.load.reader import OwnSource, located, open_checkpoint, read_manifest
from deepspeed.checkpoint.save.writer import progress
from deepspeed.errors import CheckpointError, counted
from deepspeed.monitor.program import say, size

_LISTED = 50


def verify(folder: Path) -> list[str]:
    """Return all faults of the checkpoint in the tag's folder, a sentence each. Raises CheckpointError."""
    if not folders.is_complete(folder):
        return _read_all(folder)
    if wrong := _tensors(folder, read_manifest(folder)):
        return wrong
    try:  # would loading take the manifest, and can it decode what is not a tensor?
        with contextlib.closing(OwnSource(folder)) as source:
            pickled = [rank["pickled"] for rank in source.manifest.facts.get("ranks") or [] if rank.get("pickled")]
            for entry in pickled:
                checked(folder, entry)  # against its checksum, and never opened
            if not pickled:
                _ = source.facts
    except (CheckpointError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [str(error)]
    return []


def _tensors(folder: Path, manifest: Manifest) -> list[str]:
    """Return faults: elements not stored exactly once, wrong file sizes, gaps and overlaps, wrong checksums."""
    wrong = []
    for name, nbytes in manifest.files.items():
        actual = (folder / name).stat().st_size if (folder / name).is_file() else nbytes
        if actual != nbytes:
            wrong.append(f"{name}: has {actual} bytes, not {nbytes}")
    boxes = [(box, entry) for entry in manifest.entries.values() for box in entry.boxes]
    ends = dict.fromkeys(manifest.files, 0)
    buffer = torch.empty(PIECE_BYTES, dtype=torch.uint8)
    with (
        contextlib.closing(ChunkReader(folder)) as reader,
        progress("verify", sum(box.extent for box, _ in boxes)) as advance,
    ):
        for entry in manifest.entries.values():
            for gap in entry.faults():
                label = "is missing" if gap.times == 0 else f"is stored {gap.times} times"
                text = f"{folders.MANIFEST}: elements {gap.lo} to {gap.hi} of {entry.numel}: {label}"
                wrong.append(f"{entry.state} of {entry.name}: {text}")
        for box, entry in sorted(boxes, key=lambda pair: (pair[0].file, pair[0].offset)):
            label, end = f"{entry.state} of {entry.name}", ends.get(box.file, box.offset)
            if box.offset != end:
                how = "overlaps" if box.offset < end else "leaves a gap to"
                wrong.append(f"{label}: {box.file} at byte {box.offset}: {how} the tensor before it")
            ends[box.file] = box.offset + box.extent
            try:
                for start in range(0, box.extent, PIECE_BYTES):
                    piece = buffer[: min(PIECE_BYTES, box.extent - start)]
                    reader.read_many([Wanted(box, start, piece, label)])
                    advance(piece.numel())
            except CheckpointError as error:
                wrong.append(f"{label}: {error}")
    for name, nbytes in manifest.files.items():
        if ends[name] != nbytes:
            wrong.append(f"{name}: {nbytes} bytes, of which tensors use {ends[name]}")
    return wrong


def _read_all(folder: Path) -> list[str]:
    """Read every tensor once and return the faults: another program's layout has no checksums of its own."""
    wrong = []
    with contextlib.closing(open_checkpoint(folder)) as source:
        streams = {f"{key[0]} of {key[1]}": stream(source, key) for key in source.entries}
        with progress("verify", total_bytes(streams.values())) as advance:
            for label, values in streams.items():
                try:
                    for chunk in values.chunks():
                        advance(chunk.nbytes)
                except (CheckpointError, OSError) as error:
                    wrong.append(f"{label}: {error}")
    for records in map(Records, sorted(folder.glob("*model_states.pt"))):  # with 16-bit weights that have masters, too
        for first in records.infos:
            try:
                records.check(first)
            except (CheckpointError, OSError) as error:
                wrong.append(str(error))
    return wrong


def run(args: Namespace) -> int:
    """Print the verdict; return 0 or 1."""
    folder, verdict = located(Path(args.checkpoint), args.tag), "DAMAGED"
    try:
        wrong = verify(folder)
    except CheckpointError as error:  # it may also be of a kind that is not read here
        verdict, wrong = "CANNOT READ", [str(error)]
    if wrong:
        more = [f"and {len(wrong) - _LISTED} more"] if len(wrong) > _LISTED else []
        say("\n  ".join([f"{verdict} {folder}", *wrong[:_LISTED], *more]))
        return 1
    summary = "every tensor can be read (files in DeepSpeed's layout; only the checksums of their archives exist)"
    if folders.is_complete(folder):
        manifest = read_manifest(folder)
        total, tensors = sum(manifest.files.values()), counted(len(manifest.entries), "tensor")
        summary = f"{tensors}, {counted(len(manifest.files), 'file')}, {size(total)}, every checksum matches"
    say(f"ok {folder}: {summary}")
    return 0
