"""Cleans up behind a launcher that was killed: ``python guard.py`` with a pipe from the launcher as standard input.

The launcher writes ``group PID`` for every rank, ``starter PID`` for a program that has started ranks and must end them
itself, ``path NAME`` for everything it left on disk, and ``done`` at a good end. If the pipe closes without that word,
the launcher is dead: groups are killed, those of starters a little after they were asked to end, and the paths removed.
Run by path with ``-I -S`` as its own session, so nothing that ends the launcher ends it too.
"""

import os
import signal
import sys
import time

_STARTER_GRACE_S = 3.0


def _remove(path: str) -> None:
    try:
        if os.path.isdir(path):
            for name in os.listdir(path):
                os.unlink(os.path.join(path, name))
            os.rmdir(path)
        else:
            os.unlink(path)
    except OSError:
        return  # gone already, or no longer ours


def _signal(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except OSError:
        return  # empty


def main() -> None:
    """Wait for the end of the launcher, and do what it can no longer do."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    orders = [line.rstrip("\n").split(" ", 1) for line in sys.stdin]
    if ["done"] in orders:
        return
    starters = [int(value) for kind, value in orders if kind == "starter"]
    for group in starters:
        _signal(group, signal.SIGTERM)
    for kind, value in orders:
        if kind == "group":
            _signal(int(value), signal.SIGKILL)
    if starters:
        time.sleep(_STARTER_GRACE_S)
    for group in starters:
        _signal(group, signal.SIGKILL)
    for kind, value in orders:
        if kind == "path":
            _remove(value)


if __name__ == "__main__":
    main()
