"""What the launcher asks the machine it runs on, and ssh: names, addresses, devices, programs, reachability."""

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from deepspeed.errors import UsageError
from deepspeed.launcher.resources import LocalDevices
from deepspeed.launcher.runners import RUNNERS, RunnerOptions, ssh_prefix

_CHECK_S = 10.0
_CHECKS_AT_A_TIME = 64  # each costs three file descriptors, and 1024 is a usual limit


def is_this_machine(host: str) -> bool:
    """Whether ``host``, as a hostfile names it, is this machine: by name, or by an address that is one of ours."""
    name = host.rpartition("@")[2].lower()
    mine = socket.gethostname().lower()
    if name in ("localhost", mine) or name == mine.partition(".")[0] or name.partition(".")[0] == mine:
        return True
    with contextlib.suppress(OSError, UnicodeError):
        for family, kind, protocol, _, address in socket.getaddrinfo(name, 0, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.bind(address)  # only an address of this machine can be bound
                return True
    return False


def own_address(toward: str) -> str:
    """The address from which this machine reaches host ``toward``, or this machine's name when that cannot be told."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(toward, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # a datagram socket: nothing is sent
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError):
        return socket.gethostname()


def local_devices(env: Mapping[str, str]) -> LocalDevices:
    """Accelerators of this machine; none when ``DS_ACCELERATOR=cpu``, which needs no torch."""
    if env.get("DS_ACCELERATOR") == "cpu":
        return LocalDevices(0)
    import torch  # noqa: PLC0415 - takes about a second, and a wrong command line should be refused at once

    from deepspeed.device import get_accelerator  # noqa: PLC0415 - imports torch

    count = torch.accelerator.device_count()
    variable = next(iter(get_accelerator().visible_devices_envs()), "") if count else ""
    return LocalDevices(count, variable, env.get(variable) if variable else None)


def _unreachable(host: str, options: RunnerOptions) -> str | None:
    """Why ``host`` cannot be reached, None when it can."""
    command = [*ssh_prefix(host, options=options, connect_timeout_s=5), "true"]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_CHECK_S)
    except (subprocess.TimeoutExpired, OSError) as error:
        return str(error)
    lines = done.stderr.decode(errors="replace").strip().splitlines() or [f"ssh ended with status {done.returncode}"]
    return lines[0].strip() if done.returncode else None


def check_reachable(hosts: Sequence[str], options: RunnerOptions) -> None:
    """Run ``true`` on all ``hosts`` at once. Raises UsageError naming those not reached, with ssh's first words."""
    with ThreadPoolExecutor(max_workers=min(len(hosts), _CHECKS_AT_A_TIME)) as threads:
        answers = threads.map(lambda host: _unreachable(host, options), hosts)
        failed = [(host, why) for host, why in zip(hosts, answers, strict=True) if why is not None]
    if failed:
        (first, why), *more = failed
        others = f" (nor are {len(more)} more: {', '.join(host for host, _ in more[:5])})" if more else ""
        raise UsageError(
            f"host {first} cannot be reached: \"{why}\"{others}; make '{' '.join(options.ssh)} {first} true' work "
            "without a password, or skip this test with --no_ssh_check"
        )


def check_programs(options: RunnerOptions) -> None:
    """Raise UsageError when a program of the runner is not installed here, or is another backend's."""
    runner = RUNNERS[options.launcher]
    for program in (options.ssh[0],) if options.launcher == "ssh" else runner.programs:
        if shutil.which(program) is None:
            raise UsageError(
                f"--launcher {options.launcher} needs the program {program!r}, which is not on PATH; install "
                f"{runner.install}, or choose another --launcher"
            )
    if options.launcher == "mvapich":
        done = subprocess.run(["mpiname"], stdin=subprocess.DEVNULL, capture_output=True)
        name = done.stdout.decode(errors="replace").strip()[:80]
        if "MVAPICH" not in name.upper():
            raise UsageError(f"the mpiname on PATH reports {name!r}, which is not MVAPICH; put MVAPICH first on PATH")


@contextlib.contextmanager
def pid_file(path: str | None) -> Iterator[None]:
    """Keep this process's id in ``path``. Raises UsageError when the file names another living process."""
    if path is None:
        yield
        return
    with contextlib.suppress(FileNotFoundError, PermissionError):  # PermissionError: it runs, as somebody else
        try:
            with open(path, encoding="ascii") as file:
                pid = int(file.read())
            if pid == os.getpid():
                raise ProcessLookupError  # an earlier process had this id
            os.kill(pid, 0)
        except (ValueError, ProcessLookupError):
            os.unlink(path)  # no such process, or nothing that names one
    try:
        with open(path, "x", encoding="ascii") as file:
            file.write(str(os.getpid()))
    except FileExistsError:
        raise UsageError(f"pid file {path} exists already; another job uses it, or remove it if none does") from None
    try:
        yield
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
