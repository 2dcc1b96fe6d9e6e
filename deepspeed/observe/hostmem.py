"""Resident memory of this process, in bytes."""

import ctypes
import os
import platform
from pathlib import Path

import psutil

_STATUS = Path("/proc/self/status")


def rss_bytes() -> int:
    """Resident set size now."""
    return int(psutil.Process(os.getpid()).memory_info().rss)


def peak_rss_bytes() -> int:
    """Largest resident set since the process started or since ``reset_peak_rss`` last worked."""
    try:
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux: the current value is the only portable answer
    return rss_bytes()


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
_LARGE_BYTES = 2 << 20
_KEEP_BYTES = 32 << 20


def return_large_blocks() -> bool:
    """Have glibc serve blocks of 2 MiB and more by mmap, so that a freed gather buffer goes back to the system at once.

    glibc raises that threshold by itself up to 32 MiB as soon as such a block is freed; gathered units then live in the heap,
    between long-lived shards, and the process keeps a quarter more memory than it uses. Nothing is changed when the user has
    tuned malloc (MALLOC_* or GLIBC_TUNABLES variables), preloads another allocator, or the C library is not glibc.
    Returns whether the setting was made.
    """
    tuned = (
        any(k.startswith("MALLOC_") for k in os.environ) or "GLIBC_TUNABLES" in os.environ or "malloc" in os.environ.get("LD_PRELOAD", "")
    )
    if tuned or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)) and bool(mallopt(_M_TRIM_THRESHOLD, _KEEP_BYTES))
