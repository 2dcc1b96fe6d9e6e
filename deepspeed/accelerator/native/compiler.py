"""The compilers of this machine: where they are, their versions, the commands they take and what they complain of."""

import contextlib
import ctypes
import functools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed.accelerator.native.spec import Kind, OpSpec
from deepspeed.errors import BuildError, MissingCUDAException

CXX_NAMES = ("c++", "g++", "clang++")
NVCC_FOLDERS = ("/usr/local/cuda/bin",)
# Architectures of what is built where no device is, or for other machines: those that this package is tested for.
CUDA_TARGETS = ("80", "90")
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
PROBE_LIMIT_S = 20.0
COMPILE_LIMIT_S = 900.0

_ERROR = re.compile(
    r"\berror\s*:|\bfatal\b|undefined reference|cannot find|not found|No such file|No space left|[Pp]ermission denied"
)


def first_error(text: str) -> str:
    """Return the first error line of a compiler's output, else its first line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if _ERROR.search(line)), lines[0] if lines else "it said nothing")[:300]


def run_tool(command: Sequence[str], *, limit_s: float) -> tuple[int, str]:
    """Run ``command``; return its status and output. BuildError if it cannot run or takes over ``limit_s`` seconds."""
    label, plain = shlex.join(command[:2]), {**os.environ, "LC_ALL": "C"}  # in English: first_error reads it
    with tempfile.TemporaryFile() as output:
        options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
        try:
            child = subprocess.Popen(command, start_new_session=True, env=plain, **options)
        except OSError as error:
            raise BuildError(f"{label} cannot be started: {error}") from error
        try:
            child.wait(limit_s)
        except subprocess.TimeoutExpired as error:
            raise BuildError(f"{label} took more than {limit_s:.0f} s and was stopped") from error
        finally:
            for kind in (signal.SIGTERM, signal.SIGKILL):
                if child.poll() is None:
                    with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                        os.killpg(child.pid, kind)
                        child.wait(2.0)
        output.seek(0)
        return child.returncode, output.read().decode(errors="replace")


def find_ninja() -> str | None:
    """Return the path of ninja, from this environment's Python package or PATH; None if neither has it."""
    scripts = sysconfig.get_path("scripts")
    return shutil.which("ninja", path=os.pathsep.join([scripts, os.environ.get("PATH", os.defpath)]))


def ninja_plan(commands: Mapping[Path, Sequence[str]], work: Path) -> str:
    """Return a ninja build file with one command for each target."""
    path = functools.partial(re.sub, r"([$ :])", r"$\1")
    lines = [f"builddir = {path(str(work))}", "rule run", "  command = $run"]
    for target, command in commands.items():
        lines += [f"build {path(str(target))}: run", "  run = " + shlex.join(command).replace("$", "$$")]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Compiler:
    """Compiler that answered: command (several words with ``CXX="ccache g++"``), version and kind. ``static_runtime``:
    the C++ runtime can go into the library, so that an older one in the process does no harm. ``targets``: the CUDA
    architectures that it compiles for.
    """

    command: tuple[str, ...]
    version: str
    kind: Kind = "cpp"
    static_runtime: bool = False
    targets: tuple[str, ...] = CUDA_TARGETS

    def identity(self) -> list[str]:
        """Return the parts of the compiler that a cached library depends on."""
        nvcc = self._nvcc_options() if self.kind == "cuda" else []
        return [*self.command, self.version, str(self.static_runtime), *nvcc]

    def object_command(self, op: OpSpec, source: Path, target: Path) -> list[str]:
        """Return the command that compiles one source."""
        place = ["-Xcompiler", "-fPIC", *self._nvcc_options()] if self.kind == "cuda" else ["-fPIC", "-pthread"]
        flags = ["-std=c++17", "-O3", *op.flags, "-I", str(op.folder())]
        return [*self.command, *place, *flags, "-c", str(source), "-o", str(target)]

    def link_command(self, op: OpSpec, objects: Sequence[Path], target: Path) -> list[str]:
        """Return the command that links the shared library."""
        if self.kind == "cuda":
            # static: a machine with a driver and a CUDA torch needs no toolkit
            runtime = ["-cudart", "static", *self._nvcc_options()]
        else:
            static = ["-static-libstdc++", "-static-libgcc", "-Wl,--exclude-libs,ALL"] if self.static_runtime else []
            runtime = ["-pthread", *static]
        inputs = [*op.flags, *map(str, objects), *(f"-l{name}" for name in op.libraries)]
        return [*self.command, "-shared", *runtime, *inputs, "-o", str(target)]

    def _nvcc_options(self) -> list[str]:
        words = shlex.split(os.environ.get("CXX", ""))
        host = [word for word in words if os.path.basename(word) not in ("ccache", "sccache")][:1]
        threads = os.environ.get("DS_NVCC_THREADS")
        options = [*(["-ccbin", *host] if host else []), *(["--threads", threads] if threads else [])]
        return [*gencode(self.targets), *options]


def targets_in(text: str) -> tuple[str, ...]:
    """Return the architectures in a list like TORCH_CUDA_ARCH_LIST: ("80", "90a") of "8.0;9.0a+PTX"."""
    return tuple(major + minor for major, minor in re.findall(r"(\d+)\.(\d+[a-z]?)", text))


@functools.cache
def present_targets(driver: str = "libcuda.so.1") -> tuple[str, ...]:
    """Return the architectures of this process's devices, lowest first, by the driver: torch may not be installed."""
    architectures, number, value = set[int](), ctypes.c_int(), ctypes.c_int()
    with contextlib.suppress(OSError, AttributeError):
        cuda = ctypes.CDLL(driver)
        count = range(number.value) if not cuda.cuInit(0) and not cuda.cuDeviceGetCount(ctypes.byref(number)) else ()
        for device in count:
            parts = []
            for attribute in (_MAJOR, _MINOR):
                failed = cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
                parts.append(0 if failed else value.value)
            architectures.add(10 * parts[0] + parts[1])
    return tuple(map(str, sorted(architectures - {0})))


def wanted_targets() -> tuple[str, ...]:
    """Return the architectures of TORCH_CUDA_ARCH_LIST, else of the devices present, else CUDA_TARGETS."""
    return targets_in(os.environ.get("TORCH_CUDA_ARCH_LIST", "")) or present_targets() or CUDA_TARGETS


def shipped_targets() -> tuple[str, ...]:
    """Return architectures of a package for any machine: TORCH_CUDA_ARCH_LIST, else CUDA_TARGETS and the devices."""
    everywhere = sorted({*CUDA_TARGETS, *present_targets()}, key=int)
    return targets_in(os.environ.get("TORCH_CUDA_ARCH_LIST", "")) or tuple(everywhere)


def covers(targets: Sequence[str], devices: Sequence[str]) -> bool:
    """Return whether code for ``targets`` runs on all ``devices``: code within a major version, last PTX on newer."""
    codes = [int(name) for name in targets if name.isdecimal()]  # "90a" runs on a 90 and on nothing else
    exact, newer = {name[:-1] for name in targets if not name.isdecimal()}, targets[-1].isdecimal()

    def runs(device: int) -> bool:
        return any(code // 10 == device // 10 and code <= device for code in codes) or (newer and codes[-1] <= device)

    return all(device in exact or runs(int(device)) for device in devices)


def gencode(targets: Sequence[str]) -> list[str]:
    """Return nvcc's flags for machine code of all ``targets``, and for PTX of the last target, for newer devices."""
    codes = [f"-gencode=arch=compute_{target},code=sm_{target}" for target in targets]
    return [*codes, f"-gencode=arch=compute_{targets[-1]},code=compute_{targets[-1]}"]


def locate(kind: Kind) -> tuple[str, ...]:
    """Return the command of the compiler for ``kind`` without running anything; BuildError when none is found."""
    if kind == "cuda":
        homes = [os.path.join(root, "bin") for name in ("CUDA_HOME", "CUDA_PATH") if (root := os.environ.get(name))]
        path = shutil.which("nvcc", path=os.pathsep.join([*homes, os.environ.get("PATH", os.defpath), *NVCC_FOLDERS]))
        if path is None:
            reason = "no CUDA compiler: nvcc is neither in CUDA_HOME nor on PATH"
            raise MissingCUDAException(f"{reason}; install the CUDA toolkit or set CUDA_HOME")
        return (path,)
    # an explicit wish: taking another compiler behind the user's back would hide its fault
    wish, *arguments = shlex.split(os.environ.get("CXX", "")) or [""]
    path = next(filter(None, map(shutil.which, [wish] if wish else CXX_NAMES)), None)
    if path is None and wish:
        raise BuildError(f"CXX names {wish!r}, which is not a program on PATH; set CXX to a C++17 compiler or unset it")
    if path is None:
        which = f"none of {', '.join(CXX_NAMES)} is on PATH"
        raise BuildError(f"no C++ compiler: {which}; install g++ (10 or newer) or set CXX")
    return (path, *arguments)


def find(kind: Kind, *, limit_s: float = PROBE_LIMIT_S) -> Compiler:
    """Find the compiler for ``kind`` and ask for its version; BuildError when none answers in ``limit_s`` seconds."""
    command = locate(kind)
    status, answer = run_tool([*command, "--version"], limit_s=limit_s)
    if status != 0:
        raise BuildError(f"{shlex.join(command)} --version fails with status {status}: {first_error(answer)}")
    lines = answer.strip().splitlines() or [""]
    if kind == "cuda":
        return Compiler(command, lines[-1], kind, targets=_known_targets(command, limit_s))
    status, answer = run_tool([*command, "-print-file-name=libstdc++.a"], limit_s=limit_s)
    return Compiler(command, lines[0], static_runtime=status == 0 and os.path.isabs(answer.strip()))


def _known_targets(command: tuple[str, ...], limit_s: float) -> tuple[str, ...]:
    """Return ``wanted_targets``; a device newer than nvcc gets nvcc's newest target, whose PTX runs on the device."""
    wanted = wanted_targets()
    if wanted != present_targets() or os.environ.get("TORCH_CUDA_ARCH_LIST"):
        return wanted
    _, answer = run_tool([*command, "--list-gpu-arch"], limit_s=limit_s)
    supported = sorted(map(int, re.findall(r"compute_(\d+)\b", answer)))
    nearest = {max((k for k in supported if k <= int(name)), default=int(name)) for name in wanted}
    return tuple(map(str, sorted(nearest)))
