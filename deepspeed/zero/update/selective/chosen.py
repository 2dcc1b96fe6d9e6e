"""What a window of ZenFlow keeps beside the states of a unit: the columns that the device updates, and a sum."""

from typing import Any

import torch
from torch import nn

from deepspeed.tier.store import TierStore
from deepspeed.zero.optim_view import OptimView
from deepspeed.zero.unit import Unit
from deepspeed.zero.update.selective.columns import Band, bands_of


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


def chosen_in(view: OptimView, mask: torch.Tensor) -> Chosen:
    """Return the columns that a loaded ``mask`` of the view marks, by band, where it marks any element."""
    columns = []
    for band in bands_of(shapes_of(view.unit), view.start, view.stop):
        marked = torch.zeros(band.width, dtype=torch.float32, device="cpu")
        band.squares(mask.float(), marked)
        columns.append((band, marked.nonzero().view(-1)))
    return Chosen(view, columns)


def shapes_of(unit: Unit) -> list[tuple[int, tuple[int, ...]]]:
    """Return offset and shape of each parameter of the unit."""
    return [(segment.offset, segment.shape) for segment in unit.layout.segments]
