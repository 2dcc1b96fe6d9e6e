"""Which CPU cores each rank of a node runs on; its memory then comes from their NUMA node, as is Linux's default.

A *CPU* is what the kernel schedules on; hyperthreads of one physical core are several CPUs. Only the first allowed CPU
of a physical core is handed out, because two ranks or threads on one core slow each other down.
"""

import glob
import os
import re
from collections.abc import Collection, Sequence

from deepspeed.errors import DeepSpeedConfigError, UsageError
from deepspeed.launcher.job import Job

SYSFS = "/sys/devices/system"
_GRAMMAR = "expected ascending numbers or ranges without blanks, as in 0-3,8,10-11"


def parse_core_list(text: str) -> list[int]:
    """CPU numbers of ``0-3,8,10-11``. Raises DeepSpeedConfigError (a ValueError) for anything else."""
    cores: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", item, re.ASCII)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if last < first or (cores and first <= cores[-1]):
            what = f"{item!r} is not a number or range, or does not ascend"
            raise DeepSpeedConfigError(f"core list {text!r}: {what}; {_GRAMMAR}")
        cores += range(first, last + 1)
    return cores


def _read_lists(root: str, kind: str, name: str) -> dict[int, list[int]]:
    """Number -> CPU list of every ``kind`` below ``root``; what the kernel does not show, or is empty, is left out."""
    lists = {}
    for path in glob.glob(f"{glob.escape(root)}/{kind}/{kind}[0-9]*/{name}"):
        with open(path, encoding="ascii") as file:
            if text := file.read().strip():
                number = path.removeprefix(f"{root}/{kind}/{kind}").partition("/")[0]
                lists[int(number)] = parse_core_list(text)
    return lists


def usable_cores(allowed: Collection[int], root: str = SYSFS) -> list[int]:
    """The first allowed CPU of every physical core, NUMA node by NUMA node, so that equal shares cross few borders."""
    siblings = _read_lists(root, "cpu", "topology/thread_siblings_list")  # some containers show neither
    nodes = _read_lists(root, "node", "cpulist")
    home = {cpu: node for node, cpus in sorted(nodes.items(), reverse=True) for cpu in cpus}
    first = {min({cpu, *siblings.get(cpu, ())} & set(allowed)) for cpu in allowed}
    return sorted(first, key=lambda cpu: (home.get(cpu, 0), cpu))


def share_cores(cores: Sequence[int], ranks: int) -> list[tuple[int, ...]]:
    """Give each rank equally many neighbouring cores. Raises UsageError (an AssertionError) for fewer than ranks."""
    each = len(cores) // ranks
    if each == 0:
        what = "start fewer ranks, list more cores, or do not bind"
        raise UsageError(f"{ranks} ranks cannot be bound to {len(cores)} core(s); {what}")
    return [tuple(cores[rank * each : (rank + 1) * each]) for rank in range(ranks)]


def plan_cores(
    job: Job, ranks: int, *, root: str = SYSFS, allowed: Collection[int] | None = None
) -> list[tuple[int, ...]]:
    """Cores of the ``ranks`` ranks on this node; empty ones when ``job`` does not ask for binding.

    ``allowed`` are the CPUs this process may use (default: ask the kernel). Raises DeepSpeedConfigError (a ValueError)
    for a malformed list or KMP_AFFINITY; UsageError for CPUs that are not allowed, or too few of them.
    """
    if not job.bind_cores and job.core_list is None:
        return [()] * ranks
    if "KMP_AFFINITY" in os.environ:
        what = "unset it, or do not use --bind_cores_to_rank"
        raise DeepSpeedConfigError(f"KMP_AFFINITY binds threads in its own way; {what}")
    permitted = os.sched_getaffinity(0) if allowed is None else set(allowed)
    cores = usable_cores(permitted, root) if job.core_list is None else parse_core_list(job.core_list)
    if outside := [core for core in cores if core not in permitted]:
        what = f"core(s) {outside} do not exist here or are not this process's to use"
        raise UsageError(f"--bind_core_list {job.core_list}: {what}")
    return share_cores(cores, ranks)
