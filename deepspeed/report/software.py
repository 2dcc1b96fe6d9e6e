"""The installation: versions and their supported ranges, operators, optional packages, launch and build tools."""

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
from functools import partial
from pathlib import Path
from types import ModuleType

from deepspeed.native import builders
from deepspeed.report.rows import Probe, Row, Section, first_line, gather
from deepspeed.version import __version__

# package: (first version that works, first that is untried); empty: any
REQUIRED = {
    "torch": ("2.11", "2.14"),
    "numpy": ("", ""),
    "py-cpuinfo": ("", ""),
    "pydantic": ("2", "3"),
    "psutil": ("", ""),
    "ninja": ("", ""),
    "hjson": ("", ""),
    "tqdm": ("", ""),
    "safetensors": ("", ""),
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


def numbers(version: str) -> tuple[int, int]:
    """Major and minor of a version: ``"2.13.0+cpu"`` -> ``(2, 13)``."""
    parts = [*map(int, re.findall(r"\d+", version)), 0, 0]
    return parts[0], parts[1]


def range_doubt(name: str, version: str) -> str:
    """What is doubtful about ``version`` of a required package; empty when it is in the tested range."""
    first, beyond = REQUIRED[name]
    if first and numbers(version) < numbers(first):
        return f"{name} {version} is too old: at least {first} is needed; upgrade it."
    if beyond and numbers(version) >= numbers(beyond):
        return (
            f"{name} {version} is untried: versions below {beyond} are tested; if something fails, try one of "
            "those first."
        )
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
    doubt = (
        f"Python imports {__version__} from {folder}, but the installed distribution is {installed.version}: two "
        "installations or a stale one; uninstall deepspeed until none is left, then install once."
    )
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
        doubt = (
            f"Nothing works without torch, and importing it fails ({reason}); reinstall a build that fits this machine "
            "and driver."
        )
        return [Row("torch", f"{_installed('torch') or 'not installed'}, cannot be imported: {reason}", doubt)]
    version, versions = str(torch.__version__), getattr(torch, "version", None)
    built = [f"{name} {value}" for name in ("cuda", "hip", "xpu") if (value := getattr(versions, name, None))]
    return [
        Row("torch", f"{version}, {Path(str(torch.__file__)).parent}", range_doubt("torch", version)),
        Row("torch built for", ", ".join(built) or "the CPU"),
    ]


def _dependency_row(name: str) -> Row:
    if (version := _installed(name)) is None:
        return Row(name, "missing", f"{name} is a requirement of this package; install it.")
    return Row(name, version, range_doubt(name, version))


def versions_section(torch: ModuleType | None, reason: str) -> Section:
    """This package and what it stands on."""
    probes: dict[str, Probe] = {
        "deepspeed": package_row,
        "Python": lambda: Row("Python", f"{platform.python_version()}, {sys.executable}"),
        "torch": lambda: torch_rows(torch, reason),
    }
    others = {name: partial(_dependency_row, name) for name in REQUIRED if name != "torch"}
    return gather("versions", {**probes, **others})


def operators_section() -> Section:
    """Native operators: built, built on first use, or what runs instead and why."""

    def rows() -> list[Row]:
        states = builders.states(limit_s=TOOL_LIMIT_S)
        return [Row(name, f"{state.word}: {state.detail}") for name, state in states.items()]

    return gather("operators", {"operators": rows})


def optional_section() -> Section:
    """Optional packages and what each enables."""
    rows = [Row(name, f"{_installed(name) or 'missing'}: {use}") for name, use in OPTIONAL.items()]
    return Section("optional packages", tuple(rows))


def launch_section() -> Section:
    """Programs that start ranks on several machines."""
    rows = [Row(name, f"{shutil.which(name) or 'not on PATH'}: {use}") for name, use in LAUNCH_TOOLS.items()]
    return Section("launch tools", tuple(rows))


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


def cuda_rows(built_for: str | None) -> list[Row]:
    """nvcc and CUDA_HOME; ``built_for`` is the CUDA version of torch, None for builds that need neither."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = shutil.which("nvcc") or (shutil.which(os.path.join(home, "bin", "nvcc")) if home else None)
    rows = [Row("CUDA_HOME", home or "not set")]
    if nvcc is None:
        return [*rows, Row("nvcc", "none: only needed to build CUDA kernels")]
    version = _says([nvcc, "--version"], r"release ([\d.]+)")
    doubt = (
        f"nvcc {version} does not fit torch, built for CUDA {built_for}: CUDA kernels will not build; set CUDA_HOME to "
        f"{built_for}."
    )
    fits = not built_for or numbers(version)[0] == numbers(built_for)[0]
    return [*rows, Row("nvcc", f"{version}, {nvcc}", "" if fits else doubt)]


def tools_section(torch: ModuleType | None) -> Section:
    """Compiler and build tools."""
    built_for = getattr(getattr(torch, "version", None), "cuda", None)
    return gather("build tools", {"C++ compiler": compiler_row, "nvcc": partial(cuda_rows, built_for)})
