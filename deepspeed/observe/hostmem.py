"""Resident memory of this process, in bytes."""

import os
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
