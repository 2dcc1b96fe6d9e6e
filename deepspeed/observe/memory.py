"""Reporting memory of the device and of the host."""

import gc

from deepspeed.device import get_accelerator
from deepspeed.observe import hostmem
from deepspeed.observe.log import log_dist

_GIB = 2**30


def memory_report() -> str:
    """One line: device bytes now and at peak, host bytes now and at peak, machine use."""
    accelerator, total = get_accelerator(), hostmem.host_total_bytes()
    rows = [("process RSS", hostmem.rss_bytes(), hostmem.peak_rss_bytes())]
    if accelerator.device_name() != "cpu":
        rows.insert(0, ("allocated", accelerator.memory_allocated(), accelerator.max_memory_allocated()))
        rows.insert(1, ("reserved", accelerator.memory_reserved(), accelerator.max_memory_reserved()))
    used = [f"{what} {now / _GIB:.2f} GB (peak {peak / _GIB:.2f} GB)" for what, now, peak in rows]
    machine = f"machine {(total - hostmem.host_available_bytes()) / _GIB:.2f} of {total / _GIB:.2f} GB"
    return ", ".join([*used, machine])


def see_memory_usage(message: str, force: bool = False) -> None:
    """With ``force``: collect garbage, log ``message`` and the memory in use on rank 0, start new peak measurements."""
    if not force:
        return
    gc.collect()
    log_dist(f"{message}: {memory_report()}", stacklevel=2)
    get_accelerator().reset_peak_memory_stats()
