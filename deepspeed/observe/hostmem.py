"""Resident memory of this process, in bytes."""

import contextlib
import ctypes
import functools
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path

import psutil


def rss_bytes() -> int:
    """Resident set size now."""
    return int(psutil.Process(os.getpid()).memory_info().rss)


def peak_rss_bytes() -> int:
    """Largest resident set since the process started or since ``reset_peak_rss`` last worked."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return rss_bytes()  # not Linux: the only portable answer


def reset_peak_rss() -> bool:
    """Start a new peak measurement; False where the system has no way to do it (then the peak is since start)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def host_total_bytes() -> int:
    """Physical memory of the machine."""
    return int(psutil.virtual_memory().total)


def host_available_bytes() -> int:
    """Memory that could be given to processes without swapping."""
    return int(psutil.virtual_memory().available)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # <malloc.h>
_LARGE_BYTES = 4 << 20
_KEEP_BYTES = 32 << 20


def return_large_blocks() -> bool:
    """Have glibc serve blocks of 4 MiB and more by mmap, so that a freed gather buffer goes back to the system at once.

    glibc raises that threshold by itself up to 32 MiB as soon as such a block is freed; gathered units then live in the
    heap, between long-lived shards, and the process keeps a quarter more memory than it uses. Nothing is changed when
    the user has tuned malloc, preloads another allocator, or the C library is not glibc. Returns whether it was made.
    """
    tuned = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)
    if tuned or "malloc" in os.environ.get("LD_PRELOAD", "") or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)) and bool(mallopt(_M_TRIM_THRESHOLD, _KEEP_BYTES))


class HeapTrimmer:
    """Gives freed heap memory back to the system after every ``every_bytes`` that went through it.

    glibc up to 2.37 does not find a freed aligned block again when the same size is asked for with alignment, as torch
    does, so a loop over the tensors of a model leaves a heap as large as the model behind it, all of it free.
    """

    def __init__(self, every_bytes: int = 64 << 20) -> None:
        self._every = every_bytes
        self._passed = 0

    def passed(self, nbytes: int) -> None:
        """Note that ``nbytes`` were allocated and freed."""
        self._passed += nbytes
        if self._passed >= self._every:
            self.trim()

    def trim(self) -> None:
        """Give back now. Nothing happens where the C library is not glibc."""
        self._passed = 0
        if platform.libc_ver()[0] == "glibc":
            ctypes.CDLL(None).malloc_trim(0)


_MADV_HUGEPAGE = 14  # <sys/mman.h>
_HUGE_BYTES = 2 << 20


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


def prefer_huge_pages(address: int, nbytes: int) -> None:
    """Ask the kernel to back the 2 MiB-aligned inside of a fresh host buffer with huge pages; only a hint.

    Buffers that come and go with every unit are dominated by page faults otherwise.
    """
    advise = _madvise()
    start = -(-address // _HUGE_BYTES) * _HUGE_BYTES
    inside = (address + nbytes) // _HUGE_BYTES * _HUGE_BYTES - start
    if advise is not None and inside > 0:
        advise(start, inside, _MADV_HUGEPAGE)
