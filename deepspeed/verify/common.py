"""What the commands of ``ds_verify`` share: a report that is written row by row."""

import argparse
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from deepspeed.config.parse import read_config_source
from deepspeed.verify.ranks import RankFailure
from deepspeed.verify.user_model import load_user_case

_ACCOUNT = 4000  # characters of a failure that are shown
_SHOWN = 3  # failures of which more than a line is shown


class Finding(Exception):
    """What a gate found wrong, when nothing can come after it."""


def config_of(options: argparse.Namespace) -> dict[str, Any]:
    """The configuration that was given, or an empty one. Raises ValueError for it and for a wrong model."""
    config = read_config_source(options.config) if options.config else {}
    if options.model is not None:
        load_user_case(options.model)
    return config


def aligned(values: Sequence[object], widths: Sequence[int]) -> str:
    """Cells of a row whose table is not known as a whole yet."""
    return "  ".join(str(value).ljust(width) for value, width in zip(values, widths, strict=False))


class Printout:
    """Rows on ``out``, each written at once, and how many of them failed."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._failed = 0

    def say(self, text: str) -> None:
        self._out.write(text + "\n")
        self._out.flush()

    def row(self, text: str, check: Callable[..., tuple[str, str]], *arguments: Any) -> None:
        """A row that ends with what is fine, or with FAIL and the account of the fault below it.

        ``check(*arguments)`` returns both; the second is empty when there is no fault. Ranks that fail are one.
        """
        try:
            fine, fault = check(*arguments)
        except RankFailure as failure:
            fine, fault = "", str(failure)
        self.say(f"{text}  {'FAIL' if fault else fine}")
        if fault:
            self._failed += 1
            account = fault if self._failed <= _SHOWN else fault.partition("\n")[0]
            self.say(f"    {account if len(account) < _ACCOUNT else account[:_ACCOUNT] + '[cut]'}")

    def end(self, text: str, fine: str) -> int:
        """The last line; the exit code."""
        self.say(f"\n{text}: {f'{self._failed} FAIL' if self._failed else fine}")
        return 1 if self._failed else 0
