"""One rank's space on a drive: an arena file with aligned extents, an IO engine, staging buffers, flat tensors.

The file has no name, so whatever ends the process, kill -9 included, gives the space back at once, and a folder that is
removed or cleaned up under a running job does no harm.
"""

import contextlib
import errno
import os
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from deepspeed.errors import InvalidStateError, UsageError
from deepspeed.tier.aio import AioEngine, DirectFile
from deepspeed.tier.arena import ALIGN, Arena
from deepspeed.tier.staging import Staging
from deepspeed.tier.store import Landing, TierStore, nothing, round_into
from deepspeed.tier.transfer import ARRIVED, Transfer

_GLANCE_S = 0.2  # between looks whether a reader still exists


class Extent(NamedTuple):
    """Range of the arena: ``nbytes`` bytes from ``offset``, both multiples of 4096."""

    offset: int
    nbytes: int


class Drive:
    """Arena in ``folder`` with ``staging`` buffers of at most ``piece_bytes`` beside it. Close it when nothing rests
    there any more. ``folder`` is made if only its last part is missing: a path that is wrong earlier is more often a
    drive that is not mounted. The buffers are of ``arena``, page-locked with ``pin``. ``engine``: ``queue_depth``,
    ``block_bytes`` and ``threads`` of the AioEngine. Raise UsageError for such a path, TransferError (an OSError) when
    the drive fails or is full.
    """

    def __init__(
        self,
        folder: str,
        *,
        label: str,
        staging: int,
        piece_bytes: int = 1 << 30,
        pin: bool = False,
        arena: Arena | None = None,
        **engine: Any,
    ) -> None:
        self.folder, self.label = folder, label
        self.piece_bytes = max(ALIGN, piece_bytes // ALIGN * ALIGN)
        self._file = _open_arena(folder, label)
        self._engine = AioEngine(**engine)
        self.staging = Staging(staging, arena=arena, pin=pin)
        self.backend = self._engine.backend
        # whether transfers bypass the page cache: the filesystem allows it, and native code makes use of it
        self.direct = self._file.direct and self.backend != "python"
        self.used_bytes = self.read_bytes = self.written_bytes = 0  # size of the arena, and what has moved so far
        self._allocated = self._expected = self._in_use = 0
        self._free: dict[int, list[Extent]] = {}
        # Also when nobody closes it: fds and IO threads go with the last tensor that rests here.
        self._last = weakref.finalize(self, _end, self._engine, self._file)

    def reserve(self, nbytes: int) -> Extent:
        """Reserve ``nbytes`` bytes, out of what ``expect`` has allocated while that lasts, else allocated now."""
        size = max(ALIGN, -(-nbytes // ALIGN) * ALIGN)
        if not self._free.get(size):
            self.expect(max(0, size - self._expected))
            self._expected -= size
            self._free.setdefault(size, []).append(Extent(self.used_bytes, size))
            self.used_bytes += size
        self._in_use += 1
        return self._free[size].pop()

    def expect(self, nbytes: int) -> None:
        """Allocate room for ``nbytes`` more bytes now: a full drive shows here and not in the middle of a step."""
        total = self.used_bytes + self._expected + nbytes
        if total > self._allocated:
            self._file.allocate(total)
            self._allocated = total
        self._expected += nbytes

    def free(self, extent: Extent) -> None:
        """Free ``extent`` for another reservation; with the last one in use all the space goes back to the drive."""
        self._free.setdefault(extent.nbytes, []).append(extent)
        self._in_use -= 1
        if self._in_use == 0 and self._file.size:
            self._file.clear()
            self._free.clear()
            self.used_bytes = self._allocated = self._expected = 0

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
        """Wait for transfers under way, and give space and memory back. May be called again."""
        with contextlib.suppress(OSError):  # nobody will read what a failed write should have left
            self.staging.clear()
        self._last()


def _end(engine: AioEngine, file: DirectFile) -> None:
    engine.close()
    file.close()


def _open_arena(folder: str, label: str) -> DirectFile:
    path = Path(folder)
    if os.path.isfile(folder):  # False also below a folder that may not be entered
        raise UsageError(f"{label} {folder!r} is a file; name a folder on the drive")
    if folder.startswith("~"):
        raise UsageError(f"{label} {folder!r}: '~' is not replaced here; write the whole path")
    try:
        path.mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as nameless:
            file = DirectFile(f"/dev/fd/{nameless.fileno()}")
    except FileNotFoundError:
        missing = next((p for p in reversed([path, *path.parents]) if not p.exists()), path)
        fault = f"{missing} does not exist; is the drive mounted? Make it, or name another folder"
        raise UsageError(f"{label} {folder!r}: {fault}") from None
    except OSError as error:
        refused = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
        hint = "name a folder that you may write" if refused else "check the drive"
        raise UsageError(f"{label} {folder!r}: no file can be made there ({error.strerror}); {hint}") from error
    file.path = folder  # what an error names
    return file


class Held:
    """Extent that keeps its bytes until ``release``."""

    def __init__(self, drive: Drive, extent: Extent, hurry: Callable[[], None]) -> None:
        self._drive, self._extent, self._hurry = drive, extent, hurry
        self._released = threading.Event()

    def read(self, start: int, out: torch.Tensor) -> None:
        """Fill ``out`` (host bytes) from byte ``start`` on. Raises TransferError; InvalidStateError once released."""
        self._drive.read(self._extent, start, out).wait()
        if self._released.is_set():  # perhaps written over before these bytes came
            raise InvalidStateError("a state on a drive was read for a save that had let go of it; save again")

    def release(self) -> None:
        """Let the bytes go, as they have been read; may be called again."""
        self._released.set()

    def wait(self, seconds: float) -> bool:
        """Wait until the extent is released, at most so many seconds; return whether it is."""
        if not self._released.is_set():
            self._hurry()
        return self._released.wait(seconds)


class _Ahead(NamedTuple):
    """Elements ``lo`` to ``hi`` on their way to ``inside``, a part of a staging buffer."""

    transfer: Transfer
    buffer: torch.Tensor
    inside: torch.Tensor
    lo: int
    hi: int


class Stored(TierStore):
    """State of ``numel`` elements of ``dtype`` in an extent of ``drive``, through staging buffers. A write goes on
    in the background; whatever touches the same tensor next waits for it. Failures surface there, or at ``settle``.
    """

    on_drive = True

    def __init__(self, drive: Drive, numel: int, dtype: torch.dtype, *, staging: Staging | None = None) -> None:
        self.drive, self.numel, self.dtype = drive, numel, dtype
        self.tensor = nothing((numel,), dtype)
        self.staging = staging or drive.staging
        self._extent = drive.reserve(numel * dtype.itemsize)
        self._writes: list[tuple[Transfer, int, int]] = []
        self._ahead: deque[_Ahead] = deque()
        # weakly: what nobody can read any more holds nothing, however its reader got lost
        self._readers: list[weakref.ref[Held]] = []

    def put(self, values: torch.Tensor, *, start: int = 0, zero_copy: bool = False) -> Transfer:
        if zero_copy and self._straight(values, start):
            return self._write(values, start=start)
        for lo, hi in self._pieces(start, start + values.numel()):
            buffer, inside = self._window(lo, hi)
            transfer = None
            try:
                round_into(inside, values[lo - start : hi - start]).wait()
                transfer = self._write(inside, start=lo)
            finally:
                self.staging.give(buffer, after=transfer)
        return ARRIVED

    def get(self, out: torch.Tensor, *, start: int = 0) -> Transfer:
        """Fill ``out`` (any device) with the elements from ``start`` on, using data read ahead; devices in order of
        the current stream. Host memory that lies in pages as the elements do is filled in the background.
        """
        if not self._ahead and self._straight(out, start):
            self._wait_for_writes(start, start + out.numel())
            return self.drive.read(self._extent, start * self.dtype.itemsize, out)
        self._load(out, start)
        return ARRIVED

    def _load(self, out: torch.Tensor, start: int) -> None:
        end = start + out.numel()
        if self._ahead and (self._ahead[0].lo != start or end < self._ahead[-1].hi):
            self.forget_ahead()
        self._wait_for_writes(start, end)
        waiting = deque(p for p in self._pieces(start, end) if not self._ahead or p[0] >= self._ahead[-1].hi)
        while self._ahead or waiting:
            while waiting and (not self._ahead or self.staging.has_room()):
                self._start(*waiting.popleft())
            piece, copied = self._ahead.popleft(), None
            beside = out.device.type != "cpu" and piece.inside.is_pinned()  # the program need not wait for the copy
            try:
                piece.transfer.wait()
                out[piece.lo - start : piece.hi - start].copy_(piece.inside, non_blocking=beside)
                copied = Landing(piece.inside.nbytes) if beside else None
            finally:
                self.staging.give(piece.buffer, after=copied)

    def read_ahead(self) -> bool:
        if not self._ahead and all(transfer.done() for transfer, _, _ in self._writes):
            self.settle()
            for lo, hi in self._pieces(0, self.numel):
                if not self.staging.has_room():
                    break
                self._start(lo, hi)
        return bool(self._ahead)

    def forget_ahead(self) -> None:
        while self._ahead:
            piece = self._ahead.popleft()
            self.staging.give(piece.buffer, after=piece.transfer)

    @contextlib.contextmanager
    def open(self, *, write: bool) -> Iterator[torch.Tensor]:
        values = torch.empty(self.numel, dtype=self.dtype, device="cpu")
        self._load(values, 0)
        yield values
        if write:
            self.put(values)

    def _straight(self, memory: torch.Tensor, start: int) -> bool:
        """Return whether bytes can travel between ``memory`` and the drive without a copy, past the page cache."""
        same = memory.device.type == "cpu" and memory.dtype == self.dtype and memory.is_contiguous()
        return same and (memory.data_ptr() - start * self.dtype.itemsize) % ALIGN == 0

    def _write(self, values: torch.Tensor, *, start: int) -> Transfer:
        stop = start + values.numel()
        self.changes += 1
        self._wait_for_readers()
        self.forget_ahead()
        self._heal(start, stop)
        self._wait_for_writes(start, stop)
        transfer = self.drive.write(self._extent, start * self.dtype.itemsize, values)
        self._writes.append((transfer, start, stop))
        return transfer

    def beside(self, nbytes: int) -> "Stored":
        return Stored(self.drive, nbytes, torch.uint8)

    def settle(self) -> None:
        """Wait for the writes under way. Raise TransferError when one failed."""
        self._wait_for_writes(0, self.numel)

    def hold(self, hurry: Callable[[], None]) -> Held:
        """Hold the present bytes for any thread: the next write calls ``hurry`` and waits. Raise TransferError."""
        self.settle()
        reader = Held(self.drive, self._extent, hurry)
        live = [ref for ref in self._readers if (earlier := ref()) is not None and not earlier._released.is_set()]
        self._readers = [*live, weakref.ref(reader)]  # what is never written would keep those of every save
        return reader

    def drop(self) -> None:
        self._wait_for_readers()
        self.forget_ahead()
        with contextlib.suppress(OSError):
            self.settle()
        self.drive.free(self._extent)

    def _wait_for_readers(self) -> None:
        while self._readers:
            if (reader := self._readers[-1]()) is None or reader.wait(_GLANCE_S):
                self._readers.pop()
            reader = None

    def _heal(self, start: int, stop: int) -> None:
        """Forget failed writes of values that are about to be written again."""
        for entry in [w for w in self._writes if start <= w[1] and w[2] <= stop and w[0].done()]:
            with contextlib.suppress(OSError):
                entry[0].wait()
            self._writes.remove(entry)

    def _wait_for_writes(self, start: int, stop: int) -> None:
        # Whole pages: two writes that share one must not overtake each other.
        slack = ALIGN // self.dtype.itemsize
        for entry in [w for w in self._writes if w[1] < stop + slack and start < w[2] + slack or w[0].done()]:
            entry[0].wait()  # one that failed stays, so that nobody reads what it should have replaced
            self._writes.remove(entry)

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        piece_numel = max(1, self.drive.piece_bytes // self.dtype.itemsize)
        while start < stop:
            end = min(stop, (start // piece_numel + 1) * piece_numel)
            yield start, end
            start = end

    def _start(self, lo: int, hi: int) -> None:
        buffer, inside = self._window(lo, hi)
        try:
            transfer = self.drive.read(self._extent, lo * self.dtype.itemsize, inside)
        except BaseException:
            self.staging.give(buffer)
            raise
        self._ahead.append(_Ahead(transfer, buffer, inside, lo, hi))

    def _window(self, lo: int, hi: int) -> tuple[torch.Tensor, torch.Tensor]:
        # The same place within a page as in the file, so that whole pages can bypass the page cache.
        width = self.dtype.itemsize
        buffer, shift = self.staging.take((hi - lo) * width + ALIGN), lo * width % ALIGN
        return buffer, buffer[shift : shift + (hi - lo) * width].view(self.dtype)
