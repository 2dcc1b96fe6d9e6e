"""Host memory at page boundaries, as O_DIRECT transfers need it, and the few buffers of it that everything between
memory and a drive passes through.
"""

import contextlib
import math
import mmap
from collections import deque
from collections.abc import Sequence

import torch

from deepspeed.observe.log import logger
from deepspeed.tier.transfer import Transfer

ALIGN = 4096  # bytes; csrc/aio/engine.h has the same number
_HUGE_FROM = 4 << 20  # bytes from which 2 MiB pages are worth asking for


def aligned_empty(shape: int | Sequence[int], *, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """A contiguous host tensor whose memory begins at a multiple of 4096 bytes; zeros, resident from the first touch
    on. ``shape`` is a number of elements or a shape. Raises OSError when the memory cannot be mapped.
    """
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    count = math.prod(sizes)
    if count == 0:
        return torch.empty(sizes, dtype=dtype, device="cpu")
    # its own mapping: goes back to the system when the tensor dies, and the allocator keeps no fragments of it
    pages = mmap.mmap(-1, -(-count * dtype.itemsize // ALIGN) * ALIGN, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if len(pages) >= _HUGE_FROM:
        # a kernel without huge pages says EINVAL. With them a transfer has a 512th of the pages to look up
        with contextlib.suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype, count=count).view(sizes)


class Staging:
    """Hands out byte buffers, normally ``count`` at most; one that is given back with a transfer is free after that.
    Who takes while all are out gets one more, which goes back to the system afterwards: memory beyond the promise is
    better than a hang. ``pin`` asks for page-locked memory; where the system refuses it, ordinary memory serves, and
    one line in the log says so.
    """

    def __init__(self, count: int, *, pin: bool = False) -> None:
        self._count, self._pin = max(1, count), pin
        self._free: list[torch.Tensor] = []
        self._busy: deque[tuple[torch.Tensor, Transfer]] = deque()
        self._out = 0

    @property
    def room(self) -> bool:
        """Whether a buffer could be taken without waiting for anything and without exceeding the count."""
        self._reap()
        return bool(self._free) or self._out + len(self._busy) < self._count

    def take(self, nbytes: int) -> torch.Tensor:
        """A uint8 buffer of at least ``nbytes`` bytes that begins at a multiple of 4096."""
        self._reap()
        while not self._free and self._busy and self._total() >= self._count:
            self._retire()
        fitting = [i for i, b in enumerate(self._free) if b.numel() >= nbytes]
        if fitting:
            chosen = self._free.pop(min(fitting, key=lambda i: self._free[i].numel()))
        else:
            while self._free and self._total() >= self._count:
                self._free.pop()  # what is too small for this one gives its place to it
            chosen = self._make(nbytes)
        self._out += 1
        return chosen

    def give(self, buffer: torch.Tensor, *, after: Transfer | None = None) -> None:
        """Take ``buffer`` back, for the next user when ``after`` has ended."""
        self._out -= 1
        if after is not None:
            self._busy.append((buffer, after))
        elif self._total() < self._count:
            self._free.append(buffer)

    def settle(self) -> None:
        """Wait for every transfer; raises the first failure when all have ended."""
        failure: OSError | None = None
        while self._busy:
            try:
                self._retire()
            except OSError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def clear(self) -> None:
        """Settle, and give the memory back."""
        try:
            self.settle()
        finally:
            self._free.clear()

    def _total(self) -> int:
        return self._out + len(self._busy) + len(self._free)

    def _reap(self) -> None:
        while self._busy and self._busy[0][1].done():
            self._retire()

    def _retire(self) -> None:
        buffer, transfer = self._busy.popleft()
        try:
            transfer.wait()
        finally:
            if self._total() < self._count:
                self._free.append(buffer)

    def _make(self, nbytes: int) -> torch.Tensor:
        size = -(-max(nbytes, 1) // ALIGN) * ALIGN
        if self._pin:
            try:
                buffer = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
                if buffer.data_ptr() % ALIGN == 0:
                    return buffer
            except RuntimeError as error:
                text = "page-locked memory for staging is refused (%s); ordinary memory serves, copies are slower"
                logger.warning(text, error)
            self._pin = False
        return aligned_empty(size)
