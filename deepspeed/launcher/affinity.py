"""Which CPU cores each rank of a node runs on, and from which memory nodes it allocates.

A *CPU* is what the kernel schedules on; hyperthreads of one physical core are several CPUs. Only the first allowed CPU
of a physical core is handed out, because two ranks or threads on one core slow each other down.
"""

import glob
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from deepspeed.errors import DeepSpeedConfigError, UsageError
from deepspeed.launcher.job import Job

SYSFS = "/sys/devices/system"
_GRAMMAR = "expected ascending numbers or ranges without blanks, as in 0-3,8,10-11"


@dataclass(frozen=True)
class RankCores:
    """CPUs of one rank; ``memory_nodes`` are the NUMA nodes that all of them are local to (empty: no one node is)."""

    cores: tuple[int, ...]
    memory_nodes: tuple[int, ...] = ()


@dataclass(frozen=True)
class CpuTopology:
    """The CPUs of each physical core, and of each NUMA node with memory. Both may be empty."""

    cores: tuple[tuple[int, ...], ...] = ()
    nodes: Mapping[int, tuple[int, ...]] = field(default_factory=dict)


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


def _read_lists(root: str, kind: str, name: str) -> dict[int, tuple[int, ...]]:
    """Number -> CPU list of every ``kind`` below ``root``; what the kernel does not show, or is empty, is left out."""
    lists = {}
    for path in glob.glob(f"{glob.escape(root)}/{kind}/{kind}[0-9]*/{name}"):
        with open(path, encoding="ascii") as file:
            if text := file.read().strip():
                number = path.removeprefix(f"{root}/{kind}/{kind}").partition("/")[0]
                lists[int(number)] = tuple(parse_core_list(text))
    return dict(sorted(lists.items()))


def read_topology(root: str = SYSFS) -> CpuTopology:
    """Read physical cores and NUMA nodes; some containers do not show them."""
    cores = _read_lists(root, "cpu", "topology/thread_siblings_list")
    return CpuTopology(tuple(sorted(set(cores.values()))), _read_lists(root, "node", "cpulist"))


def usable_cores(topology: CpuTopology, allowed: Collection[int]) -> list[int]:
    """The first allowed CPU of every physical core, NUMA node by NUMA node, so that equal shares cross few borders."""
    known = {cpu for core in topology.cores for cpu in core}
    cores = [*topology.cores, *((cpu,) for cpu in allowed if cpu not in known)]
    first = [next((cpu for cpu in core if cpu in allowed), None) for core in cores]
    home = {cpu: node for node, cpus in sorted(topology.nodes.items(), reverse=True) for cpu in cpus}
    return sorted((cpu for cpu in first if cpu is not None), key=lambda cpu: (home.get(cpu, 0), cpu))


def share_cores(cores: Sequence[int], ranks: int, nodes: Mapping[int, Sequence[int]]) -> list[RankCores]:
    """Give each rank equally many neighbouring cores, and memory from the NUMA nodes that all of these are local to.

    Raises UsageError (an AssertionError) when there are fewer cores than ranks.
    """
    each = len(cores) // ranks
    if each == 0:
        what = "start fewer ranks, list more cores, or do not bind"
        raise UsageError(f"{ranks} ranks cannot be bound to {len(cores)} core(s); {what}")
    shares = [tuple(cores[rank * each : (rank + 1) * each]) for rank in range(ranks)]
    return [RankCores(share, tuple(node for node in nodes if set(share) <= set(nodes[node]))) for share in shares]


def plan_cores(
    job: Job,
    ranks: int,
    *,
    root: str = SYSFS,
    allowed: Collection[int] | None = None,
    env: Mapping[str, str] = os.environ,
) -> list[RankCores] | None:
    """Cores of the ``ranks`` ranks on this node; None when ``job`` does not ask for binding.

    ``allowed`` are the CPUs this process may use (default: ask the kernel). Raises DeepSpeedConfigError (a ValueError)
    for a malformed list or KMP_AFFINITY; UsageError for CPUs that are not allowed, or too few of them.
    """
    if not job.bind_cores and job.core_list is None:
        return None
    if "KMP_AFFINITY" in env:
        what = "unset it, or do not use --bind_cores_to_rank"
        raise DeepSpeedConfigError(f"KMP_AFFINITY binds threads in its own way; {what}")
    if not hasattr(os, "sched_getaffinity"):
        raise UsageError("this system cannot bind processes to cores; leave the flags for it out")
    permitted = os.sched_getaffinity(0) if allowed is None else set(allowed)
    topology = read_topology(root)
    cores = usable_cores(topology, permitted) if job.core_list is None else parse_core_list(job.core_list)
    if outside := [core for core in cores if core not in permitted]:
        what = f"core(s) {outside} do not exist here or are not this process's to use"
        raise UsageError(f"--bind_core_list {job.core_list}: {what}")
    return share_cores(cores, ranks, topology.nodes)
