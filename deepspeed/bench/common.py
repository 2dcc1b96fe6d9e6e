"""What the measurements share: command lines, medians, a look at the memory before it is taken, exit statuses."""

import argparse
import re
import statistics
from collections.abc import Callable
from typing import Any

from deepspeed.config.model.values import byte_count
from deepspeed.errors import UsageError
from deepspeed.observe import program
from deepspeed.observe.hostmem import host_available_bytes
from deepspeed.observe.program import say
from deepspeed.tier.aligned import ALIGN

_POWERS = {"K": "e3", "M": "e6", "G": "e9", "B": "e9"}


def params_of(text: str) -> int:
    """A number of parameters: ``1000000``, ``1e9``, ``8M``, ``1.5B`` (powers of 1000). Raises ArgumentTypeError."""
    number = re.sub("[KMGB]$", lambda unit: _POWERS[unit[0]], text.strip().upper())
    count = float(number) if re.fullmatch(r"[0-9.]+(E\+?[0-9]{1,2})?", number, re.IGNORECASE) else 0.0
    if not 1 <= count <= 1e13:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no number of parameters; write for example 8M, 134M, 1.5B or 1e9"
        )
    return round(count)


def size_of(text: str) -> int:
    """Bytes of ``1048576``, ``64K``, ``1M``, ``2G`` (powers of 1024). Raises ArgumentTypeError."""
    try:
        return int(byte_count(re.sub(r"([KMGT])(i?B)?\s*$", r"\1iB", text, flags=re.IGNORECASE)))
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size; write bytes, or a number with K, M, G or T, for example 64M"
        ) from error


def block_of(text: str) -> int:
    """``size_of``, a multiple of 4096 and 1 GiB at most."""
    size = size_of(text)
    if size % ALIGN or size > 1 << 30:
        raise argparse.ArgumentTypeError(f"a block is a multiple of {ALIGN} bytes, 1G at most, not {text}")
    return size


def count_of(text: str) -> int:
    """A whole number from 1 on. Raises ArgumentTypeError."""
    if not text.isascii() or not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 on")
    return int(text)


class _Refuse(argparse.Action):
    """A flag that says why it is not here."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        parser.error(f"{option} is not in this release: {self.metavar}")


class CommandLine(argparse.ArgumentParser):
    """A parser whose options are rows; the text of the module is its description."""

    def __init__(self, prog: str, text: str | None) -> None:
        kind = argparse.RawDescriptionHelpFormatter
        super().__init__(prog=prog, description=text, allow_abbrev=False, formatter_class=kind)

    def option(self, flags: str, kind: Callable[[str], Any], default: Any, metavar: str, text: str) -> None:
        """An option with a value; one without a default is required."""
        self.add_argument(*flags.split(), type=kind, default=default, metavar=metavar, help=text)

    def switches(self, **texts: str) -> None:
        """Options without a value."""
        for name, text in texts.items():
            self.add_argument(f"--{name}", action="store_true", help=text)

    def refuse(self, reasons: dict[str, str]) -> None:
        """Options that end the command with the reason why they are not here."""
        for flag, reason in reasons.items():
            self.add_argument(flag, action=_Refuse, nargs="*", metavar=reason, help=argparse.SUPPRESS)


def spread(values: list[float]) -> dict[str, Any]:
    """Median, least, greatest and all of ``values``."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "all": values}


def check_memory(nbytes: float, options: str) -> None:
    """Raise UsageError, which names the ``options`` to lower, when so much host memory is not free."""
    free = host_available_bytes()
    if nbytes > free:
        raise UsageError(
            f"this takes about {nbytes / 1e9:.1f} GB of memory and {free / 1e9:.1f} are free; give fewer {options}"
        )


def guarded(prog: str, action: Callable[[], str]) -> int:
    """Write what ``action`` returns; a failure is a sentence on standard error. The exit status."""

    def run() -> int:
        say(action())
        return 0

    return program.guarded(prog, run)
