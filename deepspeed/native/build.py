"""Build and load native ops: ``load`` or an error with its reason, ``try_load`` or one line in the log."""

import contextlib
import ctypes
import functools
import importlib.util
import os
import re
import time
from pathlib import Path

from deepspeed.errors import BuildError, CUDAMismatchException
from deepspeed.native import cache
from deepspeed.native.compiler import COMPILE_LIMIT_S, PROBE_LIMIT_S, Compiler, find, first_error, run_at_once, run_tool
from deepspeed.native.spec import Kind, OpSpec, short_hash
from deepspeed.observe.log import logger


@functools.cache
def torch_build() -> dict[str, str]:
    """``version``, ``cuda``, ``hip`` and ``git_version`` of the installed torch, read without importing it; empty where
    there is none.
    """
    found = importlib.util.find_spec("torch")
    try:
        text = Path(str(found.origin)).with_name("version.py").read_text(encoding="utf-8") if found else ""
    except OSError:
        text = ""
    return dict(re.findall(r"""^_*(\w+?)_*(?:\s*:[^=]+)?\s*=\s*["']([^"']+)["']""", text, re.MULTILINE))


def _libc() -> str:
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (ValueError, OSError):  # another C library, which does not know the name
        return ""


def _stem(op: OpSpec, compiler: Compiler) -> str:
    """Name of the op's library in the cache: what it was made from, then what it was made with."""
    torch = torch_build()
    tools = short_hash([compiler.identity(), torch.get("version"), torch.get("git_version"), _libc()])
    return f"{op.name}-{op.digest()}-{tools}"


def compile_library(op: OpSpec, compiler: Compiler, work: Path) -> Path:
    """Compile ``op`` in the folder ``work`` and return the library's path there; BuildError with the compiler's first
    error.
    """

    def run(command: list[str]) -> None:
        status, output = run_tool(command, limit_s=COMPILE_LIMIT_S)
        if status != 0:
            raise BuildError(f"op {op.name}: {compiler.command[0]} fails with status {status}: {first_error(output)}")

    objects = {work / f"{index}.o": source for index, source in enumerate(op.files())}
    commands = {target: compiler.object_command(op, source, target) for target, source in objects.items()}
    if len(commands) == 1 or not run_at_once(commands, work):
        # One after the other: what failed comes first, and says why.
        for target in sorted(commands, key=Path.exists):
            run(commands[target])
    library = work / f"{op.name}.so"
    run(compiler.link_command(op, list(objects), library))
    if not library.is_file():
        raise BuildError(
            f"op {op.name}: {compiler.command[0]} ended well but made no library; CXX must name a C++ compiler"
        )
    return library


def _compile_into(entry: cache.Entry, op: OpSpec, compiler: Compiler) -> None:
    with cache.work_folder(entry.folder, op.name) as work:
        library = compile_library(op, compiler, work)
        entry.publish(library, {"op": op.name, "compiler": list(compiler.command), "version": compiler.version})


def _build_into(entry: cache.Entry, op: OpSpec, compiler: Compiler) -> None:
    """Make ``entry`` good: by waiting for another process that builds it, else by building it."""
    asked = time.time()
    with cache.build_lock(entry.folder, op.name) as lock:
        if entry.is_good():
            return
        said = lock.read()
        if said.get("failed") and said.get("stem") == entry.stem and float(said.get("time", 0)) > asked:
            raise BuildError(str(said["failed"]))
        lock.write(stem=entry.stem, time=time.time())
        begin = time.monotonic()
        try:
            _compile_into(entry, op, compiler)
        except OSError as error:
            raise BuildError(f"op {op.name}: cannot be built in {entry.folder}: {error}") from error
        except BuildError as error:
            lock.write(stem=entry.stem, time=time.time(), failed=str(error))
            raise
        logger.info("op %s: built in %.1f s, kept in %s", op.name, time.monotonic() - begin, entry.library)


def ship(op: OpSpec, folder: Path) -> Path:
    """Compile ``op`` into ``folder``, the future ``cache.SHIPPED`` of an installation; BuildError when that fails."""
    entry = cache.Entry(folder, f"{op.name}-{op.digest()}")
    if not entry.is_good():
        folder.mkdir(parents=True, exist_ok=True)
        _compile_into(entry, op, find(op.kind))
    return entry.library


def shipped(op: OpSpec) -> Path | None:
    """The library that was built when this package was installed, if it was built from these sources."""
    entry = cache.Entry(cache.SHIPPED, f"{op.name}-{op.digest()}")
    return entry.library if entry.is_good() else None


def built(op: OpSpec) -> Path | None:
    """A good library of ``op`` that exists already, shipped or cached, whatever compiler made it; nothing is run."""
    cached = (
        entry.library
        for folder in cache.known_folders()
        for entry in cache.good_entries(folder, f"{op.name}-{op.digest()}-")
    )
    return shipped(op) or next(cached, None)


def checked_compiler(kind: Kind, *, limit_s: float = PROBE_LIMIT_S) -> Compiler:
    """The compiler for ``kind``; BuildError when there is none, it does not answer in ``limit_s`` seconds, or does not
    fit torch.
    """
    compiler = find(kind, limit_s=limit_s)
    ours, theirs = re.search(r"cuda_(\d+)", compiler.version), torch_build().get("cuda", "").partition(".")[0]
    # the driver is only known to be as new as torch needs it; an older toolkit's libraries run on any newer driver
    if ours and theirs and int(ours[1]) > int(theirs) and os.environ.get("DS_SKIP_CUDA_CHECK") != "1":
        raise CUDAMismatchException(
            f"{compiler.command[0]} is CUDA {ours[1]}, torch is built for CUDA {theirs}: what it compiles may "
            "need a newer driver; "
            f"set CUDA_HOME to a toolkit of CUDA {theirs}, or DS_SKIP_CUDA_CHECK=1 if the driver is new enough"
        )
    return compiler


def last_failure(op: OpSpec, compiler: Compiler) -> str:
    """Why the last attempt to build ``op`` with ``compiler`` failed; empty when it did not, or there was none."""
    stem = _stem(op, compiler)
    for folder in cache.known_folders():
        said = cache.read_owner(folder, op.name)
        if said.get("stem") == stem and said.get("failed"):
            return str(said["failed"])
    return ""


def build(op: OpSpec) -> Path:
    """Path of the cached library of ``op``, compiled first where there is no good one; BuildError when that fails."""
    try:
        compiler = checked_compiler(op.kind)
    except BuildError:
        # a node without a compiler may share the cache of one that has it
        library = built(op)
        if library is None:
            raise
        return library
    stem = _stem(op, compiler)
    for folder in cache.known_folders():
        entry = cache.Entry(folder, stem)
        if entry.is_good():
            return entry.library
    entry = cache.Entry(cache.writable_folder(), stem)
    _build_into(entry, op, compiler)
    return entry.library


def _open(op: OpSpec, library: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise BuildError(f"op {op.name}: its library does not load: {error}") from error


@functools.cache
def load(op: OpSpec) -> ctypes.CDLL:
    """The op's library; the one shipped with the package where it fits, else the cached one, built if need be.

    Calls release the GIL. The result is kept for the process. Raises BuildError with the first cause.
    """
    ready = shipped(op)
    if ready is not None:
        try:
            return _open(op, ready)
        except BuildError as error:
            logger.info("%s; building another", error)
    library = build(op)
    try:
        return _open(op, library)
    except BuildError as error:
        # whole, but made for another machine (a shared home folder): once more, here
        logger.info("%s; building it again", error)
        with contextlib.suppress(OSError):
            cache.Entry(library.parent, library.stem).discard()
        return _open(op, build(op))


@functools.cache
def try_load(op: OpSpec) -> ctypes.CDLL | None:
    """``load``, or None after one line (once per process) that names the op, the first error and what runs instead."""
    try:
        return load(op)
    except BuildError as error:
        reason = str(error).removeprefix(f"op {op.name}: ")
        logger.warning("native op %s is not available, %s runs instead: %s", op.name, op.instead, reason)
        return None
