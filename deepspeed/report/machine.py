"""The machine: processor, cores, memory and limits, from the system's files (``root`` is another tree in tests)."""

import math
import os
import platform
import re
from pathlib import Path

from deepspeed.observe import hostmem
from deepspeed.report.rows import Row, Section, gather, size

ROOT = Path("/")
ISA = "avx2 fma f16c avx512f avx512bw avx512_bf16 avx512_fp16 amx_tile amx_bf16 asimd asimdhp sve sve2"
LEAST_SHM = 1 << 30
_NO_AVX2 = "Optimizer steps on host memory run several times slower without AVX2; use another machine for offloading."
_FEW_CORES = (
    "Ranks and data workers share only these cores: start no more threads than that (OMP_NUM_THREADS), or ask the "
    "scheduler for more."
)
_LIMITED = "The process is killed beyond this, whatever the machine has; count offloaded states against it."
_SMALL_SHM = (
    "DataLoader workers and NCCL pass data through it and die with 'Bus error' when it is full; start the container "
    "with --shm-size=8g or --ipc=host, or use num_workers=0."
)
# name of the row, limit, least value without a doubt, how it is shown, doubt
_LIMITS = (
    (
        "locked memory (ulimit -l)",
        "RLIMIT_MEMLOCK",
        1 << 30,
        size,
        "Page-locked buffers of RDMA networks and of asynchronous file IO fail beyond it; raise it (ulimit -l "
        "unlimited, docker --ulimit).",
    ),
    (
        "open files (ulimit -n)",
        "RLIMIT_NOFILE",
        4096,
        str,
        "Many ranks, data workers and checkpoint shards need more open files; raise it with ulimit -n 65536.",
    ),
)


def _cpuinfo(root: Path) -> dict[str, list[str]]:
    """Field -> its value for every core."""
    fields: dict[str, list[str]] = {}
    for line in (root / "proc/cpuinfo").read_text().splitlines():
        name, colon, value = line.partition(":")
        if colon:
            fields.setdefault(name.strip(), []).append(value.strip())
    return fields


def _processor(root: Path) -> tuple[str, list[str]]:
    """Model and instruction set flags; py-cpuinfo takes a second, so it is asked only where /proc has no answer."""
    fields = _cpuinfo(root) if (root / "proc/cpuinfo").exists() else {}
    flags = [*fields.get("flags", []), *fields.get("Features", [])]
    if flags:
        return fields.get("model name", [platform.machine()])[0], flags[0].split()
    import cpuinfo  # noqa: PLC0415 - see above

    facts = cpuinfo.get_cpu_info()
    return str(facts.get("brand_raw", platform.machine())), list(facts.get("flags", []))


def cpu_rows(root: Path = ROOT) -> list[Row]:
    """Model and the vector instructions that matter here."""
    model, flags = _processor(root)
    vector = " ".join(flag for flag in ISA.split() if flag in flags)
    x86 = platform.machine() in ("x86_64", "AMD64") or "sse2" in flags
    doubt = _NO_AVX2 if x86 and "avx2" not in flags else ""
    return [Row("CPU", model), Row("vector instructions", vector or "none known", doubt)]


def socket_row(root: Path = ROOT) -> Row:
    """Sockets and NUMA nodes."""
    sockets = len(set(_cpuinfo(root).get("physical id", []))) or "unknown"
    nodes = len(list((root / "sys/devices/system/node").glob("node[0-9]*"))) or "unknown"
    return Row("sockets, NUMA nodes", f"{sockets}, {nodes}")


def cpu_quota(root: Path = ROOT) -> float | None:
    """Cores' worth of time that the control group allows (second kind only); None without a limit."""
    files = [folder / "cpu.max" for folder, first in hostmem.groups(root, "cpu") if not first]
    allowed = [file.read_text().split() for file in files if file.is_file()]
    return min((int(fields[0]) / int(fields[1]) for fields in allowed if fields[0] != "max"), default=None)


def cores_row(root: Path = ROOT) -> Row:
    """Cores this process may use, and the machine's."""
    whole = os.cpu_count() or 1
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else whole
    quota = cpu_quota(root) if (root / "proc/self/cgroup").exists() else None
    limit = "" if quota is None else f", time for {quota:g} (control group)"
    few = (quota is not None and quota < mine) or mine < whole
    return Row("cores", f"{mine} of the machine's {whole}{limit}", _FEW_CORES if few else "")


def memory_rows(root: Path = ROOT) -> list[Row]:
    """Memory of the machine, and the control group's limit."""
    total = hostmem.host_total_bytes()
    rows = [Row("memory", f"{size(total)}, available {size(hostmem.host_available_bytes())}")]
    if (root / "proc/self/cgroup").exists():
        limit = min((group.limit for group in hostmem.memory_groups(root)), default=math.inf)
        text, doubt = "none" if limit == math.inf else size(limit), _LIMITED if limit < total else ""
        rows.append(Row("memory limit (control group)", text, doubt))
    return rows


def shm_row(path: str = "/dev/shm") -> Row:
    """Shared memory, through which data workers and ranks on one machine hand over tensors."""
    if not os.path.isdir(path):
        return Row(path, "not there")
    stat = os.statvfs(path)
    total, free = stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize
    return Row(path, f"{size(total)}, free {size(free)}", _SMALL_SHM if min(total, free) < LEAST_SHM else "")


def limit_rows() -> list[Row]:
    """Limits of this process (ulimit)."""
    import resource  # noqa: PLC0415 - not on Windows

    rows = []
    for name, limit, least, shown, doubt in _LIMITS:
        value = resource.getrlimit(getattr(resource, limit))[0]
        rows.append(Row(name, "unlimited" if value < 0 else shown(value), doubt if 0 <= value < least else ""))
    return rows


def section() -> Section:
    """The machine."""
    return gather(
        "platform",
        {
            "system": lambda: Row("system", re.sub(r"\s+", " ", platform.platform())),
            "CPU": cpu_rows,
            "sockets, NUMA nodes": socket_row,
            "cores": cores_row,
            "memory": memory_rows,
            "/dev/shm": shm_row,
            "limits": limit_rows,
        },
    )
