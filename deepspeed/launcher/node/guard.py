"""Cleans up behind a launcher that was killed: ``python guard.py PATH...`` with a pipe from it as standard input.

The launcher writes the process group of every rank, or of a program that has started ranks, and ``done`` at a good end.
If the pipe closes without that word, the launcher is dead: the groups are asked to end, killed a little later, and the
paths removed. Run by path with ``-I -S`` as its own session, so nothing that ends the launcher ends it too.
"""

import contextlib
import os
import shutil
import signal
import sys
import time

_GRACE_S = 2.0


def main(paths: list[str]) -> None:
    """Wait for the end of the launcher, then do the cleanup it can no longer do."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    groups = sys.stdin.read().split()
    if "done" in groups:
        return
    for number, wait_s in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, 0.0)):
        for group in groups:
            with contextlib.suppress(OSError):  # empty
                os.killpg(int(group), number)
        time.sleep(wait_s if groups else 0.0)
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):  # it was a folder, or is gone already
            os.unlink(path)


if __name__ == "__main__":
    main(sys.argv[1:])
