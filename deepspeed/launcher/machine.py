"""What the launcher asks the machine it runs on: names, addresses, devices, CPU cores; and its file of process ids.

A *CPU* is what the kernel schedules on; hyperthreads of one physical core are several CPUs. Only the first allowed CPU
of a physical core is handed out, because two ranks or threads on one core slow each other down. The memory of a rank
comes from the NUMA node of its cores, as is Linux's default.
"""

import contextlib
import os
import re
import socket
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from deepspeed.errors import DeepSpeedConfigError, UsageError
from deepspeed.launcher.job import Job
from deepspeed.launcher.resources import LocalDevices

SYSFS = "/sys/devices/system"


def is_this_machine(host: str) -> bool:
    """Tell whether ``host``, as a hostfile names it, is this machine: by name, or by one of its addresses."""
    name = host.rpartition("@")[2].lower()
    hostname = socket.gethostname().lower()
    if name in ("localhost", hostname) or name == hostname.partition(".")[0] or name.partition(".")[0] == hostname:
        return True
    with contextlib.suppress(OSError, UnicodeError):
        for family, kind, protocol, _, address in socket.getaddrinfo(name, 0, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.bind(address)  # only an address of this machine can be bound
                return True
    return False


def own_address(toward: str) -> str:
    """Return the address from which this machine reaches host ``toward``, or its host name when that is unknown."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(toward, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # a datagram socket: nothing is sent
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError):
        return socket.gethostname()


def local_devices() -> LocalDevices:
    """Return the accelerators of this machine; none when ``DS_ACCELERATOR=cpu``, which needs no torch."""
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        return LocalDevices(0)
    import torch  # noqa: PLC0415 - takes about a second, and a wrong command line should be refused at once

    from deepspeed.accelerator.device import get_accelerator  # noqa: PLC0415 - imports torch

    count = torch.accelerator.device_count()
    variable = next(iter(get_accelerator().visible_devices_envs()), "") if count else ""
    return LocalDevices(count, variable, os.environ.get(variable))


def parse_core_list(text: str) -> list[int]:
    """Return the CPU numbers of ``0-3,8,10-11``. Raises DeepSpeedConfigError (a ValueError) for anything else."""
    cores: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", item, re.ASCII)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if last < first or (cores and first <= cores[-1]):
            hint = "expected ascending numbers or ranges without blanks, as in 0-3,8,10-11"
            raise DeepSpeedConfigError(f"core list {text!r}: {item!r} is none, or does not ascend; {hint}")
        cores += range(first, last + 1)
    return cores


def _read_lists(root: str, kind: str, name: str) -> dict[int, list[int]]:
    """Return number -> CPU list of every ``kind`` below ``root``; lists that are empty or not shown are left out."""
    lists = {}
    for path in Path(root).glob(f"{kind}/{kind}[0-9]*/{name}"):
        if text := path.read_text(encoding="ascii").strip():
            lists[int(path.relative_to(root).parts[1].removeprefix(kind))] = parse_core_list(text)
    return lists


def usable_cores(allowed: Collection[int], root: str = SYSFS) -> list[int]:
    """Return the first allowed CPU of every physical core, by NUMA node, so that equal shares cross few borders."""
    siblings = _read_lists(root, "cpu", "topology/thread_siblings_list")  # some containers show neither
    nodes = _read_lists(root, "node", "cpulist")
    node_of = {cpu: node for node, cpus in sorted(nodes.items(), reverse=True) for cpu in cpus}
    first = {min({cpu, *siblings.get(cpu, ())} & set(allowed)) for cpu in allowed}
    return sorted(first, key=lambda cpu: (node_of.get(cpu, 0), cpu))


def share_cores(cores: Sequence[int], ranks: int) -> list[tuple[int, ...]]:
    """Give each rank equally many neighbouring cores. Raises UsageError (an AssertionError) for fewer than ranks."""
    per_rank = len(cores) // ranks
    if per_rank == 0:
        raise UsageError(f"{ranks} ranks cannot be bound to {len(cores)} core(s); start fewer, or list more")
    return [tuple(cores[rank * per_rank : (rank + 1) * per_rank]) for rank in range(ranks)]


def plan_cores(
    job: Job, ranks: int, *, root: str = SYSFS, allowed: Collection[int] | None = None
) -> list[tuple[int, ...]]:
    """Return cores for the ``ranks`` ranks on this node; empty ones when ``job`` does not ask for binding.

    ``allowed`` are the CPUs this process may use (default: ask the kernel). Raises DeepSpeedConfigError (a ValueError)
    for a malformed list or KMP_AFFINITY; UsageError for CPUs that are not allowed, or too few of them.
    """
    if not job.bind_cores and job.core_list is None:
        return [()] * ranks
    if "KMP_AFFINITY" in os.environ:
        raise DeepSpeedConfigError("KMP_AFFINITY binds threads in its own way; unset it, or do not bind cores to ranks")
    permitted = os.sched_getaffinity(0) if allowed is None else set(allowed)
    cores = usable_cores(permitted, root) if job.core_list is None else parse_core_list(job.core_list)
    if outside := [core for core in cores if core not in permitted]:
        raise UsageError(f"--bind_core_list: core(s) {outside} do not exist here or are not this process's to use")
    return share_cores(cores, ranks)


@contextlib.contextmanager
def pid_file(path: str) -> Iterator[None]:
    """Keep this process's id in ``path``. Raises UsageError when the file names another living process."""
    with contextlib.suppress(FileNotFoundError, PermissionError):  # PermissionError: it runs, as somebody else
        try:
            pid = int(Path(path).read_text(encoding="ascii"))
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
