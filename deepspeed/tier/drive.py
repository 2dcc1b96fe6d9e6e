"""One rank's space on a drive: an arena file with aligned extents, an IO engine, staging buffers.

The file has no name, so whatever ends the process, kill -9 included, gives the space back at
once, and a folder that is removed or cleaned up under a running job does no harm.
"""

import contextlib
import errno
import tempfile
import weakref
from dataclasses import dataclass
from pathlib import Path

import torch

from deepspeed.errors import UsageError
from deepspeed.tier.aio import AioEngine, DirectFile, Transfer
from deepspeed.tier.aligned import ALIGN
from deepspeed.tier.staging import Staging


@dataclass(frozen=True)
class AioSettings:
    """``block_bytes`` of one request; ``queue_depth`` requests under way; ``threads`` for what bypasses the queue."""

    block_bytes: int = 1 << 20
    queue_depth: int = 32
    threads: int = 1


@dataclass(frozen=True)
class Extent:
    """``nbytes`` bytes from ``offset`` of the arena, both multiples of 4096."""

    offset: int
    nbytes: int


class Drive:
    """An arena in ``folder``, ``staging`` buffers of at most ``piece_bytes`` beside it. Close it when nothing rests
    there any more.

    ``folder`` is made if only its last part is missing: a path that is wrong earlier is more often a drive that is not
    mounted. Raises UsageError for such a path, TransferError (an OSError) when the drive fails or is full.
    """

    def __init__(
        self, folder: str, *, label: str, aio: AioSettings, staging: int, piece_bytes: int = 1 << 30, pin: bool = False
    ) -> None:
        self.folder = folder
        self.label = label
        self.piece_bytes = max(ALIGN, piece_bytes // ALIGN * ALIGN)
        _make_folder(folder, label)
        self._file = _open_arena(folder, label)
        self._engine = AioEngine(
            queue_depth=aio.queue_depth, block_bytes=-(-aio.block_bytes // ALIGN) * ALIGN, threads=aio.threads
        )
        self.staging = Staging(staging, pin=pin)
        self._end = self._allocated = self._expected = self._in_use = 0
        self._free: dict[int, list[Extent]] = {}
        self.read_bytes = 0
        self.written_bytes = 0
        # Also when nobody closes it: fds and IO threads go with the last tensor that rests here.
        self._last = weakref.finalize(self, _end, self._engine, self._file)

    @property
    def backend(self) -> str:
        """How bytes travel: io_uring, libaio, threads or python."""
        return self._engine.backend

    @property
    def direct(self) -> bool:
        """Whether transfers bypass the page cache: the filesystem allows it, and native code makes use of it."""
        return self._file.direct and self.backend != "python"

    @property
    def used_bytes(self) -> int:
        """Size of the arena."""
        return self._end

    def reserve(self, nbytes: int) -> Extent:
        """Space for ``nbytes`` bytes, out of what ``expect`` has allocated while that lasts, else allocated now."""
        size = max(ALIGN, -(-nbytes // ALIGN) * ALIGN)
        self._in_use += 1
        if self._free.get(size):
            return self._free[size].pop()
        self._expected = max(0, self._expected - size)
        self._grow(size)
        extent = Extent(self._end, size)
        self._end += size
        return extent

    def expect(self, nbytes: int) -> None:
        """Allocate room for ``nbytes`` more bytes now: a full drive shows here and not in the middle of a step."""
        self._expected += nbytes
        self._grow(0)

    def _grow(self, nbytes: int) -> None:
        total = self._end + nbytes + self._expected
        if total > self._allocated:
            self._file.allocate(total)
            self._allocated = total

    def free(self, extent: Extent) -> None:
        """``extent`` may be reserved again; with the last one in use all the space goes back to the drive."""
        self._free.setdefault(extent.nbytes, []).append(extent)
        self._in_use -= 1
        if self._in_use == 0 and self._file.size:
            self._file.clear()
            self._free.clear()
            self._end = self._allocated = self._expected = 0

    def read(self, extent: Extent, start: int, out: torch.Tensor) -> Transfer:
        """Start filling ``out`` (a host tensor) from byte ``start`` of ``extent``."""
        assert start + out.nbytes <= extent.nbytes, "a read beyond its extent"
        self.read_bytes += out.nbytes
        return self._engine.read(self._file, extent.offset + start, out)

    def write(self, extent: Extent, start: int, values: torch.Tensor) -> Transfer:
        """Start writing ``values`` (a host tensor) to byte ``start`` of ``extent``."""
        assert start + values.nbytes <= extent.nbytes, "a write beyond its extent"
        self.written_bytes += values.nbytes
        return self._engine.write(self._file, extent.offset + start, values)

    def close(self) -> None:
        """Wait for what is under way and give space and memory back. May be called again."""
        with contextlib.suppress(OSError):  # nobody will read what a failed write should have left
            self.staging.clear()
        self._last()


def _end(engine: AioEngine, file: DirectFile) -> None:
    engine.close()
    file.close()


def _make_folder(folder: str, label: str) -> None:
    path = Path(folder)
    if path.is_file():
        raise UsageError(f"{label} {folder!r} is a file; name a folder on the drive")
    if folder.startswith("~"):
        raise UsageError(f"{label} {folder!r}: '~' is not replaced here; write the whole path")
    try:
        path.mkdir(exist_ok=True)
    except FileNotFoundError:
        missing = next(p for p in reversed([path, *path.parents]) if not p.exists())
        raise UsageError(
            f"{label} {folder!r}: {missing} does not exist; is the drive mounted? Make it, or name another folder"
        ) from None
    except OSError as error:
        raise UsageError(
            f"{label} {folder!r} cannot be used: {error.strerror}; name a folder on the drive that you may write"
        ) from error


def _open_arena(folder: str, label: str) -> DirectFile:
    try:
        with tempfile.TemporaryFile(dir=folder) as nameless:
            file = DirectFile(f"/dev/fd/{nameless.fileno()}")
    except OSError as error:
        refused = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
        hint = "name a folder that you may write" if refused else "check the drive"
        raise UsageError(f"{label} {folder!r}: no file can be made there ({error.strerror}); {hint}") from error
    file.path = folder  # what an error names
    return file
