"""A checkpoint opened for reading, whoever wrote it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

Key = tuple[str, str]


class Described(NamedTuple):
    """What is known of a tensor before it is read."""

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

    def read(self, key: Key, out: torch.Tensor, *, start: int = 0) -> None:
        """Fill ``out`` (flat, on the host, of the entry's dtype) with elements from ``start`` on, in row-major order; verified.

        Raises CheckpointError naming the tensor when its bytes are missing or damaged.
        """
        ...

    def close(self) -> None: ...


def whole(source: Source, key: Key) -> torch.Tensor:
    """One tensor in its logical shape."""
    described = source.entries[key]
    values = torch.empty(described.shape, dtype=described.dtype, device="cpu")
    source.read(key, values.view(-1))
    return values
