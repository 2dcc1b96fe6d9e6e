"""The compilers of this machine: where they are, their versions, the commands they take and what they complain of."""

import contextlib
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

from deepspeed.errors import BuildError, MissingCUDAException
from deepspeed.native.spec import Kind, OpSpec

CXX_NAMES = ("c++", "g++", "clang++")
NVCC_FOLDERS = ("/usr/local/cuda/bin",)
CUDA_TARGETS = ("80", "90")
PROBE_LIMIT_S = 20.0
COMPILE_LIMIT_S = 900.0
_GRACE_S = 2.0

_ERROR = re.compile(
    r"\berror\s*:|\bfatal\b|undefined reference|cannot find|not found|No such file|No space left|[Pp]ermission denied"
)


def first_error(text: str) -> str:
    """The first line of a compiler's output that is an error, else its first line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if _ERROR.search(line)), lines[0] if lines else "it said nothing")[:300]


def run_tool(command: Sequence[str], *, limit_s: float) -> tuple[int, str]:
    """Exit status and output (stdout and stderr together) of a command that may take ``limit_s`` seconds; BuildError if
    it cannot run.

    The output goes to a file and the command gets its own process group, so that nothing it starts can outlive
    the limit or keep us waiting on a pipe.
    """
    shown = shlex.join(command[:2])
    # plain English messages, whatever the user's language: first_error reads them
    environment = {**os.environ, "LC_ALL": "C"}
    with tempfile.TemporaryFile() as output:
        try:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise BuildError(f"{shown} cannot be started: {error}") from error
        try:
            status = child.wait(limit_s)
        except BaseException as error:
            for way in (
                signal.SIGTERM,
                signal.SIGKILL,
            ):  # ninja passes the first on to its compilers, each in a group of its own
                with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(child.pid, way)
                    child.wait(_GRACE_S)
            child.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                raise BuildError(f"{shown} took more than {limit_s:.0f} s and was stopped") from error
            raise
        output.seek(0)
        return status, output.read().decode(errors="replace")


def find_ninja() -> str | None:
    """The ninja program, on PATH or where its Python package puts it; None where there is none."""
    return shutil.which(
        "ninja", path=os.pathsep.join([os.environ.get("PATH", os.defpath), sysconfig.get_path("scripts")])
    )


def run_at_once(commands: Mapping[Path, Sequence[str]], work: Path) -> bool:
    """Let ninja run the commands that make these files, MAX_JOBS or one per core at once; False when one fails, or
    without ninja.

    Files of ninja's own go to the folder ``work``. Raises BuildError when they take too long.
    """
    ninja = find_ninja()
    if ninja is None:
        return False
    lines = [f"builddir = {_for_ninja(work)}", "rule run", "  command = $run"]
    for target, command in commands.items():
        lines += [f"build {_for_ninja(target)}: run", "  run = " + shlex.join(command).replace("$", "$$")]
    plan = work / "build.ninja"
    plan.write_text("\n".join([*lines, ""]), encoding="utf-8")
    jobs = os.environ.get("MAX_JOBS", "")
    limit = ["-j", jobs] if jobs.isdecimal() and int(jobs) else []
    return run_tool([ninja, "-f", str(plan), *limit], limit_s=COMPILE_LIMIT_S)[0] == 0


def _for_ninja(path: Path) -> str:
    return re.sub("([$ :])", r"$\1", str(path))


@dataclass(frozen=True)
class Compiler:
    """A compiler that answered: its command (several words with ``CXX="ccache g++"``), its version and what it comes
    with.

    ``openmp``: ``-fopenmp`` programs link. ``static_runtime``: the C++ runtime can go into the library, so that an
    older one in the process does no harm.
    """

    command: tuple[str, ...]
    version: str
    kind: Kind = "cpp"
    openmp: bool = False
    static_runtime: bool = False

    def identity(self) -> list[str]:
        """What a cached library depends on."""
        return [
            *self.command,
            self.version,
            str(self.openmp),
            str(self.static_runtime),
            *(_nvcc_options() if self.kind == "cuda" else ()),
        ]

    def object_command(self, op: OpSpec, source: Path, target: Path) -> list[str]:
        """Compile one source."""
        common = ["-std=c++17", "-O3", *op.flags, "-I", str(op.folder()), "-c", str(source), "-o", str(target)]
        if self.kind == "cuda":
            return [*self.command, "-Xcompiler", "-fPIC", *_nvcc_options(), *common]
        return [*self.command, "-fPIC", "-pthread", *(["-fopenmp"] if op.openmp and self.openmp else []), *common]

    def link_command(self, op: OpSpec, objects: Sequence[Path], target: Path) -> list[str]:
        """Make the shared library."""
        inputs = [*op.flags, *map(str, objects), *(f"-l{name}" for name in op.libraries), "-o", str(target)]
        if self.kind == "cuda":
            # static: a machine with a driver and a CUDA torch needs no toolkit
            return [*self.command, "-shared", "-cudart", "static", *_nvcc_options(), *inputs]
        runtime = ["-static-libstdc++", "-static-libgcc", "-Wl,--exclude-libs,ALL"] if self.static_runtime else []
        return [
            *self.command,
            "-shared",
            "-pthread",
            *(["-fopenmp"] if op.openmp and self.openmp else []),
            *runtime,
            *inputs,
        ]


def named_targets(text: str) -> tuple[str, ...]:
    """``"8.0;9.0+PTX"`` -> ``("80", "90")``."""
    return tuple(major + minor for major, minor in re.findall(r"(\d+)\.(\d+[a-z]?)", text))


def cuda_targets() -> tuple[str, ...]:
    """Compute capabilities to build for, of TORCH_CUDA_ARCH_LIST where it is set."""
    return named_targets(os.environ.get("TORCH_CUDA_ARCH_LIST", "")) or CUDA_TARGETS


def gencode(targets: Sequence[str] = ()) -> list[str]:
    """nvcc's flags for machine code of every target, and PTX of the last, which newer devices compile when they load
    it.
    """
    wanted = tuple(targets) or cuda_targets()
    codes = [f"-gencode=arch=compute_{each},code=sm_{each}" for each in wanted]
    return [*codes, f"-gencode=arch=compute_{wanted[-1]},code=compute_{wanted[-1]}"]


def _nvcc_options() -> list[str]:
    host = [
        word for word in shlex.split(os.environ.get("CXX", "")) if os.path.basename(word) not in ("ccache", "sccache")
    ][:1]
    threads = os.environ.get("DS_NVCC_THREADS")
    return [*gencode(), *(["-ccbin", *host] if host else []), *(["--threads", threads] if threads else [])]


def locate(kind: Kind) -> tuple[str, ...]:
    """Command of the compiler for ``kind``, found without running anything; BuildError when there is none."""
    return _locate_nvcc() if kind == "cuda" else _locate_cxx()


def _locate_cxx() -> tuple[str, ...]:
    wanted = shlex.split(os.environ.get("CXX", ""))
    if wanted:
        # an explicit wish: taking another compiler behind the user's back would hide its fault
        path = shutil.which(wanted[0])
        if path is None:
            raise BuildError(
                f"CXX names {wanted[0]!r}, which is not a program on PATH; set CXX to a C++17 compiler or unset it"
            )
        return (path, *wanted[1:])
    found = next(filter(None, map(shutil.which, CXX_NAMES)), None)
    if found is None:
        raise BuildError(
            f"no C++ compiler: none of {', '.join(CXX_NAMES)} is on PATH; install g++ (10 or newer) or set CXX"
        )
    return (found,)


def _locate_nvcc() -> tuple[str, ...]:
    homes = [os.path.join(home, "bin") for name in ("CUDA_HOME", "CUDA_PATH") if (home := os.environ.get(name))]
    path = os.pathsep.join([*homes, os.environ.get("PATH", os.defpath), *NVCC_FOLDERS])
    found = shutil.which("nvcc", path=path)
    if found is None:
        raise MissingCUDAException(
            "no CUDA compiler: nvcc is neither in CUDA_HOME nor on PATH; install the CUDA toolkit or set CUDA_HOME"
        )
    return (found,)


def find(kind: Kind, *, limit_s: float = PROBE_LIMIT_S) -> Compiler:
    """The compiler for ``kind``, asked for its version; BuildError when there is none or it gives no answer in
    ``limit_s`` seconds.
    """
    command = locate(kind)
    status, answer = run_tool([*command, "--version"], limit_s=limit_s)
    if status != 0:
        raise BuildError(f"{shlex.join(command)} --version fails with status {status}: {first_error(answer)}")
    lines = answer.strip().splitlines() or [""]
    if kind == "cuda":
        return Compiler(command, lines[-1], kind)

    def finds(name: str) -> bool:
        status, answer = run_tool([*command, f"-print-file-name={name}"], limit_s=limit_s)
        return status == 0 and os.path.isabs(answer.strip())

    # gcc needs libgomp's spec file to link, clang its own runtime
    openmp = finds("libomp.so" if "clang" in lines[0] else "libgomp.spec")
    return Compiler(command, lines[0], openmp=openmp, static_runtime=finds("libstdc++.a"))
