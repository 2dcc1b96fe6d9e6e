"""Host memory at page boundaries: pages of its own, page-locked where an accelerator copies to and from them, cut into
tensors of exact size. PyTorch's allocator of pinned memory rounds every tensor up to a power of two and keeps it.
"""

import contextlib
import itertools
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

from deepspeed.accelerator.device import get_accelerator
from deepspeed.monitor.log import warning_once

ALIGN = 4096  # bytes; csrc/aio/engine.h has the same number
_HUGE_FROM = 4 << 20  # bytes from which 2 MiB pages are worth asking for


_KEPT: list["Pages"] = []  # in a forked child, what its parent had


def _paged(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


class Pages(mmap.mmap):
    """Memory of ``nbytes`` bytes in pages of its own; zeros, resident from the first touch on. With ``pin`` page-locked
    if the device layer can do that (``pinned`` says so), else ordinary memory and a line in the log. They go back to
    the system with the last tensor in them. Raise OSError when there is no more memory.
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
        self._address, self._device = whole.data_ptr(), get_accelerator().current_device()
        refused = get_accelerator().lock_memory(self._address, whole.nbytes)
        self.pinned = not refused
        _LOCKED.add(self)
        if refused:
            warning_once(f"page-locked memory is refused ({refused}): ordinary memory serves, copies are slower")

    def cut(self, start: int, nbytes: int, gone: Callable[[Any], None]) -> tuple[torch.Tensor, Any]:
        """Return bytes from ``start`` on as a tensor with a storage of its own, and a reference that calls ``gone``
        when nobody has that storage any more, for as long as somebody has the reference.
        """
        view = memoryview(self)[start : start + nbytes]
        return torch.frombuffer(view, dtype=torch.uint8), weakref.ref(view, gone)

    def __del__(self) -> None:
        if self.pinned and not sys.is_finalizing():
            with get_accelerator().device(self._device):  # a thread that has chosen none stands on another
                get_accelerator().synchronize()  # a copy may be under way
                get_accelerator().unlock_memory(self._address)


_LOCKED: weakref.WeakSet[Pages] = weakref.WeakSet()  # and what the driver refused: no child has either
# A child may have got other memory at the same addresses, which the end of the parent's pages would unmap.
os.register_at_fork(after_in_child=lambda: _KEPT.extend(_LOCKED))


class _Slab:
    """Pages, and the ranges of them that are ``free``."""

    def __init__(self, number: int, nbytes: int, *, pin: bool) -> None:
        self.number, self.nbytes, self.pin = number, nbytes, pin
        self.pages = Pages(nbytes, pin=pin)
        self.free = [(0, nbytes)]
        self._parts: dict[int, Any] = {}  # by where they begin: references that notice their end

    def room_for(self, nbytes: int) -> tuple[int, int] | None:
        """Return the smallest free range of so many bytes, or None."""
        return min((r for r in self.free if r[1] - r[0] >= nbytes), key=lambda r: r[1] - r[0], default=None)

    def cut(self, nbytes: int, returned: deque[tuple[int, int, int]]) -> torch.Tensor:
        """Cut so many bytes, in whole pages, from the smallest free range; their end puts it into ``returned``."""
        size = _paged(nbytes)
        room = self.room_for(size)
        assert room is not None, "looked at before"
        start, stop = room
        self.free.remove(room)
        if start + size < stop:
            self.free.append((start + size, stop))
        number, parts = self.number, self._parts

        def gone(_: Any) -> None:  # knows nothing of the pages: they end with their last tensor
            del parts[start]
            returned.append((number, start, start + size))

        part, parts[start] = self.pages.cut(start, nbytes, gone)
        return part

    def join(self) -> None:
        """Join free ranges that are neighbours."""
        joined: list[tuple[int, int]] = []
        for start, stop in sorted(self.free):
            if joined and joined[-1][1] == start:
                joined[-1] = (joined[-1][0], stop)
            else:
                joined.append((start, stop))
        self.free = joined


class Arena:
    """Allocate host tensors, each of exactly its pages. The memory of a tensor that has ended serves later ones when no
    copy of the device uses it any more, until ``close``; without ``keep`` it goes to the system at once. ``pins``:
    there is an accelerator, for which ``pin`` has a meaning.
    """

    def __init__(self, *, pins: bool = False, keep: bool = True) -> None:
        self.pins, self._keep = pins, keep
        self._slabs: dict[int, _Slab] = {}
        self._roomy: dict[int, _Slab] = {}  # those with free ranges: the thousands that are full are not asked again
        self._numbers = itertools.count()
        self._returned: deque[tuple[int, int, int]] = deque()  # appended to whenever a tensor ends, in any thread
        self._mutex = threading.Lock()  # the thread of a save takes buffers too

    def empty(self, shape: int | Sequence[int], *, dtype: torch.dtype = torch.uint8, pin: bool = False) -> torch.Tensor:
        """Allocate a contiguous host tensor that begins at a multiple of 4096 bytes, page-locked with ``pin`` where
        possible. ``shape`` is a number of elements or a shape. Raise OSError when there is no more memory.
        """
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        nbytes = math.prod(sizes) * dtype.itemsize
        if nbytes == 0:
            return torch.empty(sizes, dtype=dtype, device="cpu")
        with self._mutex:
            slab = self._slab(_paged(nbytes), pin=pin and self.pins)
            part = slab.cut(nbytes, self._returned if self._keep else deque())
            if not slab.free:
                self._roomy.pop(slab.number, None)
        return part.view(dtype).view(sizes)

    def _slab(self, nbytes: int, *, pin: bool) -> _Slab:
        """Return a slab with so many bytes free, a new one if need be."""
        for settled in (False, True):
            if settled and self._returned:
                self._reclaim()
            fitting = [slab for slab in self._roomy.values() if slab.pin is pin and slab.room_for(nbytes)]
            if fitting:
                return min(fitting, key=lambda slab: slab.nbytes)
        # what is free and too small gives its place to it
        for number in [n for n, b in self._roomy.items() if b.pin is pin and b.free == [(0, b.nbytes)]]:
            del self._slabs[number], self._roomy[number]
        slab = _Slab(next(self._numbers), nbytes, pin=pin)
        if self._keep:
            self._slabs[slab.number] = self._roomy[slab.number] = slab
        return slab

    def _reclaim(self) -> None:
        """Free the ranges that have been returned, once the device's copies have ended."""
        ended = [self._returned.popleft() for _ in range(len(self._returned))]  # what ends during the wait waits itself
        if self.pins:
            get_accelerator().synchronize()  # the last owner's copies may be under way
        for number, start, stop in ended:
            self._slabs[number].free.append((start, stop))
            self._roomy[number] = self._slabs[number]
        for number in {number for number, _, _ in ended}:
            self._slabs[number].join()

    def close(self) -> None:
        """Give unused memory back to the system now, and all other memory with its last user."""
        with self._mutex:
            self._keep, self._returned = False, deque()
            self._slabs.clear()
            self._roomy.clear()


def aligned_empty(shape: int | Sequence[int], *, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Allocate as ``Arena.empty``, in pages that go back to the system with the tensor: no fragments are kept."""
    return Arena(keep=False).empty(shape, dtype=dtype)
