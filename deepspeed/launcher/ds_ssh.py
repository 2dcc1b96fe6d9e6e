"""``ds_ssh``: run one shell command on every host of a hostfile, in parallel through ssh.

    ds_ssh nvidia-smi -L
    ds_ssh -f my_hosts -e node7 'df -h /dev/shm | tail -1'

Every line of output begins with the host's name. Exit status: 0 when the command succeeded everywhere, else the first
other status in the order of the hostfile (255: ssh could not reach the host); 2 when the command line or the hostfile
is wrong; 130 after Ctrl-C, which also ends the commands on the hosts. The variable DS_SSH names another ssh.
"""

import argparse
import contextlib
import shlex
import sys
import time
from collections.abc import Sequence

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.launcher.fanout import Connection
from deepspeed.launcher.hostfile import DEFAULT_HOSTFILE, filter_hosts, load_hostfile
from deepspeed.launcher.node.loop import EventLoop
from deepspeed.launcher.node.verdict import shell_status
from deepspeed.launcher.runners import ssh_prefix, ssh_program
from deepspeed.monitor.program import CommandLine, guarded

FANOUT = 64  # ssh processes at a time: each costs three file descriptors, and 1024 is a usual limit
STOP_GRACE_S = 3.0
# A command without a terminal goes on when its ssh dies. So its standard input stays with us, and the end of that ends
# the command with its children: setsid (where there is none, only the shell ends) puts them into one process group. It
# is one line because some login shells want that.
_REMOTE = (
    'exec 3<&0; $(command -v setsid) "${SHELL:-/bin/sh}" -c "$1" </dev/null 3<&- & job=$!; '
    "{ cat <&3; kill -TERM -$job || kill -TERM $job; } >/dev/null 2>&1 & watch=$!; "
    "exec 3<&-; wait $job; status=$?; kill $watch 2>/dev/null; exit $status"
)


def choose_hosts(path: str, *, include: str = "", exclude: str = "") -> list[str]:
    """Return host names in file order. Raises DeepSpeedConfigError when the file cannot be read or no host is left."""
    slots = load_hostfile(path)
    hosts = list(filter_hosts({host: range(count) for host, count in slots.items()}, include=include, exclude=exclude))
    if not hosts:
        raise DeepSpeedConfigError(f"the filter leaves no host of {path}, which lists {', '.join(slots)}")
    return hosts


def remote_command(command: str) -> str:
    """Return the text for a host's login shell so that ``command`` ends when the connection does."""
    return f"/bin/sh -c {shlex.quote(_REMOTE)} ds_ssh {shlex.quote(command)}"


class Fleet(EventLoop):
    """Run the ssh processes of one shell ``command``, at most ``FANOUT`` at a time."""

    def __init__(self, hosts: Sequence[str], command: str) -> None:
        super().__init__()
        self._command, self._ssh = remote_command(command), ssh_program()
        self._waiting = list(enumerate(hosts))
        self._running: dict[int, Connection] = {}
        self._statuses = dict.fromkeys(hosts, 0)

    def run(self) -> dict[str, int]:
        """Run all; return host -> exit status (128 + signal if ssh was killed). Exceptions end the commands first."""
        try:
            while self._waiting or self._running:
                while self._waiting and len(self._running) < FANOUT:
                    rank, host = self._waiting.pop(0)
                    argv, prefix = [*ssh_prefix(self._ssh, host), self._command], f"{host}: ".encode()
                    self._running[rank] = Connection(rank, host, argv, self.post, prefix=prefix, drain_s=None)
                self.handle_next()
            return self._statuses
        finally:
            self._stop()

    def _stop(self) -> None:
        """Close the connections that still run, wait, then kill; a second Ctrl-C kills at once."""
        for connection in self._running.values():
            connection.hang_up()
        end = time.monotonic() + STOP_GRACE_S
        with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
            while self._running and time.monotonic() < end:
                self.handle_next()
        for connection in self._running.values():
            connection.cut()

    def _on_ended(self, rank: int, status: int) -> None:
        self._statuses[self._running.pop(rank).host] = shell_status(status)

    def _on_deaf(self) -> None:
        raise BrokenPipeError

    def _on_tick(self) -> None:
        """Do nothing: no host is asked for a sign of life."""


def _run(options: argparse.Namespace, words: Sequence[str]) -> int:
    hosts = choose_hosts(options.hostfile, include=options.include, exclude=options.exclude)
    statuses = Fleet(hosts, " ".join(words)).run()
    failed = {host: status for host, status in statuses.items() if status != 0}
    if failed:
        how = {host: f"{'not reached, or ' if status == 255 else ''}exit {status}" for host, status in failed.items()}
        named = ", ".join(f"{host} ({words})" for host, words in how.items())
        sys.stderr.write(f"ds_ssh: {len(failed)} of {len(statuses)} hosts failed: {named}\n")
    return next(iter(failed.values()), 0)


def main(argv: Sequence[str] | None = None) -> int:
    parser = CommandLine(prog="ds_ssh", description=__doc__, allow_abbrev=False)
    path = f"lines 'name slots=N' (default {DEFAULT_HOSTFILE})"
    parser.add_argument("-f", "-H", "--hostfile", default=DEFAULT_HOSTFILE, help=path)
    parser.add_argument("-i", "--include", default="", metavar="HOSTS", help="only these hosts: NAME[@NAME...]")
    parser.add_argument("-e", "--exclude", default="", metavar="HOSTS", help="all hosts but these")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the shell command; words are joined with spaces")
    options = parser.parse_args(argv)
    words = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not words:
        parser.error("no command to run; write it behind the options, for example: ds_ssh hostname")
    return guarded("ds_ssh", lambda: _run(options, words))


if __name__ == "__main__":
    sys.exit(main())
