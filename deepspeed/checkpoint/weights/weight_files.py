"""A model's weights as files that other programs read, safetensors or torch; each file is whole or absent."""

import contextlib
import json
import os
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch

from deepspeed.checkpoint.format.folders import sync_folder, temporary_for, write_atomically
from deepspeed.checkpoint.weights.weights import Stream, total_bytes, with_aliases
from deepspeed.errors import CheckpointError

SAFETENSORS = ("model", ".safetensors")
TORCH = ("pytorch_model", ".bin")
Progress = Callable[[int], None]
_PIECE = 8 << 20  # elements that are copied at once
_NAMES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.bool: "BOOL"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8"},
    **{torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64"},
    **{torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"},
}


def as_bytes(flat: torch.Tensor) -> memoryview:
    """The memory of a flat, contiguous host tensor."""
    raw: Any = flat.view(torch.uint8).numpy()
    return memoryview(raw)


@contextlib.contextmanager
def finished(path: Path) -> Iterator[Path]:
    """A name to write to, which becomes ``path`` when the body ends well and its bytes are on the disk."""
    with temporary_for(path) as partial:
        yield partial
        _sync(partial)
        os.replace(partial, path)
    sync_folder(path.parent)


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


@contextlib.contextmanager
def torch_file(
    path: Path, shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], *, aliases: Mapping[str, str]
) -> Iterator[Callable[..., None]]:
    """``path`` as a dict of tensors for ``torch.load``, filled tensor by tensor with ``write(name, values, start=0)``.

    ``shapes``: (dtype, shape) by name, in order; ``aliases``: further names. torch lays the file out without values;
    each tensor's bytes then go to their place in the archive, which stores them as they are. Raises OSError.
    """
    with finished(path) as partial:
        # Memory that nobody touches costs none.
        state = {name: torch.empty(shape, dtype=dtype, device="cpu") for name, (dtype, shape) in shapes.items()}
        with torch.serialization.skip_data():
            torch.save(with_aliases(state, aliases), partial)
        laid_out = torch.load(partial, map_location="meta", weights_only=True)
        offsets = {name: int(t.untyped_storage()._checkpoint_offset) for name, t in laid_out.items()}
        with partial.open("r+b") as file:

            def write(name: str, values: torch.Tensor, *, start: int = 0) -> None:
                """Elements from ``start`` on of one tensor, in row-major order; on any device, in any dtype."""
                dtype, _ = shapes[name]
                flat = values.detach().reshape(-1)
                for at in range(0, flat.numel(), _PIECE):
                    # Always a copy: memory that numpy has seen can never be given back, and a gathered unit's must be.
                    piece = flat[at : at + _PIECE].to(device="cpu", dtype=dtype, copy=True)
                    file.seek(offsets[name] + (start + at) * dtype.itemsize)
                    file.write(as_bytes(piece))

            yield write


def write_safetensors(file: BinaryIO, streams: Sequence[Stream], *, progress: Progress = lambda _bytes: None) -> None:
    """Write ``streams``, largest elements first, which aligns them; the package would need all of them in memory."""
    ordered = sorted(streams, key=lambda s: -s.dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for s in ordered:
        if s.dtype not in _NAMES:
            raise CheckpointError(f"{s.name} is {s.dtype}, which safetensors files cannot hold; use --format torch")
        header[s.name] = {"dtype": _NAMES[s.dtype], "shape": list(s.shape), "data_offsets": [at, at + s.nbytes]}
        at += s.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    for s in ordered:
        for chunk in s.chunks():
            file.write(as_bytes(chunk))
            progress(chunk.nbytes)


def plan_shards(streams: Sequence[Stream], max_bytes: int | None) -> list[list[Stream]]:
    """``streams`` in order, in shards of ``max_bytes`` at most (None: one shard) unless one tensor alone is larger."""
    shards: list[list[Stream]] = [[]]
    filled = 0
    for s in streams:
        if shards[-1] and max_bytes is not None and filled + s.nbytes > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(s)
        filled += s.nbytes
    return shards


def write_weights(
    streams: Sequence[Stream],
    out: Path,
    kind: tuple[str, str],
    *,
    max_shard_bytes: int | None,
    shared: Mapping[str, str] | None = None,
    progress: Progress = lambda _bytes: None,
) -> list[Path]:
    """Write ``streams`` into the folder ``out`` as SAFETENSORS or TORCH files, with an index when several; the paths.

    Holds a piece of one tensor (safetensors) or one shard (torch). ``shared`` (alias -> name in ``streams``) goes into
    torch files as the same storage, and is left out of safetensors, as Hugging Face expects. Files of an earlier export
    of this kind are replaced once the new ones are complete. Raises OSError, CheckpointError.
    """
    out.mkdir(parents=True, exist_ok=True)
    shards = plan_shards(streams, max_shard_bytes)
    (stem, suffix), total = kind, len(shards)
    names = (
        [f"{stem}-{i:05d}-of-{total:05d}{suffix}" for i in range(1, total + 1)] if total > 1 else [f"{stem}{suffix}"]
    )
    aliases = {} if kind == SAFETENSORS or not shared else shared
    with contextlib.ExitStack() as cleanup:
        temporary = [cleanup.enter_context(temporary_for(out / name)) for name in names]
        for path, shard in zip(temporary, shards, strict=True):
            with path.open("wb") as file:
                if kind == SAFETENSORS:
                    write_safetensors(file, shard, progress=progress)
                else:
                    torch.save(with_aliases({s.name: _read(s, progress) for s in shard}, aliases), file)
            _sync(path)
        pattern = re.compile(rf"{re.escape(stem)}(-\d+-of-\d+)?{re.escape(suffix)}(\.index\.json)?")
        stale = [p for p in out.iterdir() if pattern.fullmatch(p.name) and p.name not in names]
        for path, name in zip(temporary, names, strict=True):
            os.replace(path, out / name)
    for path in stale:
        path.unlink(missing_ok=True)  # several processes may write the same files at once
    written = [out / name for name in names]
    if total > 1:
        where = with_aliases({s.name: n for n, shard in zip(names, shards, strict=True) for s in shard}, aliases)
        index = {"metadata": {"total_size": total_bytes(streams)}, "weight_map": dict(sorted(where.items()))}
        written.append(out / f"{stem}{suffix}.index.json")
        write_atomically(written[-1], (json.dumps(index, indent=2) + "\n").encode())
    sync_folder(out)
    return written


def _read(values: Stream, progress: Progress) -> torch.Tensor:
    progress(values.nbytes)
    return values.whole()
