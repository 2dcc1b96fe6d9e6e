"""What the commands of ``ds_verify`` share: options, checks of them, and a report that is written row by row."""

import argparse
import contextlib
import os
import tempfile
from collections.abc import Iterator
from typing import Any, TextIO

from deepspeed.config.parse import read_config_source
from deepspeed.verify.user_model import load_user_case

_ACCOUNT = 4000  # characters of a failure that are shown
MODEL = "your own model (ds_verify grads --help says what build() returns)"


def command(commands: Any, name: str, text: str, description: str | None) -> argparse.ArgumentParser:
    """Add a command to those of ``ds_verify``."""
    kind = argparse.RawDescriptionHelpFormatter
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=description, formatter_class=kind
    )
    return parser


def add_numbers(parser: argparse.ArgumentParser, *rows: tuple[str, int | float | None, str]) -> None:
    """Options with a number: flag, default, and a text to which the default is added; without one a whole number."""
    for flag, default, text in rows:
        ending = "" if default is None else f" (default {default:g})"
        kind = int if default is None else type(default)
        parser.add_argument(flag, type=kind, default=default, metavar="N", help=text + ending)


def add_model(parser: argparse.ArgumentParser, config: str) -> None:
    """``--model`` and ``--config``."""
    parser.add_argument("--model", metavar="MODULE:BUILD", help=MODEL)
    parser.add_argument("--config", metavar="FILE", help=config)


def check_numbers(options: argparse.Namespace, *names: str) -> None:
    """Raise ValueError for those of these options that are given and less than 1."""
    for name in names:
        if (value := getattr(options, name)) is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, not {value}")


def config_of(options: argparse.Namespace) -> dict[str, Any]:
    """The configuration that was given, or an empty one. Raises ValueError for it and for a wrong model."""
    config = read_config_source(options.config) if options.config else {}
    if options.model is not None:
        load_user_case(options.model, config)
    return config


@contextlib.contextmanager
def folder_of(options: argparse.Namespace) -> Iterator[str]:
    """``--folder``, or a temporary one. Raises ValueError."""
    if options.folder is not None and not os.path.isdir(options.folder):
        raise ValueError(f"--folder {options.folder} is no folder")
    with tempfile.TemporaryDirectory(prefix="ds_verify_") as temporary:
        yield options.folder or temporary


class Printout:
    """Rows on ``out``, each written at once, and how many of them failed."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self.failed = 0

    def say(self, text: str) -> None:
        """A line."""
        self._out.write(text + "\n")
        self._out.flush()

    def row(self, text: str, fault: str = "", *, fine: str = "ok") -> None:
        """A row that ends with ``fine``, or with FAIL and the account of the ``fault`` below it."""
        self.say(f"{text}  {'FAIL' if fault else fine}")
        if fault:
            self.failed += 1
            self.say(f"    {cut(fault)}")

    def end(self, text: str, fine: str) -> int:
        """The last line; the exit code."""
        self.say(f"\n{text}: {f'{self.failed} FAIL' if self.failed else fine}")
        return 1 if self.failed else 0


def cut(account: str) -> str:
    """The failing ranks' accounts without all of the logs."""
    return account if len(account) < _ACCOUNT else account[:_ACCOUNT] + "\n[cut]"
