"""Runs the one process of a backend (mpirun, srun, pdsh) to its end, with its variables."""

import contextlib
import os
import signal
import subprocess
import time

from deepspeed.errors import UsageError
from deepspeed.launcher.node.loop import signals_to
from deepspeed.launcher.node.ranks import Guard
from deepspeed.launcher.node.verdict import shell_status
from deepspeed.launcher.runners import RunnerCommand

_POLL_S = 0.05
_KILL_S = 5.0  # how long a backend may take after a second signal


def run_backend(command: RunnerCommand) -> int:
    """Run ``command`` and return its exit status, 128 + S when signal S ended it, or made it or this process fail.

    Signals that end a job are passed on; after a second one the backend has 5 s before it is killed. When this process
    is killed the backend is ended too. Raises UsageError when the program cannot be started.
    """
    received: list[signal.Signals] = []
    with contextlib.ExitStack() as stack:
        guardian = Guard()
        stack.callback(guardian.dismiss)
        # Before there is a backend, which would outlive a signal that comes in between.
        stack.enter_context(signals_to(received.append))
        try:
            # Its own session, so that Ctrl-C in the terminal reaches it once, from here.
            child = subprocess.Popen(command.argv, env={**os.environ, **command.env}, start_new_session=True)
        except OSError as error:
            raise UsageError(f"cannot start {command.argv[0]}: {error.strerror}") from error
        guardian.watch(child.pid)
        passed_on, deadline = 0, float("inf")
        while (status := child.poll()) is None:
            numbers = received[passed_on:]
            passed_on += len(numbers)
            if passed_on > 1:
                deadline = min(deadline, time.monotonic() + _KILL_S)
            if time.monotonic() > deadline:
                numbers = [signal.SIGKILL]
            for number in numbers:
                # To the group, as from a terminal: mpirun may be a script, which would not pass it on.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(child.pid, number)
            time.sleep(_POLL_S)
    return 128 + received[0] if received and status != 0 else shell_status(status)
