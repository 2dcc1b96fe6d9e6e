"""Host memory at page boundaries: pages of its own, page-locked where an accelerator copies to and from them, cut into
tensors of exact size. PyTorch's allocator of pinned memory rounds every tensor up to a power of two and keeps it.
"""

import contextlib
import math
import mmap
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from deepspeed.device import get_accelerator
from deepspeed.observe.log import warning_once

ALIGN = 4096  # bytes; csrc/aio/engine.h has the same number
_HUGE_FROM = 4 << 20  # bytes from which 2 MiB pages are worth asking for


def _paged(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


class Pages(mmap.mmap):
    """``nbytes`` bytes of pages that nobody else has; zeros, resident from the first touch on. With ``pin`` page-locked
    if the device layer can do that (``pinned`` says so), else ordinary memory and a line in the log. They go back to
    the system with the last tensor in them. Raises OSError when there is no more memory.
    """

    pinned = False

    def __new__(cls, nbytes: int, *, pin: bool = False) -> "Pages":
        pages = super().__new__(cls, -1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if nbytes >= _HUGE_FROM:
            # a kernel without huge pages says EINVAL. With them a transfer has a 512th of the pages to look up
            with contextlib.suppress(OSError):
                pages.madvise(mmap.MADV_HUGEPAGE)
        if pin:
            pages._lock()
        return pages

    def _lock(self) -> None:
        # A child must not make the parent's next write go to a copy of the page, while the device has the old one.
        with contextlib.suppress(OSError):
            self.madvise(mmap.MADV_DONTFORK)
        whole = torch.frombuffer(self, dtype=torch.uint8)
        whole[::ALIGN].zero_()  # by several threads: the driver would bring in one page after the other
        self._process, self._address = os.getpid(), whole.data_ptr()
        refused = get_accelerator().lock_memory(self._address, whole.nbytes)
        self.pinned = not refused
        if refused:
            warning_once(f"page-locked memory is refused ({refused}): ordinary memory serves, copies are slower")

    def cut(self, start: int, nbytes: int, gone: Callable[[Any], None]) -> tuple[torch.Tensor, Any]:
        """Bytes from ``start`` on as a tensor with a storage of its own, and a reference that calls ``gone`` when
        nobody has that any more, for as long as somebody has the reference.
        """
        view = memoryview(self)[start : start + nbytes]
        return torch.frombuffer(view, dtype=torch.uint8), weakref.ref(view, gone)

    def __del__(self) -> None:
        if self.pinned and not sys.is_finalizing() and self._process == os.getpid():
            get_accelerator().synchronize()  # a copy may be under way
            get_accelerator().unlock_memory(self._address)


class _Slab:
    """Pages, and what of them is free: ``free`` ranges for anybody, those ``returned`` when no copy uses them."""

    def __init__(self, nbytes: int, *, pin: bool) -> None:
        self.nbytes, self.pin = nbytes, pin
        self.pages = Pages(nbytes, pin=pin)
        self.free = [(0, nbytes)]
        self.returned: deque[tuple[int, int]] = deque()  # appended to whenever a tensor ends, in any thread
        self._parts: dict[int, Any] = {}  # by where they begin: references that notice their end

    def room_for(self, nbytes: int) -> tuple[int, int] | None:
        """The smallest free range of so many bytes."""
        return min((r for r in self.free if r[1] - r[0] >= nbytes), key=lambda r: r[1] - r[0], default=None)

    def cut(self, nbytes: int) -> torch.Tensor:
        """So many bytes of the smallest free range that has them, in whole pages."""
        size = _paged(nbytes)
        room = self.room_for(size)
        assert room is not None, "looked at before"
        start, stop = room
        self.free.remove(room)
        if start + size < stop:
            self.free.append((start + size, stop))
        returned, parts = self.returned, self._parts

        def gone(_: Any) -> None:  # knows nothing of the pages: they end with their last tensor
            del parts[start]
            returned.append((start, start + size))

        part, parts[start] = self.pages.cut(start, nbytes, gone)
        return part

    def take_back(self) -> None:
        """What is returned is free, joined with its neighbours."""
        while self.returned:
            self.free.append(self.returned.popleft())
        joined: list[tuple[int, int]] = []
        for start, stop in sorted(self.free):
            if joined and joined[-1][1] == start:
                joined[-1] = (joined[-1][0], stop)
            else:
                joined.append((start, stop))
        self.free = joined


class Arena:
    """Tensors in host memory, each of exactly its pages. The memory of one that has ended serves the next ones, when no
    copy of the device uses it any more, until ``close``; without ``keep`` it goes to the system at once. ``pins``:
    there is an accelerator, for which ``pin`` has a meaning.
    """

    def __init__(self, *, pins: bool = False, keep: bool = True) -> None:
        self.pins, self._keep = pins, keep
        self._slabs: list[_Slab] = []
        self._mutex = threading.Lock()  # the thread of a save takes buffers too

    @property
    def held_bytes(self) -> int:
        """What is taken from the system and known here, in use or not."""
        return sum(slab.nbytes for slab in self._slabs)

    def empty(self, shape: int | Sequence[int], *, dtype: torch.dtype = torch.uint8, pin: bool = False) -> torch.Tensor:
        """A contiguous host tensor whose memory begins at a multiple of 4096 bytes, page-locked with ``pin`` where that
        is possible. ``shape`` is a number of elements or a shape. Raises OSError when there is no more memory.
        """
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        nbytes = math.prod(sizes) * dtype.itemsize
        if nbytes == 0:
            return torch.empty(sizes, dtype=dtype, device="cpu")
        with self._mutex:
            part = self._slab(_paged(nbytes), pin=pin and self.pins).cut(nbytes)
        return part.view(dtype).view(sizes)

    def _slab(self, nbytes: int, *, pin: bool) -> _Slab:
        """One with so many bytes free."""
        alike = [slab for slab in self._slabs if slab.pin is pin]
        for settled in (False, True):
            if settled and any(slab.returned for slab in alike):
                self._reclaim(alike)
            fitting = [slab for slab in alike if slab.room_for(nbytes)]
            if fitting:
                return min(fitting, key=lambda slab: slab.nbytes)
        # what is free and too small gives its place to it
        self._slabs = [b for b in self._slabs if b.pin is not pin or b.free != [(0, b.nbytes)]]
        slab = _Slab(nbytes, pin=pin)
        if self._keep:
            self._slabs.append(slab)
        return slab

    def _reclaim(self, slabs: list[_Slab]) -> None:
        if self.pins:
            get_accelerator().synchronize()  # the last owner's copies may be under way
        for slab in slabs:
            slab.take_back()

    def close(self) -> None:
        """Memory that nobody uses goes back to the system now, all other with its last user."""
        with self._mutex:
            self._keep = False
            self._slabs.clear()


def aligned_empty(shape: int | Sequence[int], *, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """As ``Arena.empty``, in pages of its own, which go back to the system with the tensor: the allocator keeps no
    fragments of them.
    """
    return Arena(keep=False).empty(shape, dtype=dtype)
