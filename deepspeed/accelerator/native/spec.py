"""The native ops of this package, and what each is made of."""

import hashlib
import json
import os
import platform
import re
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Literal

from deepspeed.errors import BuildError
from deepspeed.version import __version__

Kind = Literal["cpp", "cuda"]

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)


def source_root() -> Path:
    """Return the folder of the native sources: beside this file if installed, else at the top of the checkout."""
    inside = Path(__file__).resolve().parent / "csrc"
    return inside if inside.is_dir() else Path(__file__).resolve().parents[3] / "csrc"


@dataclass(frozen=True)
class OpSpec:
    """Shared library of ``extern "C"`` functions. ``sources`` are paths below the source root; files that they include
    with quotes join the cache key automatically. ``flags`` go to the compiler and the linker, ``libraries`` are names
    for ``-l``. ``instead`` names what runs when the op is not available.
    """

    name: str
    sources: tuple[str, ...]
    _: KW_ONLY
    flags: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    kind: Kind = "cpp"
    instead: str = "torch's own implementation"
    root: Path | None = None  # None: source_root()

    def folder(self) -> Path:
        """Return the folder that sources, headers and ``#include`` lines are relative to."""
        return self.root or source_root()

    def files(self) -> tuple[Path, ...]:
        """Return the absolute paths of the sources."""
        return tuple(self.folder() / name for name in self.sources)

    def missing(self) -> tuple[str, ...]:
        """Return the sources that are not on disk."""
        return tuple(name for name in self.sources if not (self.folder() / name).is_file())

    def inputs(self) -> tuple[Path, ...]:
        """Return the sources and every file that they include with quotes, directly or not."""
        read: dict[Path, None] = {}
        waiting = list(self.files())
        while waiting:
            path = waiting.pop(0)
            if path in read:
                continue
            read[path] = None
            for name in _INCLUDE.findall(path.read_text(encoding="utf-8", errors="replace")):
                # the compiler's order: beside the including file, then below the root; the rest is its to report
                places = (path.parent / name, self.folder() / name)
                waiting += [Path(os.path.normpath(place)) for place in places if place.is_file()][:1]
        return tuple(read)

    def stem(self) -> str:
        """Return name and hash of contents, flags, version and machine; BuildError for a file that cannot be read."""
        try:
            contents = [hashlib.sha256(path.read_bytes()).hexdigest() for path in self.inputs()]
        except OSError as error:
            text = f"op {self.name}: a source of it cannot be read ({error}); install the package again."
            raise BuildError(text) from error
        parts = [self.name, self.sources, contents, self.flags, self.libraries, self.kind]
        return f"{self.name}-{short_hash([*parts, __version__, platform.machine()])}"


def short_hash(parts: object) -> str:
    """Return 16 hex digits of the SHA-256 of ``parts`` as JSON."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


# Contraction is off because the loops say themselves where they fuse; the other two drop unread error reports.
_EXACT = ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
CPU_ADAM = OpSpec("cpu_adam", ("cpu/adam.cpp",), flags=_EXACT)
CPU_ADAGRAD = OpSpec("cpu_adagrad", ("cpu/adagrad.cpp",), flags=_EXACT)
CPU_LION = OpSpec("cpu_lion", ("cpu/lion.cpp",), flags=_EXACT)
CPU_CHECKSUM = OpSpec("cpu_checksum", ("cpu/crc32c.cpp",), instead="tables and torch")
_AIO = ("aio/aio.cpp", "aio/libaio.cpp", "aio/threads.cpp", "aio/uring.cpp")
ASYNC_IO = OpSpec("async_io", _AIO, instead="plain reads and writes on Python threads")
ASYNC_IO_MODULE = "deepspeed.client.aio_handle"
_CUDA_EXACT = ("--fmad=false", "-Xcompiler", "-ffp-contract=off")  # as above, for device code and for host code
FUSED_ADAM = OpSpec(
    "fused_adam", ("cuda/fused_adam.cu",), flags=_CUDA_EXACT, kind="cuda", instead="torch's own fused Adam"
)
FUSED_LAMB = OpSpec("fused_lamb", ("cuda/fused_lamb.cu",), flags=_CUDA_EXACT, kind="cuda")
FUSED_LION = OpSpec("fused_lion", ("cuda/fused_lion.cu",), flags=_CUDA_EXACT, kind="cuda")
