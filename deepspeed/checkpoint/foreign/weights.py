"""The weights of a model: as streams of pieces of tensors, and as files of safetensors or torch, whole or absent."""

import contextlib
import functools
import json
import logging
import os
import re
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import nn

from deepspeed.accelerator.device import DTYPES
from deepspeed.checkpoint.format.folders import finished, sync, temporary_for, write_atomically
from deepspeed.checkpoint.load.source import Key, Source, Wish, fill
from deepspeed.config.model.values import byte_count
from deepspeed.errors import CheckpointError
from deepspeed.monitor.log import log_dist
from deepspeed.reallocate.flow import Parcel, WeightFlow, plan_shards
from deepspeed.zero.module.state import whole_shape
from deepspeed.zero.param import castable

Progress = Callable[[int], None]
Tensors = dict[str, torch.Tensor]
_CHUNK_BYTES = 32 << 20  # what one step of a stream holds, before a cast
_PIECE = 8 << 20  # elements that are copied at once
_NAMES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.bool: "BOOL"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8"},
    **{torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64"},
    **{torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"},
}


class Stream(NamedTuple):
    """Tensor in pieces: ``read(start, out)`` fills the flat host tensor ``out`` with elements from ``start`` on."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[int, torch.Tensor], None]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def chunks(self, chunk_bytes: int = _CHUNK_BYTES) -> Iterator[torch.Tensor]:
        """Yield the elements in order, as flat tensors that share one buffer: use each before asking for the next."""
        length = max(1, min(self.numel, chunk_bytes // self.dtype.itemsize))
        buffer = torch.empty(length, dtype=self.dtype, device="cpu")
        for start in range(0, self.numel, length):
            out = buffer[: self.numel - start]
            self.read(start, out)
            yield out

    def whole(self) -> torch.Tensor:
        """Read the tensor in its shape."""
        values = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        length = _CHUNK_BYTES // self.dtype.itemsize
        for index, piece in enumerate(values.view(-1).split(length)):
            self.read(index * length, piece)
        return values


def stream(source: Source, key: Key, *, name: str | None = None, dtype: torch.dtype | None = None) -> Stream:
    """Stream the tensor ``key`` of ``source``, cast piece by piece to ``dtype`` if that differs from the stored one."""
    stored, shape = source.entries[key]
    return Stream(name or key[1], dtype or stored, shape, lambda start, out: fill(source, [Wish(key, out, start)]))


def total_bytes(streams: Iterable[Stream]) -> int:
    """Return the bytes of all values."""
    return sum(s.nbytes for s in streams)


def block_of(config: Any, name: str) -> dict[str, Any]:
    """Return a block of a configuration as a checkpoint keeps it; empty when there is none."""
    block = config.get(name) if isinstance(config, dict) else None
    return block if isinstance(block, dict) else {}


def compute_dtype(facts: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype the model trained in: as the checkpoint says, else by its stored configuration."""
    named = (facts.get("world") or {}).get("compute_dtype")
    blocks = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16"}
    by_config = (short for name, short in blocks.items() if block_of(facts.get("config"), name).get("enabled"))
    return DTYPES[named if named in DTYPES else next(by_config, "fp32")]


def open_facts(source: Source) -> dict[str, Any]:
    """Return facts that are plain JSON ("config", "world", "shared", "engine"), even if client state needs pickle."""
    manifest = getattr(source, "manifest", None)
    return dict(source.facts if manifest is None else manifest.facts)


def shared_names(source: Source) -> dict[str, str]:
    """Return the tied weights: {other name: the name the values are stored under}."""
    return dict(open_facts(source).get("shared") or {})


def with_aliases(state: dict[str, Any], aliases: Mapping[str, str]) -> dict[str, Any]:
    """Add the further names of tied weights to ``state``."""
    return state | {alias: state[name] for alias, name in aliases.items() if name in state}


def weight_keys(source: Source, *, exclude_frozen: bool = False) -> list[Key]:
    """List the keys of the state dict: buffers, frozen parameters, trained parameters; tied weights once."""
    by_state = {state: [key for key in source.entries if key[0] == state] for state in ("buffer", "param", "master")}
    trained = {name for _, name in by_state["master"]}
    frozen = [] if exclude_frozen else [key for key in by_state["param"] if key[1] not in trained]
    return [*by_state["buffer"], *frozen, *by_state["master"]]


def weight_streams(source: Source, *, dtype: torch.dtype | None, exclude_frozen: bool = False) -> list[Stream]:
    """Stream the model's state dict with every floating parameter in ``dtype``, buffers as stored.

    None keeps the dtypes of training: trained parameters in a compute dtype of 16 bits, everything else as stored.
    """
    computes = compute_dtype(open_facts(source))
    dtypes = {"master": dtype or (None if computes == torch.float32 else computes), "param": dtype}
    return [
        stream(source, key, dtype=dtypes.get(key[0]) if castable(source.entries[key].dtype) else None)
        for key in weight_keys(source, exclude_frozen=exclude_frozen)
    ]


@contextlib.contextmanager
def torch_file(
    path: Path, shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], *, aliases: Mapping[str, str]
) -> Iterator[Callable[..., None]]:
    """Write ``path`` as a dict of tensors for ``torch.load``; fill each by ``write(name, values, start=0)``.

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
                """Write elements from ``start`` on of one tensor, in row-major order; any device, any dtype."""
                dtype, _ = shapes[name]
                flat = values.detach().reshape(-1)
                for at in range(0, flat.numel(), _PIECE):
                    # Always a copy: memory that numpy has seen can never be given back, and a gathered unit's must be.
                    piece = flat[at : at + _PIECE].to(device="cpu", dtype=dtype, copy=True)
                    file.seek(offsets[name] + (start + at) * dtype.itemsize)
                    file.write(piece.view(torch.uint8).numpy().data)

            yield write


def _write_index(
    path: Path, shards: Mapping[str, Sequence[Stream]], aliases: Mapping[str, str], *, nbytes: int
) -> None:
    """Write the index of tensors by file, as Hugging Face reads it. ``shards``: the tensors by the name of a file."""
    where = with_aliases({stream.name: name for name, shard in shards.items() for stream in shard}, aliases)
    index = {"metadata": {"total_size": nbytes}, "weight_map": dict(sorted(where.items()))}
    write_atomically(path, (json.dumps(index, indent=2) + "\n").encode())


def write_weights(
    streams: Sequence[Stream],
    out: Path,
    *,
    safetensors: bool,
    max_shard_size: str | int | None,
    shared: Mapping[str, str] | None = None,
    progress: Progress = lambda _bytes: None,
) -> list[Path]:
    """Write ``streams`` to ``out`` as ``model.safetensors`` or ``pytorch_model.bin``, or as shards; return the paths.

    Holds a piece of one tensor (safetensors) or one shard (torch). ``shared`` (alias -> name in ``streams``) goes into
    torch files as the same storage, and is left out of safetensors, as Hugging Face expects. Files of an earlier export
    of this kind are replaced once the new ones are complete. Raises OSError, CheckpointError, ValueError (the size).
    """
    try:
        limit = None if max_shard_size is None else byte_count(max_shard_size)
    except ValueError as error:
        raise ValueError(f"max_shard_size {error}") from None
    out.mkdir(parents=True, exist_ok=True)
    stem, suffix = ("model", ".safetensors") if safetensors else ("pytorch_model", ".bin")
    aliases = {} if safetensors or not shared else shared
    shards = plan_shards(streams, limit)
    total = len(shards)
    names = [f"{stem}-{i:05d}-of-{total:05d}{suffix}" if total > 1 else stem + suffix for i in range(1, total + 1)]
    with contextlib.ExitStack() as cleanup:
        temporary = [cleanup.enter_context(temporary_for(out / name)) for name in names]
        for path, shard in zip(temporary, shards, strict=True):
            with path.open("wb") as file:
                if safetensors:
                    _write_safetensors(file, shard, progress)
                else:
                    _write_torch(file, shard, aliases, progress)
            sync(path)
        pattern = re.compile(rf"{re.escape(stem)}(-\d+-of-\d+)?{re.escape(suffix)}(\.index\.json)?")
        stale = [p for p in out.iterdir() if pattern.fullmatch(p.name) and p.name not in names]
        for path, name in zip(temporary, names, strict=True):
            os.replace(path, out / name)
    for path in stale:
        path.unlink(missing_ok=True)  # several processes may write the same files at once
    written = [out / name for name in names]
    if total > 1:
        written.append(out / f"{stem}{suffix}.index.json")
        _write_index(written[-1], dict(zip(names, shards, strict=True)), aliases, nbytes=total_bytes(streams))
    sync(out)
    return written


def _write_torch(file: BinaryIO, streams: Sequence[Stream], aliases: Mapping[str, str], progress: Progress) -> None:
    state = {}
    for s in streams:
        state[s.name] = s.whole()
        progress(s.nbytes)
    torch.save(with_aliases(state, aliases), file)  # the name of a path would get into the archive


def _write_safetensors(file: BinaryIO, streams: Sequence[Stream], progress: Progress) -> None:
    """Write the widest dtypes first, to align them. The safetensors package would need all tensors in memory."""
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
    for chunk in (chunk for s in ordered for chunk in s.chunks()):
        file.write(chunk.view(torch.uint8).numpy().data)
        progress(chunk.nbytes)


# -- a folder for from_pretrained ------------------------------------------------------------------------------------
def original_parcels(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> tuple[list[Parcel], Tensors]:
    """Name ``tensors`` as the files of ``module`` do (see ``save_pretrained``); return parcels and meta tensors."""
    ignored = set(getattr(module, "_keys_to_ignore_on_save", None) or ())
    # In the order of a file, which is written as the weights arrive.
    kept = sorted((n for n in tensors if n not in ignored), key=lambda n: -tensors[n].dtype.itemsize)
    empty = {n: torch.empty(whole_shape(tensors[n]), dtype=tensors[n].dtype, device="meta") for n in kept}
    revert: Callable[..., Tensors] | None = None
    if hasattr(module, "base_model_prefix"):  # a model of transformers, which is imported then
        revert = getattr(sys.modules.get("transformers.core_model_loading"), "revert_weight_conversion", None)
    if revert is not None:
        try:
            reverted = [revert(module, {name: values}) for name, values in empty.items()]
            made = {name: values for tensors in reverted for name, values in tensors.items()}
            if made.keys() == set(revert(module, empty)):
                return [Parcel((name,), functools.partial(revert, module)) for name in kept], made
        except Exception as error:  # whatever a conversion makes of tensors without values
            log_dist(f"save_pretrained: {error}", level=logging.DEBUG)
        log_dist(
            f"save_pretrained: weights of {type(module).__name__} are written as the model has them, not as its files "
            "had them, which would take several at a time; from_pretrained reads both"
        )
    return [Parcel((name,)) for name in kept], empty


def write_pretrained(
    saver: Callable[..., Any] | None, folder: Path, flow: WeightFlow, outputs: Tensors, *, max_shard_size: int | str
) -> None:
    """Write ``outputs`` (names, dtypes, shapes) from ``flow``; the files without weights are written by ``saver``."""
    arrived: Tensors = {}

    def read(name: str, start: int, out: torch.Tensor) -> None:
        while name not in arrived:
            arrived.update(next(flow))
        values = arrived[name].reshape(-1)
        out.copy_(values[start : start + out.numel()])
        if start + out.numel() == values.numel():
            del arrived[name]

    streams = [Stream(n, t.dtype, tuple(t.shape), functools.partial(read, n)) for n, t in outputs.items()]
    if saver is not None:
        saver(folder, state_dict={})
    write_weights(streams, folder, safetensors=True, max_shard_size=max_shard_size)
