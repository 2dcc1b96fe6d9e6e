"""The machine: processor, memory, limits and accelerators, from the system's files (``root`` is another tree in tests)
and from torch.
"""

import glob
import math
import os
import platform
import re
import resource
import warnings
from pathlib import Path
from types import ModuleType

from deepspeed.report.rows import Row, size

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
_MEMLOCK = (
    "Page-locked buffers of RDMA networks and of asynchronous file IO fail beyond it; raise it (ulimit -l unlimited, "
    "docker --ulimit)."
)
_FILES = "Many ranks, data workers and checkpoint shards need more open files; raise it with ulimit -n 65536."
_DEVICE_FILES = {"/dev/nvidia[0-9]*": "NVIDIA", "/dev/kfd": "AMD", "/dev/accel/accel[0-9]*": "accelerator"}
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


def system_row() -> Row:
    """Kernel, architecture and C library."""
    return Row("system", re.sub(r"\s+", " ", platform.platform()))


def _brand() -> str:
    """The processor's name where the kernel does not list it (Arm); a second's work."""
    import cpuinfo  # noqa: PLC0415 - its import alone is slow

    return str(cpuinfo.get_cpu_info().get("brand_raw", platform.machine()))


def cpu_rows(root: Path = ROOT) -> list[Row]:
    """Model, the vector instructions that matter here, sockets and NUMA nodes."""
    fields: dict[str, list[str]] = {}  # the value of every core
    for line in (root / "proc/cpuinfo").read_text().splitlines():
        name, colon, value = line.partition(":")
        if colon:
            fields.setdefault(name.strip(), []).append(value.strip())
    flags = [*fields.get("flags", []), *fields.get("Features", []), ""][0].split()
    vector = " ".join(flag for flag in ISA.split() if flag in flags)
    x86 = platform.machine() in ("x86_64", "AMD64") or "sse2" in flags
    nodes = len(list((root / "sys/devices/system/node").glob("node[0-9]*")))
    model = fields.get("model name", [""])[0] or _brand()
    return [
        Row("CPU", model),
        Row("vector instructions", vector or "none known", _NO_AVX2 if x86 and "avx2" not in flags else ""),
        Row("sockets, NUMA nodes", f"{len(set(fields.get('physical id', []))) or 'unknown'}, {nodes or 'unknown'}"),
    ]


def cpu_quota(root: Path = ROOT) -> float | None:
    """Cores' worth of time that the control group allows (second kind only); None without a limit."""
    from deepspeed.observe import hostmem  # noqa: PLC0415 - needs psutil, whose absence is a row and not the end

    files = [folder / "cpu.max" for folder, first in hostmem.groups(root, "cpu") if not first]
    allowed = [file.read_text().split() for file in files if file.is_file()]
    return min((int(fields[0]) / int(fields[1]) for fields in allowed if fields[0] != "max"), default=None)


def cores_row(root: Path = ROOT) -> Row:
    """Cores this process may use, and the machine's."""
    whole, mine = os.cpu_count() or 1, len(os.sched_getaffinity(0))
    quota = cpu_quota(root) if (root / "proc/self/cgroup").exists() else None
    limit = "" if quota is None else f", time for {quota:g} (control group)"
    few = (quota is not None and quota < mine) or mine < whole
    return Row("cores", f"{mine} of the machine's {whole}{limit}", _FEW_CORES if few else "")


def memory_rows(root: Path = ROOT) -> list[Row]:
    """Memory of the machine, and the control group's limit."""
    from deepspeed.observe import hostmem  # noqa: PLC0415 - needs psutil, whose absence is a row and not the end

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
    locked, files = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_MEMLOCK, resource.RLIMIT_NOFILE))
    shown = ["unlimited" if value < 0 else text(value) for value, text in ((locked, size), (files, str))]
    return [
        Row("locked memory (ulimit -l)", shown[0], _MEMLOCK if 0 <= locked < 1 << 30 else ""),
        Row("open files (ulimit -n)", shown[1], _FILES if 0 <= files < 4096 else ""),
    ]


def device_rows(torch: ModuleType) -> list[Row]:
    """Type, number, names and memory of the devices; ``none`` where ranks run on the CPU."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        device = torch.accelerator.current_accelerator(check_available=True)
        if device is None:
            reasons = [str(warning.message).partition("\n")[0] for warning in warned]
            return [Row("accelerator", "none: ranks run on the CPU and talk through gloo", _why_none(torch, reasons))]
        module, count = torch.get_device_module(device.type), int(torch.accelerator.device_count())
        rows = [Row("accelerator", f"{device.type}, {count} visible")]
        for index in range(count) if hasattr(module, "get_device_properties") else ():
            properties = module.get_device_properties(index)
            parts = [properties.name, size(properties.total_memory)]
            if hasattr(properties, "major"):
                parts.append(f"compute capability {properties.major}.{properties.minor}")
            rows.append(Row(f"{device.type}:{index}", ", ".join(parts)))
    return rows


def _why_none(torch: ModuleType, reasons: list[str]) -> str:
    """Why a machine that has a device, or a torch that was built for one, runs on the CPU; empty when both agree."""
    for name in ("cuda", "hip"):
        if version := getattr(torch.version, name, None):
            reasons += [f"{variable}={os.environ[variable]!r}" for variable in _VISIBLE if variable in os.environ]
            why = "; ".join(reasons) or "the driver is missing, older than torch's, or not passed into the container"
            built = f"torch is built for {name.upper()} {version} but can use no device"
            return f"{built}: {why}. Training will be slow on the CPU."
    if seen := ", ".join(name for pattern, name in _DEVICE_FILES.items() if glob.glob(pattern)):
        return f"This machine has a device ({seen}) but torch is a CPU build; install a torch that is built for it."
    return ""


def nccl_row(torch: ModuleType) -> Row:
    """Version of NCCL (RCCL on ROCm)."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None or device.type != "cuda":
        return Row("NCCL", "not used without a CUDA or ROCm device")
    return Row("NCCL", ".".join(map(str, torch.get_device_module("cuda").nccl.version())))


def backends_row() -> Row:
    """Backends of torch.distributed."""
    from deepspeed.comm.init import available_backends  # noqa: PLC0415 - imports torch, which may fail

    names = " ".join(available_backends())
    doubt = "This torch has no torch.distributed: only one process can train; install a build that has it."
    return Row("backends", names or "none", "" if names else doubt)
