"""Reporting memory of the device and of the host."""

import gc

from deepspeed.device import get_accelerator
from deepspeed.observe import hostmem
from deepspeed.observe.log import log_dist

_GIB = 2**30


def memory_report() -> str:
    """One line: device bytes now and at peak, host bytes now and at peak, machine use."""
    accelerator = get_accelerator()
    used = hostmem.host_total_bytes() - hostmem.host_available_bytes()
    parts = (
        []
        if accelerator.device_name() == "cpu"
        else [
            f"allocated {accelerator.memory_allocated() / _GIB:.2f} GB (peak "
            f"{accelerator.max_memory_allocated() / _GIB:.2f} GB)",
            f"reserved {accelerator.memory_reserved() / _GIB:.2f} GB (peak "
            f"{accelerator.max_memory_reserved() / _GIB:.2f} GB)",
        ]
    )
    parts.append(f"process RSS {hostmem.rss_bytes() / _GIB:.2f} GB (peak {hostmem.peak_rss_bytes() / _GIB:.2f} GB)")
    parts.append(f"machine {used / _GIB:.2f} of {hostmem.host_total_bytes() / _GIB:.2f} GB")
    return ", ".join(parts)


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log ``message`` and the memory in use on rank 0, then start new peak measurements; does nothing without
    ``force``.

    Garbage is collected first, so that the numbers show what is really held.
    """
    if not force:
        return
    gc.collect()
    log_dist(f"{message}: {memory_report()}", stacklevel=2)
    get_accelerator().reset_peak_memory_stats()
