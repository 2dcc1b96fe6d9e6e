"""The installation: versions and their supported ranges, operators, optional packages, launch and build tools, and the
environment variables that change what a run does.
"""

import importlib
import importlib.metadata
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.native import builders, compiler
from deepspeed.report.rows import Row, first_line
from deepspeed.version import __version__

# package: (first version that works, first that is untried); empty: any
REQUIRED = {
    **{"torch": ("2.11", "2.14"), "pydantic": ("2", "3")},
    **dict.fromkeys(("numpy", "py-cpuinfo", "psutil", "ninja", "hjson", "tqdm", "safetensors"), ("", "")),
}
OPTIONAL = {
    "transformers": "its models and Trainer run on this package",
    "accelerate": "its Accelerator runs on this package",
    "tensorboard": "writes metrics as TensorBoard event files",
    "wandb": "sends metrics to Weights & Biases",
    "comet_ml": "sends metrics to Comet",
    "matplotlib": "plots in the examples",
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
_THREADS = (
    "Without it every rank starts as many threads as there are cores, and ranks on one machine slow each other down; "
    "the deepspeed launcher and torchrun set it, but with srun, mpirun or plain python set it to cores / ranks."
)


def numbers(version: str) -> tuple[int, ...]:
    """Major and minor of a version: ``"2.13.0+cpu"`` -> ``(2, 13)``."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def range_doubt(name: str, version: str) -> str:
    """What is doubtful about ``version`` of a required package; empty when it is in the tested range."""
    first, beyond = REQUIRED[name]
    if first and numbers(version) < numbers(first):
        return f"{name} {version} is too old: at least {first} is needed; upgrade it."
    if beyond and numbers(version) >= numbers(beyond):
        return f"{name} {version} is untried: versions below {beyond} are tested; if something fails, try one of those."
    return ""


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def package_row() -> Row:
    """This package: version, folder, and whether an installation of another version is in the way."""
    folder = str(Path(__file__).resolve().parents[1])
    try:
        installed = importlib.metadata.distribution("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        return Row("deepspeed", f"{__version__}, from the source tree {folder} (not installed)")
    direct = json.loads(installed.read_text("direct_url.json") or "{}")
    how = "installed editable" if direct.get("dir_info", {}).get("editable") else "installed"
    doubt = f"{installed.version} is installed as well; uninstall deepspeed until none is left, then install once."
    return Row("deepspeed", f"{__version__}, {how}, {folder}", doubt if installed.version != __version__ else "")


def load_torch() -> tuple[ModuleType | None, str]:
    """torch, or None and the reason why it cannot be imported."""
    try:
        return importlib.import_module("torch"), ""
    except Exception as error:  # a broken binary raises OSError, AttributeError, ...
        return None, first_line(error)


def torch_rows(torch: ModuleType | None, reason: str) -> list[Row]:
    """Version of torch, from its package data where it cannot be imported, and what it was built for."""
    if torch is None:
        doubt = f"Importing torch fails ({reason}); reinstall a build that fits this machine and driver."
        return [Row("torch", f"{_installed('torch') or 'not installed'}, cannot be imported: {reason}", doubt)]
    version, versions = str(torch.__version__), getattr(torch, "version", None)
    built = [f"{name} {value}" for name in ("cuda", "hip", "xpu") if (value := getattr(versions, name, None))]
    return [
        Row("torch", f"{version}, {Path(str(torch.__file__)).parent}", range_doubt("torch", version)),
        Row("torch built for", ", ".join(built) or "the CPU"),
    ]


def required_rows() -> list[Row]:
    """Python and the required packages, torch apart."""
    rows = [Row("Python", f"{platform.python_version()}, {sys.executable}")]
    for name in [name for name in REQUIRED if name != "torch"]:
        version, missing = _installed(name), f"{name} is a requirement of this package; install it."
        rows.append(Row(name, version or "missing", range_doubt(name, version) if version else missing))
    return rows


def operator_rows() -> list[Row]:
    """Native operators: built, built on first use, or what runs instead and why."""
    states = builders.states(limit_s=TOOL_LIMIT_S)
    return [Row(name, f"{state.word}: {state.detail}") for name, state in states.items()]


def optional_rows() -> list[Row]:
    """Optional packages and what each enables."""
    return [Row(name, f"{_installed(name) or 'missing'}: {use}") for name, use in OPTIONAL.items()]


def launch_rows() -> list[Row]:
    """Programs that start ranks on several machines."""
    return [Row(name, f"{shutil.which(name) or 'not on PATH'}: {use}") for name, use in LAUNCH_TOOLS.items()]


def _says(command: list[str], pattern: str) -> str:
    """What ``pattern`` matches in the output of ``command``, or the output's first line."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_LIMIT_S, stdin=subprocess.DEVNULL)
    match = re.search(pattern, done.stdout)
    return match.group(1) if match else (done.stdout or done.stderr).strip().partition("\n")[0]


def compiler_row() -> Row:
    """The C++ compiler."""
    wanted = shlex.split(os.environ.get("CXX", "")) or ["c++"]
    path = shutil.which(wanted[0]) or shutil.which("g++") or shutil.which("clang++")
    if path is None:
        doubt = "torch.compile and native kernels need one; install g++ (10 or newer) or set CXX."
        return Row("C++ compiler", "none", doubt)
    return Row("C++ compiler", f"{_says([path, '--version'], r'^(.+)')}, {path}")


def ninja_row() -> Row:
    """The program that runs the compilers."""
    path = compiler.find_ninja()
    if path is None:
        doubt = "The Python package ninja brings the program that compiles native kernels side by side; install it."
        return Row("ninja program", "none", doubt)
    return Row("ninja program", f"{_says([path, '--version'], r'^(.+)')}, {path}")


def cuda_rows(built_for: str | None) -> list[Row]:
    """nvcc and CUDA_HOME; ``built_for`` is the CUDA version of torch, None for builds that need neither."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = shutil.which("nvcc") or (shutil.which(os.path.join(home, "bin", "nvcc")) if home else None)
    rows = [Row("CUDA_HOME", home or "not set")]
    if nvcc is None:
        return [*rows, Row("nvcc", "none: only needed to build CUDA kernels")]
    version = _says([nvcc, "--version"], r"release ([\d.]+)")
    wrong = f"nvcc {version} does not fit torch, built for CUDA {built_for}: CUDA kernels will not build"
    fits = not built_for or numbers(version)[:1] == numbers(built_for)[:1]
    return [*rows, Row("nvcc", f"{version}, {nvcc}", "" if fits else f"{wrong}; set CUDA_HOME to {built_for}.")]


def variable_rows(env: Mapping[str, str]) -> list[Row]:
    """The variables of ``env`` that change behaviour, without what looks like a secret or a login in an address. A rank
    that is started by hand must have OMP_NUM_THREADS.
    """
    threads = env.get("OMP_NUM_THREADS")
    return [Row("OMP_NUM_THREADS", threads or "not set", "" if threads else _THREADS)] + [
        Row(name, "(hidden)" if _SECRET.search(name) else _LOGIN.sub(r"\1(hidden)@", env[name]))
        for name in sorted(env)
        if (name in _NAMES.split() or name.startswith(tuple(_PREFIXES.split()))) and name != "OMP_NUM_THREADS"
    ]


def identity_row(env: Mapping[str, str]) -> Row:
    """Who a script started from here would take itself for."""
    from deepspeed.comm.discovery import discover  # noqa: PLC0415 - its package imports torch, which may fail

    try:
        process = discover(env)
    except DeepSpeedConfigError as error:
        return Row("this process", "contradictory", f"{str(error)[:1].upper()}{str(error)[1:]}.")
    if process.world_size == 1:
        return Row("this process", "alone (rank 0 of 1)")
    where = f"local rank {process.local_rank}, meeting at {process.address}:{process.port}"
    return Row("this process", f"rank {process.rank} of {process.world_size}, {where}")
