"""How every command of this package ends: a failure is a sentence on standard error and an exit status."""

import contextlib
import io
import os
import sys
from collections.abc import Callable

from deepspeed.errors import DeepSpeedError

BAD_INPUT, INTERRUPTED, BROKEN_PIPE = 2, 130, 141


def guarded(prog: str, run: Callable[[], int]) -> int:
    """The exit status: that of ``run``, or 2 for wrong input and failures, 130 for Ctrl-C, 141 when no one reads on."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started the program
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - a stream like any, with bytes
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names may hold what the terminal cannot show
    try:
        status = run()
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        for stream in (sys.stdout, sys.stderr):  # or the interpreter complains while it ends
            with contextlib.suppress(io.UnsupportedOperation):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return BROKEN_PIPE
    except (DeepSpeedError, OSError, ValueError) as error:
        sys.stderr.write(f"{prog}: {error}\n")
        return BAD_INPUT
    except KeyboardInterrupt:
        sys.stderr.write(f"{prog}: interrupted\n")
        return INTERRUPTED


def say(text: str) -> None:
    """A line on standard output."""
    sys.stdout.write(text + "\n")


def size(nbytes: float) -> str:
    """``"23.4 GiB"``; bytes are scaled by 1024."""
    for unit in ("B", "KiB", "MiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} GiB"
