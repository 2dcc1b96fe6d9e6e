"""Builders of the native ops, one class per op: can it be built here, why not, build it, load it."""

import functools
import importlib
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, TypeVar

from deepspeed.accelerator.native import build, compiler, spec as ops
from deepspeed.accelerator.native.compiler import Compiler
from deepspeed.accelerator.native.spec import Kind, OpSpec
from deepspeed.client.attrs import answers
from deepspeed.errors import BuildError
from deepspeed.monitor.log import logger

_SOURCE_FOLDER = "csrc/"


class OpState(NamedTuple):
    """Op state. ``word``: ``built``, ``on first use`` (buildable), ``fallback``; ``detail``: place, tool or reason."""

    word: str
    detail: str


def _ask(kind: Kind, limit_s: float = compiler.PROBE_LIMIT_S) -> Compiler | str:
    try:
        return build.checked_compiler(kind, limit_s=limit_s)
    except BuildError as error:
        return str(error)


class OpBuilder:
    """Builder of one op. A subclass sets NAME, BUILD_VAR and SPEC, or overrides ``sources`` and the other lists.

    ``sources`` are ``csrc/...`` or absolute, ``include_paths`` folders for ``#include`` besides ``csrc``, ``cxx_args``
    and ``nvcc_args`` flags besides the common ones, ``extra_ldflags`` libraries as ``-l...``. ``MODULE`` names the
    Python module that ``load`` returns once the library is there; without one, the library itself.
    """

    NAME: ClassVar[str] = ""
    BUILD_VAR: ClassVar[str] = ""
    MODULE: ClassVar[str] = ""
    SPEC: ClassVar[OpSpec] = OpSpec("", ())

    def __init__(self, name: str | None = None) -> None:
        self.name = name or self.NAME

    absolute_name = answers(lambda self: f"deepspeed.ops.{self.name}", "Dotted name of the op.")
    sources = answers(
        lambda self: [_SOURCE_FOLDER + source for source in self.SPEC.sources],
        "Source files, as ``csrc/...`` or absolute.",
    )
    include_paths = answers(lambda self: [], "Folders for ``#include`` besides ``csrc``.")
    cpu_arch = simd_width = answers(
        lambda self: "", "No flag: libraries are built for every machine of this kind, and choose when they run."
    )
    cxx_args = answers(
        lambda self: list(self.SPEC.flags) if self.SPEC.kind == "cpp" else [],
        "Flags of the C++ compiler besides the common ones.",
    )
    nvcc_args = answers(
        lambda self: list(self.SPEC.flags) if self.SPEC.kind == "cuda" else [], "Flags of nvcc besides the common ones."
    )
    extra_ldflags = answers(lambda self: [f"-l{name}" for name in self.SPEC.libraries], "Libraries, as ``-l...``.")

    def strip_empty_entries(self, args: Iterable[str]) -> list[str]:
        """Return ``args`` without empty flags."""
        return list(filter(None, args))

    def spec(self) -> OpSpec:
        """Return SPEC with the sources, flags and libraries of the methods above."""
        links, arguments = self.extra_ldflags(), self.nvcc_args if self.SPEC.kind == "cuda" else self.cxx_args
        flags = [*arguments(), *(f"-I{path}" for path in self.include_paths())]
        return replace(
            self.SPEC,
            name=self.SPEC.name or self.name,
            sources=tuple(source.removeprefix(_SOURCE_FOLDER) for source in self.sources()),
            flags=tuple(self.strip_empty_entries([*flags, *(link for link in links if not link.startswith("-l"))])),
            libraries=tuple(link[2:] for link in links if link.startswith("-l")),
        )

    def why_not(self) -> str:
        """Return why the op cannot be built or loaded here; empty when it can. Looks at files only, runs nothing."""
        spec, torch = self.spec(), build.torch_build()
        if not spec.sources:
            return f"this package does not have it; use {spec.instead}"
        if spec.missing():
            return f"its sources are not there ({', '.join(spec.missing())})"
        if spec.kind == "cuda" and torch and "cuda" not in torch:
            return "this torch is not built for CUDA"
        try:
            compiler.locate(spec.kind)
        except BuildError as error:
            return "" if build.built(spec, anywhere=True) else str(error)
        return ""

    def is_compatible(self, verbose: bool = False) -> bool:
        """Return whether the op can be built or loaded here; ``verbose`` logs the reason where it cannot."""
        reason = self.why_not()
        if reason and verbose:
            self.warning(f"{self.name} is not available: {reason}")
        return not reason

    def is_shipped(self) -> bool:
        """Return whether this installation came with a library of these sources. Looks at files only, runs nothing."""
        spec = self.spec()
        return bool(spec.sources) and not spec.missing() and build.shipped(spec, anywhere=True) is not None

    def state(self, ask: Callable[[Kind], Compiler | str] = _ask) -> OpState:
        """Return the op's state for a report, without building. ``ask`` returns the compiler, or why none is usable."""
        spec, answer = self.spec(), self.why_not() or None
        if answer is None and (library := build.built(spec)):
            return OpState("built", str(library))
        asked = answer or ask(spec.kind)
        reason = asked if isinstance(asked, str) else build.last_failure(spec, asked)
        if isinstance(asked, Compiler) and not reason:
            return OpState("on first use", f"with {asked.version}")
        return OpState("fallback", f"{spec.instead}: {reason}")

    def load(self, verbose: bool = False) -> Any:
        """Return the op's module, or its library if it has none, built first if needed; BuildError with the reason."""
        if reason := self.why_not():
            raise BuildError(f"native op {self.name} is not available: {reason}")
        library = build.load(self.spec())
        if verbose:
            logger.info("native op %s: loaded %s", self.name, library._name)
        return importlib.import_module(self.MODULE) if self.MODULE else library

    def jit_load(self, verbose: bool = True) -> Any:
        """Call ``load``: a shipped library that fits its sources is taken, else the op is built."""
        return self.load(verbose)

    def builder(self) -> Any:
        """Return the op as a setuptools extension; needs setuptools."""
        spec = self.spec()
        return importlib.import_module("setuptools").Extension(
            self.absolute_name(),
            [str(path) for path in spec.files()],
            include_dirs=[str(spec.folder()), *self.include_paths()],
            extra_compile_args=["-std=c++17", "-O3", *spec.flags],
            libraries=list(spec.libraries),
            language="c++",
        )

    def command_exists(self, cmd: str | Iterable[str]) -> bool:
        """Return whether any of the programs is on PATH."""
        return any(map(shutil.which, [cmd] if isinstance(cmd, str) else cmd))

    def has_function(
        self, funcname: str, libraries: Iterable[str] = (), library_dirs: Iterable[str] = (), verbose: bool = False
    ) -> bool:
        """Return whether a program that calls the C function ``funcname`` links with ``libraries``."""
        links = [*(f"-L{folder}" for folder in library_dirs or ()), *(f"-l{name}" for name in libraries or ())]
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "probe.cpp"
            source.write_text(f'extern "C" void {funcname}(void);\nint main() {{ {funcname}(); }}\n', encoding="utf-8")
            command = [*compiler.locate("cpp"), str(source), "-o", str(source.with_suffix("")), *links]
            status, output = compiler.run_tool(command, limit_s=compiler.PROBE_LIMIT_S)
        if status and verbose:
            self.warning(f"{shlex.join(command)}: {compiler.first_error(output)}")
        return status == 0

    def deepspeed_src_path(self, code_path: str | Path) -> str:
        """Return the absolute path of ``csrc/...``; absolute paths are returned unchanged."""
        return str(ops.source_root() / str(code_path).removeprefix(_SOURCE_FOLDER))

    def warning(self, msg: str) -> None:
        """Log a warning."""
        logger.warning("%s", msg)


class TorchCPUOpBuilder(OpBuilder):
    """Builder of an op in C++."""


class CUDAOpBuilder(OpBuilder):
    """Builder of an op in CUDA C++, without torch headers."""

    SPEC = OpSpec("", (), kind="cuda")

    def compute_capability_args(self, cross_compile_archs: str | None = None) -> list[str]:
        """Return ``-gencode`` flags of a list like "8.0;9.0", else of TORCH_CUDA_ARCH_LIST, else of devices here."""
        return compiler.gencode(compiler.targets_in(cross_compile_archs or "") or compiler.wanted_targets())


class AsyncIOBuilder(TorchCPUOpBuilder):
    """Builder of asynchronous file IO; ``load().aio_handle(...)``."""

    NAME, BUILD_VAR, SPEC, MODULE = "async_io", "DS_BUILD_AIO", ops.ASYNC_IO, ops.ASYNC_IO_MODULE


_Base = TypeVar("_Base", bound=OpBuilder)


def _builder(class_name: str, base: type[_Base], op: OpSpec, name: str = "") -> type[_Base]:
    name = name or op.name
    members = {"NAME": name, "BUILD_VAR": f"DS_BUILD_{name.upper()}", "SPEC": op, "__module__": __name__}
    return type(class_name, (base,), members | {"__doc__": f"Builder of the op ``{name}``."})


_GDS = OpSpec("gds", (), instead="async_io")
GDSBuilder = _builder("GDSBuilder", OpBuilder, _GDS)
PinMemoryBuilder = _builder("PinMemoryBuilder", AsyncIOBuilder, ops.ASYNC_IO, "pin_memory")  # part of that library
CPUAdamBuilder = _builder("CPUAdamBuilder", TorchCPUOpBuilder, ops.CPU_ADAM)
CPUAdagradBuilder = _builder("CPUAdagradBuilder", TorchCPUOpBuilder, ops.CPU_ADAGRAD)
CPULionBuilder = _builder("CPULionBuilder", TorchCPUOpBuilder, ops.CPU_LION)
CPUChecksumBuilder = _builder("CPUChecksumBuilder", TorchCPUOpBuilder, ops.CPU_CHECKSUM)
FusedAdamBuilder = _builder("FusedAdamBuilder", CUDAOpBuilder, ops.FUSED_ADAM)
FusedLambBuilder = _builder("FusedLambBuilder", CUDAOpBuilder, ops.FUSED_LAMB)
FusedLionBuilder = _builder("FusedLionBuilder", CUDAOpBuilder, ops.FUSED_LION)

_HOST = (AsyncIOBuilder, GDSBuilder, PinMemoryBuilder, CPUAdamBuilder, CPUAdagradBuilder, CPULionBuilder)
_CLASSES = (*_HOST, CPUChecksumBuilder, FusedAdamBuilder, FusedLambBuilder, FusedLionBuilder)
ALL_OPS: Mapping[str, OpBuilder] = MappingProxyType({op.NAME: op() for op in _CLASSES})


def states(*, limit_s: float) -> dict[str, OpState]:
    """Return the state of every op by name. Each compiler is asked once; each answer may take ``limit_s`` seconds."""
    ask = functools.cache(functools.partial(_ask, limit_s=limit_s))
    return {name: op.state(ask) for name, op in ALL_OPS.items()}


compatible_ops: Mapping[str, bool] = MappingProxyType({name: op.is_compatible() for name, op in ALL_OPS.items()})
installed_ops: Mapping[str, bool] = MappingProxyType({name: op.is_shipped() for name, op in ALL_OPS.items()})
