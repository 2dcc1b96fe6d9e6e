"""The weights of a model as streams: what exporters write, without ever holding more than a piece of one tensor."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from deepspeed.checkpoint.load.source import Key, Source
from deepspeed.device import DTYPES

_CHUNK_BYTES = 32 << 20  # what one step of a stream holds, before a cast


@dataclass(frozen=True)
class Stream:
    """A tensor in pieces: ``read(start, out)`` fills the flat host tensor ``out`` with elements from ``start`` on."""

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
        start = 0
        for piece in values.view(-1).split(_CHUNK_BYTES // self.dtype.itemsize):
            self.read(start, piece)
            start += piece.numel()
        return values


def stream(source: Source, key: Key, *, name: str | None = None, dtype: torch.dtype | None = None) -> Stream:
    """The tensor ``key`` of ``source``, cast to ``dtype`` piece by piece when that differs from what is stored."""
    described = source.entries[key]

    def read(start: int, out: torch.Tensor) -> None:
        stored = out if out.dtype == described.dtype else torch.empty(out.numel(), dtype=described.dtype, device="cpu")
        source.read(key, stored, start=start)
        if stored is not out:
            out.copy_(stored)

    return Stream(name or key[1], dtype or described.dtype, described.shape, read)


def block_of(config: Any, name: str) -> dict[str, Any]:
    """A block of a configuration as a checkpoint keeps it; empty when there is none."""
    block = config.get(name) if isinstance(config, dict) else None
    return block if isinstance(block, dict) else {}


def compute_dtype(facts: Mapping[str, Any]) -> torch.dtype:
    """What the model trained in: as the checkpoint says, else by the configuration that it keeps."""
    named = (facts.get("world") or {}).get("compute_dtype")
    blocks = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16"}
    by_config = (short for name, short in blocks.items() if block_of(facts.get("config"), name).get("enabled"))
    return DTYPES[named if named in DTYPES else next(by_config, "fp32")]


def open_facts(source: Source) -> dict[str, Any]:
    """Facts that are plain JSON ("config", "world", "shared", "engine"), also where client state would need pickle."""
    manifest = getattr(source, "manifest", None)
    return dict(source.facts if manifest is None else manifest.facts)


def shared_names(source: Source) -> dict[str, str]:
    """Tied weights: {other name: the name the values are stored under}."""
    return dict(open_facts(source).get("shared") or {})


def with_aliases(state: dict[str, Any], aliases: Mapping[str, str]) -> dict[str, Any]:
    """``state`` by the further names of tied weights too."""
    return state | {alias: state[name] for alias, name in aliases.items() if name in state}


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
    dtypes = {"master": dtype or compute_dtype(open_facts(source)), "param": dtype}
    return [
        stream(source, key, dtype=dtypes.get(key[0]) if source.entries[key].dtype.is_floating_point else None)
        for key in weight_keys(source, exclude_frozen=exclude_frozen)
    ]


def total_bytes(streams: Iterable[Stream]) -> int:
    """Bytes of all values."""
    return sum(s.nbytes for s in streams)
