"""The driver of ``ds_verify``: trains the cells of a gate on ranks, judges their answers, and prints a row for each."""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple, TextIO
from unittest.mock import patch

from deepspeed.config.parse import read_config_source
from deepspeed.errors import counted
from deepspeed.tools.verify.ranks import RankFailure, RankPool
from deepspeed.tools.verify.user_model import load_user_case

_ACCOUNT = 4000  # characters of a failure that are shown
_SHOWN = 3  # failures of which more than a line is shown


class Finding(Exception):
    """Fault that a gate found, after which nothing can come."""


class RowResult(NamedTuple):
    """End of a row when nothing is wrong, and the account of a fault, if there is one."""

    fine: str
    fault: str = ""


def config_of(options: argparse.Namespace) -> dict[str, Any]:
    """Read the configuration, by default an empty one. Raises ValueError for it and for a wrong model."""
    config = read_config_source(options.config) if options.config else {}
    if options.model is not None:
        load_user_case(options.model)
    return config


def sizes_and_stages(driver: "Driver", config: dict[str, Any], given: int) -> tuple[list[int], list[int | None]]:
    """Return the sizes of a group and the stages to try, or the ``given`` one. Raises ValueError for one rank."""
    ranks = driver.options.ranks
    sizes = [given] if given else [n for n in range(2, ranks + 1) if not ranks % n]
    if not sizes:
        raise ValueError(f"--ranks {ranks}: 2 ranks at least share the work")
    return sizes, [None] if "stage" in (config.get("zero_optimization") or {}) else [*range(4)]


def aligned(values: Sequence[object], widths: Sequence[int]) -> str:
    """Join the padded cells of one row of a table whose other rows are not known yet."""
    return "  ".join(str(value).ljust(width) for value, width in zip(values, widths, strict=False))


class Driver(contextlib.ExitStack):
    """Run one command: its options, the ranks at work, and the rows on ``out``, each written at once."""

    def __init__(self, options: argparse.Namespace, out: TextIO) -> None:
        super().__init__()
        self.options = options
        self._out = out
        self._failed = 0
        self._pools: dict[int, RankPool] = {}

    def say(self, text: str) -> None:
        self._out.write(text + "\n")
        self._out.flush()

    def pools(self, *ranks: int) -> list[RankPool]:
        """Return a pool for each number of ranks; unless all these pools exist, those that do end first."""
        if not self._pools.keys() >= {*ranks}:
            self.close()
            limit = self.options.time_limit
            self._pools = {n: self.enter_context(RankPool(n, time_limit=limit)) for n in {*ranks}}
        return [self._pools[n] for n in ranks]

    def row(self, text: str, check: Callable[[], RowResult]) -> None:
        """Print ``text`` with what is fine, or with FAIL and the account of the fault below it."""
        try:
            fine, fault = check()
        except RankFailure as failure:
            fine, fault = "", str(failure)
        self.say(f"{text}  {'FAIL' if fault else fine}")
        if fault:
            self._failed += 1
            account = fault if self._failed <= _SHOWN else fault.partition("\n")[0]
            self.say(f"    {account if len(account) < _ACCOUNT else account[:_ACCOUNT] + '[cut]'}")

    def on_ranks(self, text: str, ranks: int, judge: Callable[[Any], RowResult], function: Any, *args: Any) -> None:
        """Print a row about ``function(*args)`` on so many ranks, whose answers ``judge`` gets."""
        self.row(text, lambda: judge(self.pools(ranks)[0].run(function, *args)))

    def conditions(self) -> str:
        """Format the options ``ranks`` and ``steps``, for the last line."""
        return f"{counted(self.options.ranks, 'rank')}, {counted(self.options.steps, 'step')} each"

    def end(self, text: str, fine: str) -> int:
        """Print the last line; return the exit code."""
        self.say(f"\n{text}: {f'{self._failed} FAIL' if self._failed else fine}")
        return 1 if self._failed else 0


def run_gate(module: str, function: str, options: argparse.Namespace) -> int:
    """Run a gate with standard output for its rows; return the exit code. Raises ValueError for wrong input."""
    with patch.dict(os.environ, DS_ACCELERATOR="cpu"), Driver(options, sys.stdout) as driver:  # whatever there is
        try:
            code: int = getattr(import_module(f"deepspeed.tools.verify.{module}"), function)(driver)
            return code
        except (Finding, RankFailure) as failure:
            driver.say(f"{failure}\nFAIL")
            return 1
