"""``ds_ssh``: run one shell command on every host of a hostfile, in parallel through ssh.

    ds_ssh nvidia-smi -L
    ds_ssh -f my_hosts -e node7 'df -h /dev/shm | tail -1'

Every line of output begins with the host's name. Exit status: 0 when the command succeeded everywhere, else the first
other status in the order of the hostfile (255: ssh could not reach the host); 2 when the command line or the hostfile
is wrong; 130 after Ctrl-C, which also ends the commands on the hosts. The environment variable DS_SSH names another ssh
program.
"""

import argparse
import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, TextIO

from deepspeed.errors import DeepSpeedConfigError, DeepSpeedError, UsageError
from deepspeed.launcher.cli import DEFAULT_HOSTFILE
from deepspeed.launcher.hostfile import filter_hosts, read_hostfile
from deepspeed.launcher.node.verdict import shell_status

BAD_INPUT, INTERRUPTED, BROKEN_PIPE = 2, 130, 141
FANOUT = 64  # ssh processes at a time: each costs three file descriptors, and 1024 is a usual limit
STOP_GRACE_S = 3.0
# Nobody can answer a question of ssh's here, and a dead host must not hold up the answer of the others for minutes.
SSH_OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
# A command without a terminal goes on when its ssh dies. So its standard input stays with us, and the end of that ends
# the command with its children: setsid (where there is none, only the shell ends) puts them into one process group. It
# is one line because some login shells want that.
_REMOTE = (
    'exec 3<&0; $(command -v setsid) "${SHELL:-/bin/sh}" -c "$1" </dev/null 3<&- & job=$!; '
    "{ cat <&3; kill -TERM -$job || kill -TERM $job; } >/dev/null 2>&1 & watch=$!; "
    "exec 3<&-; wait $job; status=$?; kill $watch 2>/dev/null; exit $status"
)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ds_ssh", description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "-f", "-H", "--hostfile", default=DEFAULT_HOSTFILE, help=f"lines 'name slots=N' (default {DEFAULT_HOSTFILE})"
    )
    parser.add_argument("-i", "--include", default="", metavar="HOSTS", help="only these hosts: NAME[@NAME...]")
    parser.add_argument("-e", "--exclude", default="", metavar="HOSTS", help="all hosts but these")
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, help="the shell command; several words are joined with spaces"
    )
    return parser


def choose_hosts(path: str, *, include: str = "", exclude: str = "") -> list[str]:
    """Host names in file order. Raises DeepSpeedConfigError when the file cannot be read or no host is left."""
    try:
        slots = read_hostfile(path)
    except (OSError, UnicodeDecodeError) as error:
        raise DeepSpeedConfigError(f"hostfile {path} cannot be read: {error}") from error
    if slots is None:
        raise DeepSpeedConfigError(
            f"hostfile {path} does not exist or is not a file; name one with -f, or write lines 'name slots=N' there"
        )
    hosts = list(filter_hosts({host: range(count) for host, count in slots.items()}, include=include, exclude=exclude))
    if not hosts:
        raise DeepSpeedConfigError(f"the filter leaves no host of {path}, which lists {', '.join(slots)}")
    return hosts


def ssh_program(env: Mapping[str, str]) -> list[str]:
    """The ssh command and its own arguments. Raises UsageError when it cannot be run."""
    program = shlex.split(env.get("DS_SSH") or "ssh")
    if shutil.which(program[0]) is None:
        raise UsageError(f"the ssh program {program[0]!r} was not found; install an ssh client, or name one in DS_SSH")
    return program


def remote_command(command: str) -> str:
    """What the login shell of a host is given so that ``command`` ends when the connection does."""
    return f"/bin/sh -c {shlex.quote(_REMOTE)} ds_ssh {shlex.quote(command)}"


class _Fleet:
    """The ssh processes of one command."""

    def __init__(self, program: Sequence[str], command: str, out: TextIO, err: TextIO) -> None:
        self._head, self._command = (*program, *SSH_OPTIONS), remote_command(command)
        self._out, self._err = out, err
        self._running: set[subprocess.Popen[bytes]] = set()
        self._stopped = False
        self._lock = threading.Lock()

    def run(self, host: str) -> int | None:
        """Exit status of the command on ``host`` (128 + signal where ssh was killed); None when all was stopped before
        it began.
        """
        with self._lock:
            if self._stopped:
                return None
            command = [*self._head, host, self._command]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            self._running.add(process)
        assert process.stdin and process.stdout and process.stderr
        try:
            errors = threading.Thread(target=self._copy, args=(host, process.stderr, self._err), daemon=True)
            errors.start()
            self._copy(host, process.stdout, self._out)
            errors.join()
            status = process.wait()
        finally:
            with self._lock:
                self._running.discard(process)
            for pipe in (process.stdin, process.stdout, process.stderr):
                pipe.close()
        return shell_status(status)

    def _copy(self, host: str, source: IO[bytes], target: TextIO) -> None:
        for line in source:
            text = line.decode("utf-8", errors="replace").rstrip("\r\n")
            with self._lock:
                target.write(f"{host}: {text}\n")
                target.flush()

    def stop(self, *, grace_s: float = STOP_GRACE_S) -> None:
        """End what runs: hang up, wait, then kill; a second Ctrl-C kills at once. Nothing is started any more."""
        with self._lock:
            self._stopped = True
            running = list(self._running)
        for process in running:
            with contextlib.suppress(OSError):
                assert process.stdin
                process.stdin.close()
        try:
            for process in running:
                process.wait(timeout=grace_s)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            for process in running:
                process.kill()


def run_everywhere(
    hosts: Sequence[str], command: str, *, program: Sequence[str], out: TextIO, err: TextIO
) -> dict[str, int]:
    """Run the shell ``command`` on all ``hosts`` and return host -> exit status; lines go to ``out`` and ``err`` behind
    the host's name.

    On KeyboardInterrupt, or when ``out`` is closed, the commands are ended before the exception goes on.
    """
    fleet = _Fleet(program, command, out, err)
    with ThreadPoolExecutor(max_workers=min(FANOUT, len(hosts))) as threads:
        answers = {host: threads.submit(fleet.run, host) for host in hosts}
        try:
            return {host: answer.result() or 0 for host, answer in answers.items()}
        except BaseException:
            fleet.stop()
            raise


def _first_other(statuses: Mapping[str, int], err: TextIO) -> int:
    failed = {host: status for host, status in statuses.items() if status != 0}
    if failed:
        named = ", ".join(
            f"{host} ({'not reached, or exit ' if status == 255 else 'exit '}{status})"
            for host, status in failed.items()
        )
        err.write(f"ds_ssh: {len(failed)} of {len(statuses)} hosts failed: {named}\n")
    return next(iter(failed.values()), 0)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``ds_ssh``; returns the exit status."""
    parser = _parser()
    options = parser.parse_args(argv)
    words = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not words:
        parser.error("no command to run; write it behind the options, for example: ds_ssh hostname")
    try:
        hosts = choose_hosts(options.hostfile, include=options.include, exclude=options.exclude)
        statuses = run_everywhere(
            hosts, " ".join(words), program=ssh_program(os.environ), out=sys.stdout, err=sys.stderr
        )
        return _first_other(statuses, sys.stderr)
    except DeepSpeedError as error:
        sys.stderr.write(f"ds_ssh: {error}\n")
        return BAD_INPUT
    except KeyboardInterrupt:
        sys.stderr.write("ds_ssh: interrupted; the commands were ended\n")
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains while it ends
        return BROKEN_PIPE


if __name__ == "__main__":
    sys.exit(main())
