"""Becomes one rank: ``python rank_exec.py LAUNCHER_PID LOG_FILE CORES COMMAND...``; LOG_FILE and CORES may be empty.

It ties the life of the rank to the launcher's, points both output streams to the log file, keeps to the cores it is
given (``0,1,8``), and replaces itself by COMMAND: process id, exit status and signals are those of the command itself.
Run by path with ``-I -S`` so that it costs a few milliseconds and imports no package.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def _die_with(launcher_pid: int) -> None:
    """Ask the kernel for a SIGKILL when the launcher ends, however it ends (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != launcher_pid:
            # The launcher died before the request was made, so the kernel will never act on it.
            os._exit(128 + signal.SIGKILL)


def main(argv: list[str]) -> None:
    """Replace this process by the command in ``argv[3:]``; exit status 127 when that is not possible."""
    launcher_pid, log_file, cores, *command = argv
    _die_with(int(launcher_pid))
    if log_file:
        # O_APPEND: two streams share one file, and neither may overwrite the other.
        target = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(target, 1)
        os.dup2(target, 2)
        os.close(target)
    try:
        if cores:
            os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
        os.execvp(command[0], command)
    except OSError as error:
        what = f"start {command[0]}" + (f" on cores {cores}" if cores else "")
        os.write(2, f"deepspeed: cannot {what}: {error.strerror}\n".encode())
        os._exit(127)


if __name__ == "__main__":
    main(sys.argv[1:])
