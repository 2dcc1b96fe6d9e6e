"""One rank's space on a drive: an arena file with aligned regions, an IO engine, staging buffers.

The file loses its name as soon as it is open, so whatever ends the process, kill -9 included, gives the space back at
once, and a folder that is removed or cleaned up under a running job does no harm. An empty file that a process left
behind when it died in the few instructions before that is removed by the next one.
"""

import contextlib
import errno
import os
import uuid
import weakref
from dataclasses import dataclass
from pathlib import Path

import torch

from deepspeed.errors import UsageError
from deepspeed.tier.aio import AioEngine, DirectFile, Transfer
from deepspeed.tier.aligned import ALIGN
from deepspeed.tier.staging import Staging

_SUFFIX = ".dsarena"


@dataclass(frozen=True)
class AioSettings:
    """``block_bytes``: size of one request; ``queue_depth``: requests under way; ``threads``: for what bypasses the
    queue.
    """

    block_bytes: int = 1 << 20
    queue_depth: int = 32
    threads: int = 1


@dataclass(frozen=True)
class Region:
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
        self._free: dict[int, list[Region]] = {}
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

    def reserve(self, nbytes: int) -> Region:
        """Space for ``nbytes`` bytes, out of what ``expect`` has allocated while that lasts, else allocated on the
        drive now.
        """
        size = max(ALIGN, -(-nbytes // ALIGN) * ALIGN)
        self._in_use += 1
        if self._free.get(size):
            return self._free[size].pop()
        self._expected = max(0, self._expected - size)
        self._grow(size)
        region = Region(self._end, size)
        self._end += size
        return region

    def expect(self, nbytes: int) -> None:
        """Allocate room for ``nbytes`` more bytes now: a full drive shows here and not in the middle of a step."""
        self._expected += nbytes
        self._grow(0)

    def _grow(self, nbytes: int) -> None:
        wanted = self._end + nbytes + self._expected
        if wanted > self._allocated:
            self._file.allocate(wanted)
            self._allocated = wanted

    def free(self, region: Region) -> None:
        """``region`` may be reserved again; with the last one in use all the space goes back to the drive."""
        self._free.setdefault(region.nbytes, []).append(region)
        self._in_use -= 1
        if self._in_use == 0 and self._file.size:
            self._file.clear()
            self._free.clear()
            self._end = self._allocated = self._expected = 0

    def read(self, region: Region, start: int, out: torch.Tensor) -> Transfer:
        """Start filling ``out`` (a host tensor) from byte ``start`` of ``region``."""
        assert start + out.nbytes <= region.nbytes, "a read beyond its region"
        self.read_bytes += out.nbytes
        return self._engine.read(self._file, region.offset + start, out)

    def write(self, region: Region, start: int, values: torch.Tensor) -> Transfer:
        """Start writing ``values`` (a host tensor) to byte ``start`` of ``region``."""
        assert start + values.nbytes <= region.nbytes, "a write beyond its region"
        self.written_bytes += values.nbytes
        return self._engine.write(self._file, region.offset + start, values)

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
    sweep(folder)


def _open_arena(folder: str, label: str) -> DirectFile:
    for _ in range(3):
        path = os.path.join(folder, f"{uuid.uuid4().hex}{_SUFFIX}")
        try:
            file = DirectFile(path, create=True)
        except FileNotFoundError:
            continue  # somebody swept it before it was locked
        except OSError as error:
            hint = (
                "name a folder that you may write"
                if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
                else "check the drive"
            )
            raise UsageError(f"{label} {folder!r}: no file can be made there ({error.strerror}); {hint}") from error
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        return file
    raise UsageError(f"{label} {folder!r}: files vanish from there as soon as they are made; name another folder")


def sweep(folder: str) -> int:
    """Remove the names of arenas in ``folder`` that are left over; returns how many.

    A living process needs its arena's name for an instant only, and tries another one when it loses it then, so nothing
    that anybody uses is touched.
    """
    removed = 0
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            if entry.name.endswith(_SUFFIX) and entry.is_file(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    os.unlink(entry.path)
                    removed += 1
    return removed
