"""What the commands share: sizes, tables, medians, looks at room before it is taken."""

import argparse
import os
import re
import shutil
import statistics
from collections.abc import Sequence
from typing import Any

from deepspeed.config.model.values import byte_count
from deepspeed.errors import UsageError
from deepspeed.monitor.hostmem import host_available_bytes
from deepspeed.monitor.program import columns

_ALIGN = 4096  # as deepspeed.tier.arena.ALIGN, which torch comes with
_POWERS = {"K": "e3", "M": "e6", "G": "e9", "B": "e9"}


def titled(title: str, rows: Sequence[Sequence[str | float]], *notes: str, left: int = 1) -> str:
    """Return a title, a table, and notes below the table."""
    return "\n".join([title, "", *columns(rows, left), *notes])


def params_of(text: str) -> int:
    """Parse a number of parameters: ``1000000``, ``1e9``, ``8M``, ``1.5B`` (powers of 1000). ArgumentTypeError."""
    number = re.sub("[KMGB]$", lambda unit: _POWERS[unit[0]], text.strip().upper())
    count = float(number) if re.fullmatch(r"[0-9.]+(E\+?[0-9]{1,2})?", number, re.IGNORECASE) else 0.0
    if not 1 <= count <= 1e13:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no number of parameters; write for example 8M, 134M, 1.5B or 1e9"
        )
    return round(count)


def size_of(text: str) -> int:
    """Parse a size to bytes: ``1048576``, ``64K``, ``1M``, ``2G`` (powers of 1024). Raises ArgumentTypeError."""
    try:
        return byte_count(re.sub(r"([KMGT])(i?B)?\s*$", r"\1iB", text, flags=re.IGNORECASE))
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size; write bytes, or a number with K, M, G or T, for example 64M"
        ) from error


def block_of(text: str) -> int:
    """Parse a size as ``size_of``, which must be a multiple of 4096 and 1 GiB at most."""
    size = size_of(text)
    if size % _ALIGN or size > 1 << 30:
        raise argparse.ArgumentTypeError(f"a block is a multiple of {_ALIGN} bytes, 1G at most, not {text}")
    return size


def spread(values: list[float]) -> dict[str, Any]:
    """Return median, least, greatest and all of ``values``."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "all": values}


def check_memory(nbytes: float, options: str) -> None:
    """Raise UsageError, which names the ``options`` to lower, unless ``nbytes`` of host memory are free."""
    free = host_available_bytes()
    if nbytes > free:
        raise UsageError(
            f"this takes about {nbytes / 1e9:.1f} GB of memory and {free / 1e9:.1f} are free; give fewer {options}"
        )


def check_folder(folder: str, nbytes: float, consumer: str, remedy: str) -> None:
    """Raise UsageError unless ``folder`` is a folder with room for ``nbytes``, which ``consumer`` takes."""
    if not os.path.isdir(folder):
        fault = "is not a folder" if os.path.exists(folder) else "does not exist"
        raise UsageError(f"the folder {folder} {fault}; name one on the drive to be measured")
    if (free := shutil.disk_usage(folder).free) < nbytes:
        raise UsageError(f"{folder} has {free / 1e9:.2f} GB of free space and {consumer} {nbytes / 1e9:.2f}; {remedy}")
