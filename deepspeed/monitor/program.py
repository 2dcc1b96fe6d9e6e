"""How every command of this package reads options, shows what it found, and ends: failures are sentences on stderr."""

import argparse
import ast
import contextlib
import functools
import importlib.util
import io
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from deepspeed.errors import DeepSpeedError

FAILED, BAD_INPUT, INTERRUPTED, BROKEN_PIPE = 1, 2, 130, 141


class CheckFailedError(Exception):
    """Failed check of a command; the text says what was found."""


class CommandLine(argparse.ArgumentParser):
    """Parser whose options are rows, and whose ``description`` keeps its lines."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **settings)

    def option(self, flags: str, kind: Callable[[str], Any], default: Any, metavar: str, text: str) -> None:
        """Add an option with a value; ``default`` may be written as a user would."""
        ending = "" if default is None else " (default %(default)s)"
        self.add_argument(*flags.split(), type=kind, default=default, metavar=metavar, help=text + ending)

    def switches(self, **texts: str) -> None:
        """Add options without a value."""
        for name, text in texts.items():
            self.add_argument(f"--{name}", action="store_true", help=text)


def docstring_of(module: str, function: str | None = None) -> str:
    """Return the docstring of a module, or of a function in the module, without importing it."""
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function]
    return ast.get_docstring(tree if function is None else functions[0]) or ""


def count_of(text: str, most: int = sys.maxsize, least: int = 1) -> int:
    """Parse a whole number from ``least`` to ``most``. Raises ArgumentTypeError."""
    if not text.isascii() or not text.isdecimal() or not least <= int(text) <= most:
        limit = f"to {most}" if most < sys.maxsize else "on"
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} {limit}")
    return int(text)


whole_of = functools.partial(count_of, least=0)  # a whole number from 0 on


def number_of(text: str) -> float:
    """Parse a number from 0 on. Raises ArgumentTypeError."""
    with contextlib.suppress(ValueError):
        if 0 <= float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 on")


def positive_of(text: str) -> float:
    """Parse a number above 0. Raises ArgumentTypeError."""
    with contextlib.suppress(argparse.ArgumentTypeError):
        if (number := number_of(text)) > 0:
            return number
    raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")


def columns(rows: Sequence[Sequence[str | float]], left: int = 1) -> list[str]:
    """Return the lines of a table; the first ``left`` columns are aligned left, the others right."""
    texts = [[cell if isinstance(cell, str) else f"{cell:.3f}" for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    padded = [[f"{c:{'<' if i < left else '>'}{widths[i]}}" for i, c in enumerate(row)] for row in texts]
    return ["  ".join(row).rstrip() for row in padded]


def guarded(prog: str, run: Callable[[], int | str | dict[str, Any]]) -> int:
    """Return ``run``'s status, or 1 for a failed check, 2 for bad input and failures, 130 for Ctrl-C, 141 unread.

    ``run`` may instead return text, or facts, which are written as JSON; the status is 0 then.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started the program
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - a stream like any, with bytes
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names may hold what the terminal cannot show
    try:
        result = run()
        if not isinstance(result, int):
            say(result if isinstance(result, str) else json.dumps(result, indent=1, default=str))
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except BrokenPipeError:
        for stream in (sys.stdout, sys.stderr):  # or the interpreter complains while it ends
            with contextlib.suppress(io.UnsupportedOperation):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return BROKEN_PIPE
    except (CheckFailedError, DeepSpeedError, OSError, ValueError) as error:
        sys.stderr.write(f"{prog}: {error}\n")
        return FAILED if isinstance(error, CheckFailedError) else BAD_INPUT
    except KeyboardInterrupt:
        sys.stderr.write(f"{prog}: interrupted\n")
        return INTERRUPTED


def say(text: str) -> None:
    """Write a line to standard output."""
    sys.stdout.write(text + "\n")


def size(nbytes: float) -> str:
    """Format a number of bytes as ``"23.4 GiB"``, scaled by 1024."""
    for unit in ("B", "KiB", "MiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} GiB"
