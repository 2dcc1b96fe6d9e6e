"""The weights of a model as streams: what exporters write, without ever holding more than a piece of one tensor."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from deepspeed.checkpoint.load.source import Key, Source

COMPUTE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}  # as a checkpoint names them
CHUNK_BYTES = 32 << 20  # what one step of a stream holds, before a cast


@dataclass(frozen=True)
class Stream:
    """A tensor that is read in pieces: ``read(start, out)`` fills the flat host tensor ``out`` of ``dtype`` from
    element ``start`` on.
    """

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

    def chunks(self, chunk_bytes: int = CHUNK_BYTES) -> Iterator[torch.Tensor]:
        """The elements in order, as flat tensors that share one buffer: use each before asking for the next."""
        length = max(1, min(self.numel, chunk_bytes // self.dtype.itemsize))
        buffer = torch.empty(length, dtype=self.dtype, device="cpu")
        for start in range(0, self.numel, length):
            out = buffer[: min(length, self.numel - start)]
            self.read(start, out)
            yield out

    def whole(self) -> torch.Tensor:
        """The tensor in its shape."""
        values = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        flat, start = values.view(-1), 0
        for chunk in self.chunks():
            flat[start : start + chunk.numel()] = chunk
            start += chunk.numel()
        return values


def stream(source: Source, key: Key, *, name: str | None = None, dtype: torch.dtype | None = None) -> Stream:
    """The tensor ``key`` of ``source``, cast to ``dtype`` piece by piece when that differs from what is stored."""
    described = source.entries[key]
    wanted = dtype or described.dtype

    def read(start: int, out: torch.Tensor) -> None:
        if wanted == described.dtype:
            source.read(key, out, start=start)
            return
        stored = torch.empty(out.numel(), dtype=described.dtype, device="cpu")
        source.read(key, stored, start=start)
        out.copy_(stored)

    return Stream(name or key[1], wanted, described.shape, read)


def compute_dtype(facts: Mapping[str, Any]) -> torch.dtype:
    """What the model trained in: as the checkpoint says, else by the configuration that it keeps."""
    named = (facts.get("world") or {}).get("compute_dtype")
    if named in COMPUTE_DTYPES:
        return COMPUTE_DTYPES[named]
    config = facts.get("config") or {}
    for name, dtype in (("bf16", torch.bfloat16), ("bfloat16", torch.bfloat16), ("fp16", torch.float16)):
        block = config.get(name)
        if isinstance(block, dict) and block.get("enabled"):
            return dtype
    return torch.float32


def open_facts(source: Source) -> dict[str, Any]:
    """Facts that are plain JSON ("config", "world", "shared", "engine"), also where client state would need pickle."""
    manifest = getattr(source, "manifest", None)
    found: dict[str, Any] = source.facts if manifest is None else manifest.facts
    return found


def shared_names(source: Source) -> dict[str, str]:
    """Tied weights: {other name: the name the values are stored under}."""
    return dict(open_facts(source).get("shared") or {})


def weight_keys(source: Source, *, exclude_frozen: bool = False) -> list[Key]:
    """The model's state dict in the order buffers, frozen parameters, trained parameters; tied weights once."""
    by_state: dict[str, list[Key]] = {"buffer": [], "param": [], "master": []}
    for key in source.entries:
        if key[0] in by_state:
            by_state[key[0]].append(key)
    trained = {name for _, name in by_state["master"]}
    frozen = [] if exclude_frozen else [key for key in by_state["param"] if key[1] not in trained]
    return [*by_state["buffer"], *frozen, *by_state["master"]]


def weight_streams(source: Source, *, dtype: torch.dtype | None, exclude_frozen: bool = False) -> list[Stream]:
    """The model's state dict with every floating parameter in ``dtype``, buffers as stored.

    None keeps what training uses: trained parameters in the compute dtype, everything else as stored.
    """
    trained = dtype or compute_dtype(open_facts(source))
    found = []
    for key in weight_keys(source, exclude_frozen=exclude_frozen):
        stored = source.entries[key].dtype
        wanted = {"master": trained, "param": dtype}.get(key[0])
        found.append(stream(source, key, dtype=wanted if stored.is_floating_point else None))
    return found


def total_bytes(streams: Iterable[Stream]) -> int:
    """Bytes of all values."""
    return sum(s.nbytes for s in streams)
