"""A global tensor whose elements lie in several stored tensors."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch

from deepspeed.checkpoint.foreign.cuts import rows
from deepspeed.checkpoint.foreign.unpickle import FileTensor
from deepspeed.checkpoint.format.boxes import faults
from deepspeed.errors import CheckpointError


class Piece(NamedTuple):
    """Elements [lo, hi) of the global tensor are those of ``stored`` from ``at`` on, in row-major order."""

    lo: int
    hi: int
    stored: FileTensor
    at: int


@dataclass(frozen=True)
class Pieces:
    """A tensor of ``dtype`` and ``shape``, made of ``parts``."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[Piece, ...]

    @classmethod
    def of(cls, stored: FileTensor, shape: tuple[int, ...] | None = None, *, at: int = 0) -> "Pieces":
        """One stored tensor as it is, or what of it begins at ``at`` and has ``shape``."""
        shape = stored.shape if shape is None else shape
        return cls(stored.dtype, shape, (Piece(0, prod(shape), stored, at),))

    @classmethod
    def of_rows(cls, shape: tuple[int, ...], stored: Sequence[FileTensor | None]) -> "Pieces":
        """Equal flat slices, one per rank, the last ones padded. What is None is missing."""
        slices = [(s, stored[s.rank]) for s in rows([("", prod(shape))], 0, len(stored))]
        parts = tuple(Piece(s.lo, s.hi, values, 0) for s, values in slices if values is not None)
        return cls(parts[0].stored.dtype if parts else torch.float32, shape, parts)

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def check(self, what: str, where: Path) -> "Pieces":
        """Itself. Raises CheckpointError when elements are missing or stored twice, or a stored tensor is too short."""
        if faults(self.numel, [(lo, hi) for lo, hi, _, _ in self.parts]):
            have = sum(hi - lo for lo, hi, _, _ in self.parts)
            raise CheckpointError(
                f"{where} has {have} of the {self.numel} elements of {what}; its files do not fit together"
            )
        for lo, hi, stored, at in self.parts:
            if at + hi - lo > stored.numel:
                raise CheckpointError(f"{stored.path} has {stored.numel} elements where {what} needs {at + hi - lo}")
        return self

    def read(self, out: torch.Tensor, start: int) -> None:
        """Fill the flat host tensor ``out`` with elements from ``start`` on."""
        for lo, hi, stored, at in self.parts:
            first, last = max(lo, start), min(hi, start + out.numel())
            if first < last:
                stored.read(out[first - start : last - start], start=at + first - lo)
