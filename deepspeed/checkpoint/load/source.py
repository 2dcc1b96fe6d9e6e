"""A checkpoint opened for reading, whoever wrote it."""

from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from deepspeed.checkpoint.format.manifest import Key
from deepspeed.zero.regions import Region

__all__ = ["Described", "Key", "Source", "Wish", "fill", "outside", "whole"]


class Described(NamedTuple):
    """Description of a tensor before it is read."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class Source(Protocol):
    """Tensors by (state, name), and facts; see docs/checkpoint-format.md for the names of both.

    ``kind``: "deepspeed-checkpoint" (this package's), "deepspeed-0.19" or "universal".
    """

    path: Path
    kind: str

    @property
    def entries(self) -> Mapping[Key, Described]: ...

    @property
    def facts(self) -> dict[str, Any]: ...

    def read(self, key: Key, out: torch.Tensor, *, start: int = 0, region: Region | None = None) -> None:
        """Fill ``out`` (flat, on the host, of the entry's dtype) from element ``start`` of ``region`` (None: all) on.

        All bytes read are verified. Raises CheckpointError naming the tensor when its bytes are missing or damaged,
        ValueError when it has no such elements.
        """
        ...

    def close(self) -> None: ...


class Wish(NamedTuple):
    """Arguments of one read, for ``Source.read`` or ``fill``."""

    key: Key
    out: torch.Tensor
    start: int = 0
    region: Region | None = None


def outside(wish: Wish, dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    """Say why ``wish`` does not fit a tensor of ``dtype`` and ``shape``; empty when it does."""
    (state, name), out, start, region = wish
    within = region is None or (
        len(region.start) == len(region.shape) == len(shape)
        and all(0 <= s <= s + n <= size for s, n, size in zip(*region, shape, strict=True))
    )
    numel = prod(shape if region is None else region.shape)
    if within and out.dtype == dtype and out.dim() == 1 and 0 <= start <= start + out.numel() <= numel:
        return ""
    part = "" if region is None else f" of the part {list(region.shape)} at {list(region.start)}"
    text = f"{state} of {name} is {prod(shape)} elements of {dtype}"
    return f"{text}, not {out.numel()} of {out.dtype} from {start} on{part}"


def whole(source: Source, key: Key) -> torch.Tensor:
    """Read one tensor in its logical shape."""
    described = source.entries[key]
    values = torch.empty(described.shape, dtype=described.dtype, device="cpu")
    source.read(key, values.view(-1))
    return values


def fill(source: Source, wishes: Iterable[Wish]) -> None:
    """Do many reads together, into tensors of any dtype and device. Raises as ``Source.read``."""
    reads, after = list[Wish](), list[tuple[torch.Tensor, torch.Tensor]]()
    for wish in wishes:
        out, dtype = wish.out, source.entries[wish.key].dtype
        if out.device.type != "cpu" or out.dtype != dtype or not out.is_contiguous():
            after.append((out, torch.empty(out.numel(), dtype=dtype, device="cpu")))
            wish = wish._replace(out=after[-1][1])
        reads.append(wish)
    many = getattr(source, "read_many", None)  # in the order of the files
    if many is not None:
        many(reads)
    else:
        for key, out, start, region in reads:
            source.read(key, out, start=start, region=region)
    for out, arrived in after:
        out.copy_(arrived)
