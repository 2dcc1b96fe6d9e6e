"""Cleans up behind a launcher that was killed: ``python guard.py`` with a pipe from the launcher as standard input.

The launcher writes ``group PID`` for every rank, ``starter PID`` for a program that has started ranks and must end them
itself, ``path NAME`` for everything it left on disk, and ``done`` at a good end. If the pipe closes without that word,
the launcher is dead: groups are killed, those of starters a little after they were asked to end, and the paths removed.
Run by path with ``-I -S`` as its own session, so nothing that ends the launcher ends it too.
"""

import contextlib
import os
import shutil
import signal
import sys
import time

_STARTER_GRACE_S = 3.0


def _signal(groups: list[str], number: signal.Signals) -> None:
    for group in groups:
        with contextlib.suppress(OSError):  # empty
            os.killpg(int(group), number)


def main() -> None:
    """Wait for the end of the launcher, and do what it can no longer do."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    orders: dict[str, list[str]] = {"group": [], "starter": [], "path": [], "done": []}
    for line in sys.stdin:
        kind, _, value = line.rstrip("\n").partition(" ")
        orders[kind].append(value)
    if orders["done"]:
        return
    _signal(orders["starter"], signal.SIGTERM)
    _signal(orders["group"], signal.SIGKILL)
    if orders["starter"]:
        time.sleep(_STARTER_GRACE_S)
    _signal(orders["starter"], signal.SIGKILL)
    for path in orders["path"]:
        shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):  # it was a folder, or is gone already
            os.unlink(path)


if __name__ == "__main__":
    main()
