"""What the measurements share: numbers on the command line, medians, and a look at the memory before it is taken."""

import argparse
import re
import statistics
from typing import Any

from deepspeed.errors import UsageError
from deepspeed.observe.hostmem import host_available_bytes

_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9}


def params_of(text: str) -> int:
    """A number of parameters: ``1000000``, ``1e9``, ``8M``, ``1.5B`` (powers of 1000). Raises ArgumentTypeError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\+?\d{1,2})?)([KMGB]?)", text.strip(), re.IGNORECASE | re.ASCII)
    count = float(match[1]) * _UNITS[match[2].upper()] if match is not None else 0.0
    if not 1 <= count <= 1e13:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no number of parameters; write for example 8M, 134M, 1.5B or 1e9"
        )
    return round(count)


def count_of(text: str) -> int:
    """A whole number from 1 on. Raises ArgumentTypeError."""
    if not text.isascii() or not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 on")
    return int(text)


def spread(values: list[float]) -> dict[str, Any]:
    """Median, least, greatest and all of ``values``."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "all": values}


def check_memory(nbytes: float, options: str) -> None:
    """Raise UsageError, which names the ``options`` to lower, when so much host memory is not free: better than the end
    of some process.
    """
    free = host_available_bytes()
    if nbytes > free:
        raise UsageError(
            f"this takes about {nbytes / 1e9:.1f} GB of memory and {free / 1e9:.1f} are free; give fewer {options}"
        )
