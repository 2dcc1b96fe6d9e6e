"""What the report asks: the installation, environment and torch, and the machine's files below ``root``."""

import glob
import importlib
import importlib.metadata
import json
import math
import os
import platform
import re
import resource
import subprocess
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from deepspeed.accelerator.native import builders, compiler
from deepspeed.errors import BuildError, DeepSpeedConfigError
from deepspeed.monitor.program import size
from deepspeed.version import __version__

ROOT = Path("/")
ISA = "avx2 fma f16c avx512f avx512bw avx512_bf16 avx512_fp16 amx_tile amx_bf16 asimd asimdhp sve sve2"
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
# package: (first version that works, first that is untried); empty: any
REQUIRED = {
    **{"torch": ("2.11", "2.16"), "pydantic": ("2", "3")},
    **dict.fromkeys(("numpy", "py-cpuinfo", "psutil", "ninja", "hjson", "tqdm", "safetensors"), ("", "")),
}
OPTIONAL = {
    "transformers": "its models and Trainer run on this package",
    "accelerate": "its Accelerator runs on this package",
    "peft": "its adapters train under every stage",
    "lightning": "its DeepSpeedStrategy runs on this package",
    "trl": "its trainers run on this package",
    "tensorboard": "writes metrics as TensorBoard event files",
    "wandb": "sends metrics to Weights & Biases",
    "comet_ml": "sends metrics to Comet",
    "matplotlib": "draws the figures of ds_report run, and plots in the examples",
    "mpi4py": "not needed: ranks started by MPI are recognised without it",
}
LAUNCH_TOOLS = {
    "ssh": "starts ranks on other machines (launcher ssh, ds_ssh)",
    "pdsh": "starts ranks on many machines (launcher pdsh)",
    "mpirun": "starts ranks through MPI (launchers openmpi, mpich, impi)",
    "srun": "starts ranks in a Slurm job (launcher slurm)",
}
TOOL_LIMIT_S = 1.0
_PREFIXES = (
    "DS_ DEEPSPEED_ NCCL_ TORCH_NCCL_ GLOO_ TORCHELASTIC_ OMP_ KMP_ PYTORCH_ MASTER_ CROSS_ OMPI_COMM_WORLD_ "
    "MV2_COMM_WORLD_ MPI_LOCAL PMI_ PALS_ UCX_ FI_ MALLOC_ SM_HOSTS AZ_BATCH SLURM_STEP SLURM_JOB_"
)
_NAMES = (
    "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE LOCAL_SIZE GROUP_RANK MKL_NUM_THREADS CUDA_VISIBLE_DEVICES "
    "CUDA_DEVICE_ORDER CUDA_LAUNCH_BLOCKING CUDA_HOME HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES ZE_AFFINITY_MASK "
    "ASCEND_RT_VISIBLE_DEVICES CXX SLURM_PROCID SLURM_LOCALID PMIX_RANK PMIX_NAMESPACE AZUREML_EXPERIMENT_ID "
    "GLIBC_TUNABLES LD_PRELOAD TORCH_DISTRIBUTED_DEBUG"
)
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH|COOKIE", re.IGNORECASE)
_LOGIN = re.compile(r"(\w://)[^/@\s]+@")
_OF_RANKS = {"RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"}  # a process that has one is one of several
_THREADS = (
    "Without it every rank starts as many threads as there are cores, and ranks on one machine slow each other down; "
    "the deepspeed launcher and torchrun set it, but with srun, mpirun or plain python set it to cores / ranks."
)


class Row(NamedTuple):
    """Fact of the report. ``doubt``: one sentence or two when the value is missing or doubtful, else empty."""

    name: str
    value: str
    doubt: str = ""


def first_line(error: BaseException) -> str:
    """Return class and first line of ``error``, for one row of a table."""
    line = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def numbers(version: str) -> tuple[int, ...]:
    """Return major and minor of a version: ``"2.13.0+cpu"`` -> ``(2, 13)``."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def range_doubt(name: str, version: str) -> str:
    """Return the doubt about ``version`` of a required package; empty when it is in the tested range."""
    first, beyond = REQUIRED[name]
    if first and numbers(version) < numbers(first):
        return f"{name} {version} is too old: at least {first} is needed; upgrade it."
    if beyond and numbers(version) >= numbers(beyond):
        return f"{name} {version} is untried: versions below {beyond} are tested; if something fails, try one of those."
    return ""


def installed(name: str) -> str | None:
    """Return the version of a package, None where it is missing."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def package_row() -> Row:
    """Report this package: version, folder, and whether an installation of another version is in the way."""
    folder = str(Path(__file__).resolve().parents[2])
    version = installed("deepspeed")
    if version is None:
        return Row("deepspeed", f"{__version__}, from the source tree {folder} (not installed)")
    direct = json.loads(importlib.metadata.distribution("deepspeed").read_text("direct_url.json") or "{}")
    how = "installed editable" if direct.get("dir_info", {}).get("editable") else "installed"
    doubt = f"{version} is installed as well; uninstall deepspeed until none is left, then install once."
    return Row("deepspeed", f"{__version__}, {how}, {folder}", doubt if version != __version__ else "")


def load_torch() -> tuple[ModuleType | None, str]:
    """Import torch; return it, or None and the reason why it cannot be imported."""
    try:
        return importlib.import_module("torch"), ""
    except Exception as error:  # a broken binary raises OSError, AttributeError, ...
        return None, first_line(error)


def torch_rows(torch: ModuleType | None, reason: str) -> list[Row]:
    """Report torch's version (from its package data where it cannot be imported), and what it was built for."""
    if torch is None:
        doubt = f"Importing torch fails ({reason}); reinstall a build that fits this machine and driver."
        return [Row("torch", f"{installed('torch') or 'not installed'}, cannot be imported: {reason}", doubt)]
    version, versions = str(torch.__version__), getattr(torch, "version", None)
    built = [f"{name} {value}" for name in ("cuda", "hip", "xpu") if (value := getattr(versions, name, None))]
    return [
        Row("torch", f"{version}, {Path(str(torch.__file__)).parent}", range_doubt("torch", version)),
        Row("torch built for", ", ".join(built) or "the CPU"),
    ]


def required_rows() -> list[Row]:
    """Report Python and the required packages except torch."""
    rows = [Row("Python", f"{platform.python_version()}, {sys.executable}")]
    for name in [name for name in REQUIRED if name != "torch"]:
        version, missing = installed(name), f"{name} is a requirement of this package; install it."
        rows.append(Row(name, version or "missing", range_doubt(name, version) if version else missing))
    return rows


def _version(path: str, pattern: str = "(.+)") -> str:
    """Return the match of ``pattern`` in the program's text about its version, or the first line of the text."""
    options: dict[str, Any] = dict(capture_output=True, text=True, timeout=TOOL_LIMIT_S, stdin=subprocess.DEVNULL)
    done = subprocess.run([path, "--version"], **options)
    text = (done.stdout or done.stderr).strip()
    match = re.search(pattern, text)
    return match[1] if match else text.partition("\n")[0]


def compiler_row() -> Row:
    """Report the C++ compiler that builds take."""
    try:
        path = compiler.locate("cpp")[0]
    except BuildError as error:
        return Row("C++ compiler", "none", f"torch.compile and native kernels need one: {error}.")
    return Row("C++ compiler", f"{_version(path)}, {path}")


def ninja_row() -> Row:
    """Report the program that runs the compilers."""
    if path := compiler.find_ninja():
        return Row("ninja program", f"{_version(path)}, {path}")
    doubt = "The Python package ninja brings the program that compiles native kernels side by side; install it."
    return Row("ninja program", "none", doubt)


def cuda_rows(built_for: str | None) -> list[Row]:
    """Report nvcc and CUDA_HOME; ``built_for`` is torch's CUDA version, None for builds that need neither."""
    cuda_home = Row("CUDA_HOME", os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "not set")
    try:
        nvcc = compiler.locate("cuda")[0]
    except BuildError:
        return [cuda_home, Row("nvcc", "none: only needed to build CUDA kernels")]
    version = _version(nvcc, r"release ([\d.]+)")
    wrong = f"nvcc {version} does not fit torch, built for CUDA {built_for}: CUDA kernels will not build"
    fits = not built_for or numbers(version)[:1] == numbers(built_for)[:1]
    return [cuda_home, Row("nvcc", f"{version}, {nvcc}", "" if fits else f"{wrong}; set CUDA_HOME to {built_for}.")]


def operator_rows() -> list[Row]:
    """Report native operators: built, built on first use, or what runs instead and why."""
    states = builders.states(limit_s=TOOL_LIMIT_S)
    return [Row(name, f"{state.word}: {state.detail}") for name, state in states.items()]


def variable_rows(env: Mapping[str, str]) -> list[Row]:
    """Report variables of ``env`` that change behaviour, without what looks like a secret or a login in an address."""
    threads = env.get("OMP_NUM_THREADS")
    doubt = "" if threads or not env.keys() & _OF_RANKS else _THREADS
    return [Row("OMP_NUM_THREADS", threads or "not set", doubt)] + [
        Row(name, "(hidden)" if _SECRET.search(name) else _LOGIN.sub(r"\1(hidden)@", env[name]))
        for name in sorted(env)
        if (name in _NAMES.split() or name.startswith(tuple(_PREFIXES.split()))) and name != "OMP_NUM_THREADS"
    ]


def identity_row(env: Mapping[str, str]) -> Row:
    """Report the rank that a script started from here would take."""
    from deepspeed.client.comm.discovery import discover  # noqa: PLC0415 - its package imports torch, which may fail

    try:
        process = discover(env)
    except DeepSpeedConfigError as error:
        return Row("this process", "contradictory", f"{str(error)[:1].upper()}{str(error)[1:]}.")
    if process.world_size == 1:
        return Row("this process", "alone (rank 0 of 1)")
    where = f"local rank {process.local_rank}, meeting at {process.address}:{process.port}"
    return Row("this process", f"rank {process.rank} of {process.world_size}, {where}")


def cpu_rows(root: Path = ROOT) -> list[Row]:
    """Report CPU model, the vector instructions that matter here, sockets and NUMA nodes."""
    fields: dict[str, list[str]] = {}  # the value of every core
    for line in (root / "proc/cpuinfo").read_text().splitlines():
        name, colon, value = line.partition(":")
        if colon:
            fields.setdefault(name.strip(), []).append(value.strip())
    flags = [*fields.get("flags", []), *fields.get("Features", []), ""][0].split()
    vector = " ".join(flag for flag in ISA.split() if flag in flags)
    x86 = platform.machine() in ("x86_64", "AMD64") or "sse2" in flags
    nodes = len(list((root / "sys/devices/system/node").glob("node[0-9]*")))
    model = fields.get("model name", [""])[0]
    if not model:  # the kernel does not list it (Arm)
        import cpuinfo  # noqa: PLC0415 - its import alone is slow

        model = str(cpuinfo.get_cpu_info().get("brand_raw", platform.machine()))
    return [
        Row("CPU", model),
        Row("vector instructions", vector or "none known", _NO_AVX2 if x86 and "avx2" not in flags else ""),
        Row("sockets, NUMA nodes", f"{len(set(fields.get('physical id', []))) or 'unknown'}, {nodes or 'unknown'}"),
    ]


def cpu_quota(root: Path = ROOT) -> float | None:
    """Return the cores' worth of time that the control group allows (cgroup v2 only); None without a limit."""
    from deepspeed.monitor import hostmem  # noqa: PLC0415 - needs psutil, whose absence is a row and not the end

    files = [folder / "cpu.max" for folder, first in hostmem.groups(root, "cpu") if not first]
    allowed = [file.read_text().split() for file in files if file.is_file()]
    return min((int(fields[0]) / int(fields[1]) for fields in allowed if fields[0] != "max"), default=None)


def cores_row(root: Path = ROOT) -> Row:
    """Report the cores this process may use, and the machine's."""
    whole, usable = os.cpu_count() or 1, len(os.sched_getaffinity(0))
    quota = cpu_quota(root)
    limit = "" if quota is None else f", time for {quota:g} (control group)"
    few = (quota is not None and quota < usable) or usable < whole
    return Row("cores", f"{usable} of the machine's {whole}{limit}", _FEW_CORES if few else "")


def memory_rows(root: Path = ROOT) -> list[Row]:
    """Report the memory of the machine, and the control group's limit."""
    from deepspeed.monitor import hostmem  # noqa: PLC0415 - needs psutil, whose absence is a row and not the end

    total = hostmem.host_total_bytes()
    limit = min((group.limit for group in hostmem.memory_groups(root)), default=math.inf)
    text, doubt = "none" if limit == math.inf else size(limit), _LIMITED if limit < total else ""
    machine = Row("memory", f"{size(total)}, available {size(hostmem.host_available_bytes())}")
    return [machine, Row("memory limit (control group)", text, doubt)]


def shm_row(path: str = "/dev/shm") -> Row:
    """Report shared memory, through which data workers and ranks on one machine hand over tensors."""
    if not os.path.isdir(path):
        return Row(path, "not there")
    stat = os.statvfs(path)
    total, free = stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize
    return Row(path, f"{size(total)}, free {size(free)}", _SMALL_SHM if min(total, free) < 2**30 else "")


def limit_rows() -> list[Row]:
    """Report the limits of this process (ulimit)."""
    locked, files = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_MEMLOCK, resource.RLIMIT_NOFILE))
    shown = ["unlimited" if value < 0 else text(value) for value, text in ((locked, size), (files, str))]
    return [
        Row("locked memory (ulimit -l)", shown[0], _MEMLOCK if 0 <= locked < 2**30 else ""),
        Row("open files (ulimit -n)", shown[1], _FILES if 0 <= files < 4096 else ""),
    ]


def device_rows(torch: ModuleType) -> list[Row]:
    """Report type, number, names and memory of the devices; ``none`` where ranks run on the CPU."""
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
    """Return why a machine with a device, or a torch built for a device, runs on the CPU; empty when both agree."""
    for name in ("cuda", "hip"):
        if version := getattr(torch.version, name, None):
            visible = [key for key in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES") if key in os.environ]
            reasons += [f"{key}={os.environ[key]!r}" for key in visible]
            why = "; ".join(reasons) or "the driver is missing, older than torch's, or not passed into the container"
            built = f"torch is built for {name.upper()} {version} but can use no device"
            return f"{built}: {why}. Training will be slow on the CPU."
    if seen := ", ".join(name for pattern, name in _DEVICE_FILES.items() if glob.glob(pattern)):
        return f"This machine has a device ({seen}) but torch is a CPU build; install a torch that is built for it."
    return ""


def nccl_row(torch: ModuleType) -> Row:
    """Report the version of NCCL (RCCL on ROCm)."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None or device.type != "cuda":
        return Row("NCCL", "not used without a CUDA or ROCm device")
    return Row("NCCL", ".".join(map(str, torch.get_device_module("cuda").nccl.version())))


def backends_row() -> Row:
    """Report the backends of torch.distributed."""
    from deepspeed.comm.init import available_backends  # noqa: PLC0415 - imports torch, which may fail

    names = " ".join(available_backends())
    doubt = "This torch has no torch.distributed: only one process can train; install a build that has it."
    return Row("backends", names or "none", "" if names else doubt)
