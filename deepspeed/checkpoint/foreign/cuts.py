"""How DeepSpeed cuts parameters over ranks, for reading its files and for writing them.

Levels 1 and 2 lay a whole optimizer group end to end, pad it and cut it into columns, one per rank. Level 3 cuts every
parameter into rows of equal length, one per rank, and joins a rank's rows, in sub-groups.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch

from deepspeed.checkpoint.foreign.unpickle import FileTensor
from deepspeed.checkpoint.format.boxes import faults
from deepspeed.errors import CheckpointError

Members = Sequence[tuple[str, int]]  # (name, elements) of parameters, in flattening order


class Slice(NamedTuple):
    """Elements [lo, hi) of parameter ``name`` lie from ``at`` on in flat tensor ``part`` of ``rank``."""

    name: str
    lo: int
    hi: int
    rank: int
    part: int
    at: int


def column_width(members: Members, world: int) -> int:
    """Elements of a column, of which all ranks together have a multiple of 2 x ``world``."""
    return -(-sum(numel for _, numel in members) // (2 * world)) * 2


def row_width(numel: int, world: int) -> int:
    """Elements of a parameter's row, the last rank's padded."""
    return -(-numel // world)


def columns(
    members: Members, part: int, *, width: int, world: int, gaps: Sequence[int] | None = None
) -> Iterator[Slice]:
    """Levels 1 and 2: a group, which is flat tensor ``part`` of every rank. ``gaps``: padding after each parameter."""
    offset = 0
    for (name, numel), gap in zip(members, gaps or [0] * len(members), strict=True):
        for rank in range(world):
            lo, hi = max(offset, rank * width), min(offset + numel, (rank + 1) * width)
            if lo < hi:
                yield Slice(name, lo - offset, hi - offset, rank, part, lo - rank * width)
        offset += numel + int(gap)


def rows(members: Members, part: int, world: int) -> Iterator[Slice]:
    """Level 3: a sub-group, which is flat tensor ``part`` of every rank."""
    at = 0
    for name, numel in members:
        width = row_width(numel, world)
        for rank, lo in enumerate(range(0, numel, width or 1)):
            yield Slice(name, lo, min(numel, lo + width), rank, part, at)
        at += width


def sub_groups(members: Members, world: int, limit: int) -> list[list[tuple[str, int]]]:
    """Level 3: runs of a group's parameters whose rows together reach ``limit`` elements."""
    runs: list[list[tuple[str, int]]] = [[]]
    filled = 0
    for member in members:
        if filled >= limit:
            runs.append([])
            filled = 0
        runs[-1].append(member)
        filled += row_width(member[1], world)
    return [run for run in runs if run]


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
