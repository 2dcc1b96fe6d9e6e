"""The columns of parameters that lie in a flat range of elements, and those of a view that the device updates.

A parameter of two or more dimensions is a matrix with as many rows as its first one; a rank's flat range has whole rows
of it but at the borders, so it has as much of every column as of any other.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn

from deepspeed.tier.store import TierStore
from deepspeed.zero.optim_view import OptimView
from deepspeed.zero.unit import Unit

MOST_OF_VECTOR = 1 << 20  # elements of a vector that is chosen whole; of a larger one nothing is


def width_of(shape: Sequence[int]) -> int:
    """Return the columns of a parameter; 0 without elements, 1 of a vector or a number."""
    if 0 in shape:
        return 0
    return prod(shape[1:]) if len(shape) > 1 else 1


def chosen_of(shape: Sequence[int], ratio: float) -> int:
    """Return the number of columns to choose: at least one of a matrix, all of a small vector, none of a large one."""
    if len(shape) < 2:
        return width_of(shape) if prod(shape) <= MOST_OF_VECTOR else 0
    return min(width_of(shape), max(1, int(ratio * width_of(shape))))


@dataclass(frozen=True)
class Band:
    """Elements [start, start + numel) of a flat range: parameter ``segment`` from ``first`` on, ``width`` a row."""

    segment: int
    start: int
    numel: int
    first: int
    width: int

    @property
    def head(self) -> int:
        """Return the number of elements before the first whole row."""
        return min(self.numel, -self.first % self.width)

    @property
    def body(self) -> int:
        """Return the number of whole rows."""
        return (self.numel - self.head) // self.width

    @property
    def rows(self) -> int:
        """Return the number of rows of which the band has any element."""
        return len([*self._pieces()]) + self.body - bool(self.body)

    def _pieces(self) -> Iterator[tuple[int, int, int]]:
        """Yield elements [lo, hi) of the band, and the column of the first; the whole rows are one piece."""
        bounds = (0, self.head, self.head + self.body * self.width, self.numel)
        for lo, hi in zip(bounds[:-1], bounds[1:], strict=True):
            if lo < hi:
                yield lo, hi, (self.first + lo) % self.width

    def take(self, flat: torch.Tensor, columns: torch.Tensor, out: torch.Tensor) -> None:
        """Copy ``columns`` of the band of ``flat`` into ``out``, row by row; zeros for elements outside the band."""
        at, count, values = 0, columns.numel(), flat[self.start : self.start + self.numel]
        for lo, hi, first in self._pieces():
            rows = self._rows_of(values[lo:hi], first)
            size = rows.shape[0] * count
            out[at : at + size].view(-1, count).copy_(rows if count == self.width else rows.index_select(1, columns))
            at += size

    def put(self, flat: torch.Tensor, columns: torch.Tensor, values: torch.Tensor) -> None:
        """Copy ``values`` into ``columns`` of the band of ``flat``, the reverse of ``take``, as far as it has them."""
        at, count, target = 0, columns.numel(), flat[self.start : self.start + self.numel]
        for lo, hi, first in self._pieces():
            part = target[lo:hi]
            size = max(1, (hi - lo) // self.width) * count
            new = values[at : at + size].view(-1, count)
            at += size
            if (hi - lo) % self.width == 0:
                part.view(-1, self.width).index_copy_(1, columns, new)
                continue
            row, mask = part.new_zeros(self.width), torch.zeros(self.width, dtype=torch.bool, device=part.device)
            row.index_copy_(0, columns, new[0])
            mask.index_fill_(0, columns, True)  # noqa: FBT003
            part.copy_(torch.where(mask[first : first + hi - lo], row[first : first + hi - lo], part))

    def squares(self, flat: torch.Tensor, out: torch.Tensor) -> None:
        """Add the sums of squares of all columns, as far as the band has them, to ``out``, in fp32 or wider."""
        values = flat[self.start : self.start + self.numel]
        for lo, hi, first in self._pieces():
            rows = self._rows_of(values[lo:hi], first)
            out += torch.linalg.vector_norm(rows, dim=0, dtype=torch.promote_types(rows.dtype, out.dtype)).square()

    def _rows_of(self, values: torch.Tensor, first: int) -> torch.Tensor:
        if values.numel() % self.width == 0:
            return values.view(-1, self.width)
        row = values.new_zeros(self.width)
        row[first : first + values.numel()] = values
        return row[None]


def bands_of(segments: Sequence[tuple[int, tuple[int, ...]]], start: int, stop: int) -> list[Band]:
    """Return the bands of the flat range [start, stop), of parameters given by offset and shape."""
    bands = []
    for number, (offset, shape) in enumerate(segments):
        lo, hi = max(offset, start), min(offset + prod(shape), stop)
        if lo < hi:
            bands.append(Band(number, lo - start, hi - lo, lo - offset, width_of(shape)))
    return bands


def most_chosen(
    segments: Sequence[tuple[int, tuple[int, ...]]], numel: int, *, parts: int, ratio: float
) -> tuple[int, int]:
    """Return the most elements of chosen columns, and the most columns, in any of ``parts`` parts of ``numel``."""
    elements, columns = 0, 0
    for part in range(parts):
        bands = bands_of(segments, part * numel // parts, (part + 1) * numel // parts)
        counts = [(chosen_of(segments[band.segment][1], ratio), band.rows) for band in bands]
        elements = max(elements, sum(count * rows for count, rows in counts))
        columns = max(columns, sum(count for count, _ in counts))
    return elements, columns


class WindowSum(TierStore):
    """Sum of a window's gradients, in the place of a gradient; PARAM is rounded into the last gradient's memory."""

    def __init__(self, total: torch.Tensor, gradient: TierStore) -> None:
        super().__init__(total)
        self.gradient = gradient

    def spare(self, dtype: torch.dtype, *, keep: bool) -> torch.Tensor | None:
        return self.gradient.spare(dtype, keep=False)


class Chosen:
    """Chosen columns of one view, by band, sorted; ``param``: their compact weights while they are on the device."""

    def __init__(self, view: OptimView, columns: list[tuple[Band, torch.Tensor]]) -> None:
        self.view, device = view, view.unit.device
        self.parts = [(band, some.to(device), some.to("cpu")) for band, some in columns if some.numel()]
        self.sizes = [band.rows * some.numel() for band, some, _ in self.parts]
        self.grad = torch.empty(sum(self.sizes), dtype=view.param.dtype, device=device)
        self.param: nn.Parameter | None = None
        self.mark: tuple[Any, int] | None = None  # the mask of it that was left behind, and its version

    @classmethod
    def marked_in(cls, view: OptimView, mask: torch.Tensor) -> "Chosen":
        """Return the columns that a loaded ``mask`` of the view marks, by band, where it marks any element."""
        columns = []
        for band in bands_of(shapes_of(view.unit), view.start, view.stop):
            marked = torch.zeros(band.width, dtype=torch.float32, device="cpu")
            band.squares(mask.float(), marked)
            columns.append((band, marked.nonzero().view(-1)))
        return cls(view, columns)

    def take(self, flat: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Copy the columns of ``flat``, over the view's range, into ``out``, and return it."""
        for (band, near, host), piece in zip(self.parts, out.split(self.sizes), strict=True):
            band.take(flat, near if flat.device == near.device else host, piece)
        return out

    def put(self, flat: torch.Tensor, values: torch.Tensor) -> None:
        """Copy ``values`` into the columns of ``flat``."""
        for (band, near, host), piece in zip(self.parts, values.split(self.sizes), strict=True):
            band.put(flat, near if flat.device == near.device else host, piece)

    def compact(self, flat: torch.Tensor | None) -> torch.Tensor:
        """Return the columns of ``flat``, wherever it rests, on the device; zeros where it is None."""
        if flat is None:
            return torch.zeros_like(self.grad)
        return self.take(flat, torch.empty_like(self.grad, device=flat.device, dtype=flat.dtype)).to(self.grad.device)


def shapes_of(unit: Unit) -> list[tuple[int, tuple[int, ...]]]:
    """Return offset and shape of each parameter of the unit."""
    return [(segment.offset, segment.shape) for segment in unit.layout.segments]


def widths_of(unit: Unit) -> list[int]:
    """Return the columns that are compared of each parameter: those of matrices, else 0."""
    return [width_of(s.shape) if len(s.shape) > 1 else 0 for s in unit.layout.segments]
