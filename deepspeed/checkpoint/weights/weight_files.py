"""A model's weights as files that other programs read: safetensors or torch, in shards with an index, each file whole
or absent.
"""

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch

from deepspeed.checkpoint.format.folders import sync_folder, temporary_for, write_atomically
from deepspeed.checkpoint.weights.safetensors_file import write_safetensors
from deepspeed.checkpoint.weights.weights import Stream, total_bytes
from deepspeed.errors import CheckpointError

SAFETENSORS = ("model", ".safetensors")
TORCH = ("pytorch_model", ".bin")
Progress = Callable[[int], None]


def plan_shards(streams: Sequence[Stream], max_bytes: int | None) -> list[list[Stream]]:
    """``streams`` in order, cut so that no shard exceeds ``max_bytes`` (None: one shard) unless one tensor alone
    does.
    """
    shards: list[list[Stream]] = [[]]
    filled = 0
    for s in streams:
        if shards[-1] and max_bytes is not None and filled + s.nbytes > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(s)
        filled += s.nbytes
    return shards


def existing(out: Path, kind: tuple[str, str]) -> list[Path]:
    """Files of an earlier export of this kind in ``out``."""
    pattern = re.compile(rf"{re.escape(kind[0])}(-\d+-of-\d+)?{re.escape(kind[1])}(\.index\.json)?")
    return sorted(p for p in out.iterdir() if pattern.fullmatch(p.name)) if out.is_dir() else []


def write_weights(
    streams: Sequence[Stream],
    out: Path,
    kind: tuple[str, str],
    *,
    max_shard_bytes: int | None,
    shared: Mapping[str, str] | None = None,
    progress: Progress = lambda _bytes: None,
) -> list[Path]:
    """Write ``streams`` into the folder ``out`` as SAFETENSORS or TORCH files, with an index when there are several;
    the paths.

    Holds a piece of one tensor (safetensors) or one shard (torch). ``shared`` (alias -> name in ``streams``) goes into
    torch files as the same storage, and is left out of safetensors, as Hugging Face expects. Files of an earlier export
    of this kind are replaced once the new ones are complete. Raises OSError, CheckpointError.
    """
    out.mkdir(parents=True, exist_ok=True)
    shards = plan_shards(streams, max_shard_bytes)
    stem, suffix = kind
    total = len(shards)
    names = (
        [f"{stem}{suffix}"] if total == 1 else [f"{stem}-{i:05d}-of-{total:05d}{suffix}" for i in range(1, total + 1)]
    )
    aliases = {} if kind == SAFETENSORS or not shared else shared
    with contextlib.ExitStack() as cleanup:
        temporary = [cleanup.enter_context(temporary_for(out / name)) for name in names]
        for path, shard in zip(temporary, shards, strict=True):
            with _synced(path) as file:
                if kind == SAFETENSORS:
                    write_safetensors(file, shard, progress=progress)
                else:
                    _write_torch(file, shard, aliases, progress)
        stale = {p.name for p in existing(out, kind)} - set(names)
        for path, name in zip(temporary, names, strict=True):
            os.replace(path, out / name)
    for name in stale:
        (out / name).unlink(missing_ok=True)  # several processes may write the same files at once
    written = [out / name for name in names]
    if total > 1:
        written.append(_write_index(out / f"{stem}{suffix}.index.json", names, shards, aliases))
    sync_folder(out)
    return written


def _write_index(path: Path, names: list[str], shards: list[list[Stream]], aliases: Mapping[str, str]) -> Path:
    where = {s.name: name for name, shard in zip(names, shards, strict=True) for s in shard}
    where |= {alias: where[name] for alias, name in aliases.items() if name in where}
    index = {
        "metadata": {"total_size": sum(total_bytes(shard) for shard in shards)},
        "weight_map": dict(sorted(where.items())),
    }
    write_atomically(path, (json.dumps(index, indent=2) + "\n").encode())
    return path


def _write_torch(file: BinaryIO, shard: list[Stream], aliases: Mapping[str, str], progress: Progress) -> None:
    state: dict[str, Any] = {}
    for s in shard:
        state[s.name] = s.whole()
        progress(s.nbytes)
    state |= {alias: state[name] for alias, name in aliases.items() if name in state}
    torch.save(state, file)


@contextlib.contextmanager
def _synced(path: Path) -> Iterator[BinaryIO]:
    with path.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def save_file(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """Let ``write`` fill the file ``path``, which appears only when it is complete and on the disk."""
    with temporary_for(path) as temporary:
        with _synced(temporary) as file:
            write(file)
        os.replace(temporary, path)
    sync_folder(path.parent)


def check_empty(out: Path, *, overwrite: bool) -> None:
    """Raise CheckpointError when ``out`` is a file, or a folder with something in it and ``overwrite`` is false."""
    if out.exists() and not out.is_dir():
        raise CheckpointError(f"{out} is a file; name a folder to write to")
    if not overwrite and out.is_dir() and any(out.iterdir()):
        raise CheckpointError(f"{out} is not empty; name another folder, or pass --overwrite")
