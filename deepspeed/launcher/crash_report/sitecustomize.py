"""Loaded by Python itself at the start of every rank; leaves an uncaught exception where the launcher finds it.

When one rank fails, its peers fail a moment later with broken connections and bury the one traceback that matters.
The launcher therefore needs that traceback, with its time, while the rank's own streams stay on the terminal; a hook
installed before the script starts is the only way that asks nothing of the script. The rank also asks the kernel for a
SIGKILL when the launcher ends, however it ends.
Everything is undone before the script runs: the search path, the environment, and a sitecustomize of the user's own.
"""

import contextlib
import ctypes
import os
import signal
import sys
import time
import traceback
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from types import TracebackType

_HERE = os.path.dirname(os.path.abspath(__file__))
_PR_SET_PDEATHSIG = 1


def _install(report_file: str) -> None:
    previous, owner = sys.excepthook, os.getpid()

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        # A forked child (a data loader worker) inherits the hook, but its failure is not the rank's.
        if os.getpid() == owner and not issubclass(kind, KeyboardInterrupt):
            moment, is_shown = time.time(), getattr(value, "is_shown", False)  # by deepspeed.client.comm.faults
            text = "" if is_shown else "".join(traceback.format_exception(kind, value, trace))
            # The report is a convenience; the traceback below is printed in any case.
            with contextlib.suppress(OSError), open(report_file, "w", encoding="utf-8", errors="replace") as file:
                file.write(f"{moment!r}\n{text}")
        previous(kind, value, trace)

    sys.excepthook = hook


# Remove every trace from path and environment.
sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != _HERE]
os.environ.pop("PYTHONPATH", None)
if (_user_path := os.environ.pop("DS_USER_PYTHONPATH", None)) is not None:
    os.environ["PYTHONPATH"] = _user_path
_report_file, _launcher = os.environ.pop("DS_CRASH_REPORT", None), os.environ.pop("DS_LAUNCHER_PID", None)
if _report_file:
    _install(_report_file)
if _launcher == str(os.getppid()):  # not in what a rank that is no Python program has started
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
_spec = PathFinder.find_spec("sitecustomize", sys.path)  # a user's own
if _spec is not None and _spec.loader is not None:
    sys.modules["sitecustomize"] = module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["sitecustomize"])
