"""Build and load native ops: ``load`` or an error with its reason, ``try_load`` or one line in the log."""

import contextlib
import ctypes
import functools
import importlib.util
import os
import re
import time
from dataclasses import replace
from pathlib import Path

from deepspeed.accelerator.native import cache, compiler as tools
from deepspeed.accelerator.native.compiler import Compiler
from deepspeed.accelerator.native.spec import Kind, OpSpec, short_hash
from deepspeed.errors import BuildError, CUDAMismatchException
from deepspeed.monitor.log import logger


@functools.cache
def torch_build() -> dict[str, str]:
    """Return torch's ``version``, ``cuda``, ``hip`` and ``git_version``, without importing it; empty without torch."""
    package = importlib.util.find_spec("torch")
    try:
        text = Path(str(package.origin)).with_name("version.py").read_text(encoding="utf-8") if package else ""
    except OSError:
        text = ""
    return dict(re.findall(r"""^_*(\w+?)_*(?:\s*:[^=]+)?\s*=\s*["']([^"']+)["']""", text, re.MULTILINE))


def _stem(op: OpSpec, compiler: Compiler) -> str:
    """Return the library's name in the cache: a hash of the op's inputs, then one of compiler, torch and C library."""
    torch, libc = torch_build(), ""
    with contextlib.suppress(ValueError, OSError):  # another C library does not know the name
        libc = os.confstr("CS_GNU_LIBC_VERSION") or ""
    return f"{op.stem()}-{short_hash([compiler.identity(), torch.get('version'), torch.get('git_version'), libc])}"


def _compile(op: OpSpec, compiler: Compiler, library: Path) -> None:
    """Compile ``op``, with ninja several sources at once (MAX_JOBS), and publish the library and its note."""

    def run(command: list[str], sign: str = "") -> None:
        status, output = tools.run_tool(command, limit_s=tools.COMPILE_LIMIT_S)
        if status != 0 and sign in output:
            failure = f"{compiler.command[0]} fails with status {status}: {tools.first_error(output)}"
            raise BuildError(f"op {op.name}: {failure}")

    with cache.work_folder(library.parent, op.name) as work:
        targets = [(source, work / f"{index}.o") for index, source in enumerate(op.files())]
        commands = {target: compiler.object_command(op, source, target) for source, target in targets}
        if ninja := tools.find_ninja():
            plan = work / "build.ninja"
            plan.write_text(tools.ninja_plan(commands, work), encoding="utf-8")
            jobs = os.environ.get("MAX_JOBS", "")
            # without the sign of a failed command ninja itself is broken, which need not end the build
            run([ninja, "-f", str(plan), *(["-j", jobs] if jobs.strip("0").isdecimal() else [])], sign="FAILED: ")
        for target, command in commands.items():
            if not target.is_file():
                run(command)
        built = work / f"{op.name}.so"
        run(compiler.link_command(op, list(commands), built))
        if not built.is_file():
            failure = "ended well but made no library; CXX must name a C++ compiler"
            raise BuildError(f"op {op.name}: {compiler.command[0]} {failure}")
        origin = {"op": op.name, "compiler": list(compiler.command), "version": compiler.version}
        origin |= {"targets": list(compiler.targets)} if op.kind == "cuda" else {}
        cache.publish(built, library, origin)


def _build_into(library: Path, op: OpSpec, compiler: Compiler) -> None:
    """Build ``library``, or wait while another process builds it. BuildError when either build fails."""
    begin, lock, fields = time.time(), cache.BuildLock(library.parent, op.name), {"stem": library.stem}
    with lock.owned():
        if cache.is_good(library):
            return
        last = lock.read()
        if last.get("failed") and last.get("stem") == library.stem and float(last.get("time", 0)) > begin:
            raise BuildError(str(last["failed"]))
        begin = time.time()
        lock.write(**fields, time=begin)
        if op.kind == "cuda":
            logger.info("op %s: compiling with %s, which takes a minute or two, once", op.name, compiler.command[0])
        try:
            _compile(op, compiler, library)
        except OSError as error:
            where = f"op {op.name}: cannot be built in {library.parent}"
            raise BuildError(f"{where}: {error}; {cache.ELSEWHERE}") from error
        except BuildError as error:
            lock.write(**fields, time=time.time(), failed=str(error))
            raise
        logger.info("op %s: built in %.1f s, kept in %s", op.name, time.time() - begin, library)


def ship(op: OpSpec, folder: Path) -> Path:
    """Compile ``op`` into ``folder``, the future ``cache.SHIPPED`` of an installation; BuildError when that fails."""
    library = folder / f"{op.stem()}.so"
    if not cache.is_good(library):
        folder.mkdir(parents=True, exist_ok=True)
        _compile(op, replace(tools.find(op.kind), targets=tools.shipped_targets()), library)
    return library


def _fits(library: Path, *, anywhere: bool) -> bool:
    """Return whether ``library`` is good, and has code for the devices present, or ``anywhere``: to ask starts CUDA."""
    targets = cache.note(library).get("targets")
    return cache.is_good(library) and (anywhere or not targets or tools.covers(targets, tools.present_targets()))


def shipped(op: OpSpec, *, anywhere: bool = False) -> Path | None:
    """Return the library built when this package was installed; None unless it fits these sources and the devices."""
    library = cache.SHIPPED / f"{op.stem()}.so"
    return library if _fits(library, anywhere=anywhere) else None


def built(op: OpSpec, *, anywhere: bool = False) -> Path | None:
    """Return the newest good library of ``op``, shipped or cached, of any compiler; None without one. Runs nothing."""
    with contextlib.suppress(BuildError, FileNotFoundError):
        if library := shipped(op, anywhere=anywhere):
            return library
        every = sorted(cache.folder().glob(f"{op.stem()}-*.so"), key=os.path.getmtime, reverse=True)
        return next((library for library in every if _fits(library, anywhere=anywhere)), None)
    return None


def checked_compiler(kind: Kind, *, limit_s: float = tools.PROBE_LIMIT_S) -> Compiler:
    """Return the compiler for ``kind``; BuildError when none answers in ``limit_s`` seconds or fits torch."""
    compiler = tools.find(kind, limit_s=limit_s)
    ours, theirs = re.search(r"cuda_(\d+)", compiler.version), torch_build().get("cuda", "").partition(".")[0]
    # the driver is only known to be as new as torch needs it; an older toolkit's libraries run on any newer driver
    if ours and theirs and int(ours[1]) > int(theirs) and os.environ.get("DS_SKIP_CUDA_CHECK") != "1":
        mismatch = f"{compiler.command[0]} is CUDA {ours[1]}, torch is built for CUDA {theirs}"
        hint = f"set CUDA_HOME to a toolkit of CUDA {theirs}, or DS_SKIP_CUDA_CHECK=1 if the driver is new enough"
        raise CUDAMismatchException(f"{mismatch}: what it compiles may need a newer driver; {hint}")
    return compiler


def last_failure(op: OpSpec, compiler: Compiler) -> str:
    """Return why the last build of ``op`` with ``compiler`` failed; empty when it succeeded or none was tried."""
    try:
        last = cache.BuildLock(cache.folder(), op.name).read()
    except BuildError as error:
        return str(error)
    return str(last.get("failed") or "") if last.get("stem") == _stem(op, compiler) else ""


def build(op: OpSpec) -> Path:
    """Return the path of the cached library of ``op``, compiled first if no good one exists; BuildError on failure."""
    try:
        compiler = checked_compiler(op.kind)
    except BuildError:
        # a node without a compiler may share the cache of one that has it
        if (library := built(op)) is None:
            raise
        return library
    library = cache.folder() / f"{_stem(op, compiler)}.so"
    if not cache.is_good(library):
        _build_into(library, op, compiler)
    return library


@functools.cache
def load(op: OpSpec) -> ctypes.CDLL:
    """Load the op's library, shipped, cached or built now; calls release the GIL. BuildError with the cause."""
    last: OSError | None = None
    for get in (shipped, build, build):
        path = get(op)
        if path is None:
            continue
        try:
            return ctypes.CDLL(str(path))
        except OSError as error:
            # whole, but made for another machine (a shared home folder): once more, here
            last = error
            logger.info("op %s: its library does not load: %s; building another", op.name, error)
            if get is build:
                with contextlib.suppress(OSError):
                    path.with_suffix(".json").unlink()
    raise BuildError(f"op {op.name}: its library does not load: {last}") from last


@functools.cache
def try_load(op: OpSpec) -> ctypes.CDLL | None:
    """Call ``load``; on BuildError return None, and log once per process op, first error and what runs instead."""
    try:
        return load(op)
    except BuildError as error:
        reason = str(error).removeprefix(f"op {op.name}: ")
        logger.warning("native op %s is not available, %s runs instead: %s", op.name, op.instead, reason)
        return None
