"""A global tensor whose elements lie in several stored tensors."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch

from deepspeed.checkpoint.foreign.unpickle import Stored
from deepspeed.checkpoint.format.boxes import faults
from deepspeed.errors import CheckpointError


class Segment(NamedTuple):
    """Elements [lo, hi) of the global tensor are elements ``at`` and following of ``stored``, both in row-major
    order.
    """

    lo: int
    hi: int
    stored: Stored
    at: int


@dataclass(frozen=True)
class Pieces:
    """A tensor of ``dtype`` and ``shape``, made of ``segments``."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    segments: tuple[Segment, ...]

    @classmethod
    def of(cls, stored: Stored) -> "Pieces":
        """One stored tensor as it is."""
        return cls(stored.dtype, stored.shape, (Segment(0, stored.numel, stored, 0),))

    @classmethod
    def of_slices(cls, shape: tuple[int, ...], slices: Sequence[Stored | None]) -> "Pieces":
        """Equal flat slices, one per rank, the last ones padded. What is None is missing."""
        numel, width = prod(shape), -(-prod(shape) // len(slices))
        spans = ((i * width, min(numel, (i + 1) * width), s) for i, s in enumerate(slices))
        segments = tuple(Segment(lo, hi, s, 0) for lo, hi, s in spans if lo < hi and s is not None)
        return cls(segments[0].stored.dtype if segments else torch.float32, shape, segments)

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def check(self, what: str, where: Path) -> "Pieces":
        """Itself. Raises CheckpointError when elements are missing, or stored twice, or a stored tensor is too
        short.
        """
        if faults(self.numel, [(s.lo, s.hi) for s in self.segments]):
            have = sum(s.hi - s.lo for s in self.segments)
            raise CheckpointError(
                f"{where} has {have} of the {self.numel} elements of {what}; its files do not fit together"
            )
        for lo, hi, stored, at in self.segments:
            if at < 0 or at + hi - lo > stored.numel:
                raise CheckpointError(
                    f"{stored.file.path} has {stored.numel} elements where {what} needs {at + hi - lo}"
                )
        return self

    def read(self, out: torch.Tensor, start: int) -> None:
        """Fill the flat host tensor ``out`` with elements from ``start`` on."""
        end = start + out.numel()
        for lo, hi, stored, at in self.segments:
            first, last = max(lo, start), min(hi, end)
            if first < last:
                stored.read(out[first - start : last - start], start=at + first - lo)
