"""The whole values of one unit's parameters: one flat buffer, over which every parameter is a view."""

import math
from collections.abc import Sequence

import torch
from torch import nn

from deepspeed.monitor import hostmem
from deepspeed.zero.layout import FlatLayout
from deepspeed.zero.param import expose, hide, keep_view, storage_uses


class ParameterBuffer:
    """Flat buffer ``full`` of one unit's whole parameters, in the compute dtype; its storage has no bytes while the
    unit is released. ``hidden``: the values are in the buffer, and a read of a parameter waits first.
    """

    def __init__(self, params: Sequence[nn.Parameter], layout: FlatLayout) -> None:
        self._params, self._layout = params, layout
        self.full = torch.empty(0)
        self.hidden = False
        self.lent = False  # somebody outside a forward may go on reading what was shown
        self._views: list[torch.Tensor] = []
        self._void: torch.Tensor | None = None
        self._uses_bare = self._uses_own = 0  # of the storage: by the buffer and its views; by the parameters, too

    def hold(self, full: torch.Tensor) -> None:
        """Use ``full`` as the buffer; the parameters point to it after ``expose``."""
        self.full = full
        self._views = [full[s.offset : s.stop].view(s.shape) for s in self._layout.segments]
        self._uses_bare = storage_uses(full)

    def expose(self) -> None:
        """Point the parameters at their values in the buffer."""
        self.hidden = False
        expose(self._params, self._views)

    def _hide(self) -> None:
        if self._void is None:
            inexact = self.full.is_floating_point() or self.full.is_complex()
            self._void = torch.full((), math.nan if inexact else 0, dtype=self.full.dtype, device=self.full.device)
        hide(self._params, self._void)

    def hide(self) -> None:
        """Hide the values, which are present, so that a read of a parameter waits for pending updates."""
        if not self.hidden:
            self.hidden = True
            self._hide()

    def fill(self) -> torch.Tensor:
        """Allocate the storage for the values, which the caller fills next, and return ``full``."""
        numel = self._layout.numel
        if self.full.numel() != numel:
            with torch.inference_mode(mode=False):  # it will be trained in, too
                self.hold(self.full.new_empty(numel))
        storage = self.full.untyped_storage()
        storage.resize_(numel * self.full.element_size())
        if self.full.device.type == "cpu":
            hostmem.prefer_huge_pages(storage.data_ptr(), storage.nbytes())
        return self.full

    def note_own_uses(self) -> None:
        """Record the current number of uses of the storage as the unit's own: buffer, views and parameters."""
        self._uses_own = storage_uses(self.full)

    def read_by_others(self) -> bool:
        """Tell whether tensors outside the unit share the storage, as those that autograd has saved for a backward."""
        return storage_uses(self.full) > self._uses_own

    def empty(self) -> None:
        """Free the storage, or leave it to a reader it was lent to; ``fill`` then allocates a new one."""
        self.hidden = False
        self._hide()
        storage = self.full.untyped_storage()
        # Numpy or another process may hold it: then its bytes must stay where they are.
        fixed = not storage.resizable() or (self.full.device.type == "cpu" and storage.is_shared())
        if fixed or (self.lent and storage_uses(self.full) > self._uses_bare):
            self.full, self._views = self.full.new_empty(0), []
        self.full.untyped_storage().resize_(0)
        self.lent = False

    def bring_back(self, *, sample: bool = False) -> bool:
        """Tell whether any parameter (``sample``: the last one) was moved off the buffer. Frozen ones are copied back;
        for others (``module.half()``, ...) raise UsageError.
        """
        if not self._params:
            return False
        moved, start, size = False, self.full.data_ptr(), self.full.element_size()
        first = len(self._params) - 1 if sample else 0
        for param, segment in zip(self._params[first:], self._layout.segments[first:], strict=True):
            shown = getattr(param, "_local_tensor", param)
            if segment.numel and shown.data_ptr() != start + segment.offset * size:
                moved |= keep_view(param, self.full, segment)
        return moved

    def drop(self) -> None:
        """Free all memory; the parameters no longer belong to the buffer."""
        self._params, self._views = [], []
        self.full = torch.empty(0)
