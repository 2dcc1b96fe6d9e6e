"""Host memory at page boundaries, as O_DIRECT transfers need it."""

import contextlib
import math
import mmap
from collections.abc import Sequence

import torch

ALIGN = 4096  # bytes; csrc/aio/engine.h has the same number
_HUGE_FROM = 4 << 20  # bytes from which 2 MiB pages are worth asking for


def aligned_empty(shape: int | Sequence[int], *, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """A contiguous host tensor whose memory begins at a multiple of 4096 bytes; zeros, resident from the first touch
    on.

    ``shape`` is a number of elements or a shape. Raises OSError when the memory cannot be mapped.
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
