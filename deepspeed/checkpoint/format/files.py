"""Chunk files: the bytes of a checkpoint's boxes, streamed to and from the drive, with checksums on the way.

docs/checkpoint-format.md describes the files. Which tensor a box belongs to is the manifest's matter.
"""

import contextlib
import errno
import os
import stat
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import torch

from deepspeed.checkpoint.format.checksum import copy_with_crc32c, crc32c
from deepspeed.checkpoint.format.manifest import ALIGN_BYTES, PIECE_BYTES, Box
from deepspeed.errors import CheckpointError
from deepspeed.tier.aio import AioEngine, DirectFile
from deepspeed.tier.aligned import ALIGN, aligned_empty
from deepspeed.tier.staging import Staging
from deepspeed.tier.transfer import Transfer

_BUFFERS = 4
_BUFFER_BYTES = 4 << 20
_AHEAD_BYTES = 32 << 20  # what the system is asked to read ahead
_OPEN_FILES = 32
_NAP_S = 0.1
_WRITING = {
    errno.ENOSPC: "the filesystem is full; free space there or save to another one",
    errno.EDQUOT: "the quota is used up; free space there or save to another filesystem",
    errno.EFBIG: "files may not grow that far; raise the limit (ulimit -f) or save to another filesystem",
    errno.EIO: "the disk failed; the kernel log (dmesg) says more",
    errno.EROFS: "the filesystem cannot be written; save to another one",
    errno.EACCES: "its folder cannot be written by this user; save to another one",
}
_READING = {
    errno.ENOENT: "it is missing; fetch it again from where the checkpoint was saved, or use another checkpoint",
    errno.EACCES: "this user may not read it; change its permissions",
    errno.EIO: "the disk failed; the kernel log (dmesg) says more",
    errno.ENODATA: "it became shorter while it was read",
}

_Self = TypeVar("_Self", bound="ChunkWriter | ChunkReader")


@dataclass
class Placement:
    """Where a box went: its first byte, its bytes up to the next box, the checksum of every PIECE_BYTES of them."""

    offset: int
    extent: int = 0
    crcs: list[int] = field(default_factory=list)


def unwritable(path: Path, error: OSError) -> CheckpointError:
    """The error for a file or folder that cannot be written, with advice."""
    return _explained(f"{path} cannot be written", error, _WRITING)


def _explained(what: str, error: OSError, advice: dict[int, str]) -> CheckpointError:
    code = error.errno or errno.EIO
    return CheckpointError(f"{what}: {os.strerror(code)}{f'; {advice[code]}' if code in advice else ''}")


def _as_bytes(values: torch.Tensor) -> torch.Tensor:
    if values.layout is not torch.strided or not values.is_contiguous() or values.is_conj() or values.is_neg():
        shape, strides = tuple(values.shape), values.stride()
        raise ValueError(f"chunk files take contiguous tensors, not {shape} {values.dtype} of strides {strides}")
    return values.detach().reshape(-1).view(torch.uint8)


class ChunkWriter:
    """A new file of boxes, written from front to back through a few staging buffers.

    ``path`` must not exist. ``rate_bytes``: at most so many bytes a second (0: no limit); may be changed while writing.
    ``expect_bytes``: room for so many bytes is reserved at once, which tells of a full disk early; the file may become
    longer or shorter. One thread at a time may use it.

    Every method raises CheckpointError with the path and what to do when the file cannot be written; ``abort`` is all
    that is left then. As a context manager it closes, or aborts on an exception.
    """

    def __init__(self, path: str | os.PathLike[str], *, rate_bytes: int = 0, expect_bytes: int = 0) -> None:
        self.path = Path(path)
        self.rate_bytes = rate_bytes
        self.nbytes = 0  # written so far, padding included
        self._boxes: list[Placement] = []
        self._closed = False
        self._buffer: torch.Tensor | None = None
        self._used = 0
        self._due = 0.0
        self._staging = Staging(_BUFFERS)
        self._engine = AioEngine(queue_depth=2 * _BUFFERS)
        try:
            with self._named():
                os.close(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666))
                self._file = DirectFile(self.path)
        except CheckpointError:
            self._engine.close()
            raise
        try:
            with self._named():
                self._file.allocate(-(-expect_bytes // ALIGN) * ALIGN)
        except CheckpointError:
            self.abort()
            raise

    def append(self, values: torch.Tensor | Iterable[torch.Tensor]) -> None:
        """A box of the bytes of ``values`` (contiguous, on the host or a device), which may also come in parts."""
        self._check_open()
        self._pad(ALIGN_BYTES)
        self._boxes.append(Placement(self.nbytes))
        for part in [values] if isinstance(values, torch.Tensor) else values:
            self._put(_as_bytes(part))

    def close(self) -> list[Placement]:
        """Pad the file to whole pages and bring it to the disk; the boxes in order. On failure the file is removed."""
        self._check_open()
        try:
            self._pad(ALIGN)
            self._send()
            with self._named():
                self._staging.settle()
                with self.path.open("r+b") as file:  # fsync covers the file, whoever wrote it
                    file.truncate(self.nbytes)
                    os.fsync(file.fileno())
        except BaseException:
            self.abort()
            raise
        self._release()
        return self._boxes

    def abort(self) -> None:
        """Remove the file, when what is under way has ended; does nothing after :meth:`close` or twice."""
        if self._closed:
            return
        with contextlib.suppress(OSError):  # what fails from here on is of a file that nobody wants
            self._staging.settle()
        self._release()
        with contextlib.suppress(OSError):
            self.path.unlink()

    def _release(self) -> None:
        self._closed, self._buffer = True, None
        self._engine.close()
        self._file.close()
        self._staging.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(f"{self.path}: the file is closed")

    def _pad(self, multiple: int) -> None:
        if missing := -self.nbytes % multiple:
            self._put(torch.zeros(missing, dtype=torch.uint8))

    def _put(self, data: torch.Tensor) -> None:
        """Into the staging buffers, and into the checksums of the last box."""
        at, total = 0, data.numel()
        while at < total:
            if self._buffer is None:
                with self._named():
                    self._buffer = self._staging.take(_BUFFER_BYTES)
                self._used = 0
            box = self._boxes[-1]
            inside = box.extent % PIECE_BYTES  # of the piece that is not complete yet
            size = min(total - at, _BUFFER_BYTES - self._used, PIECE_BYTES - inside)
            target, source = self._buffer[self._used : self._used + size], data[at : at + size]
            crc = box.crcs.pop() if inside else 0
            if source.device.type == "cpu":
                crc = copy_with_crc32c(target, source, crc)
            else:
                crc = crc32c(target.copy_(source), crc)
            box.crcs.append(crc)
            box.extent += size
            at, self._used, self.nbytes = at + size, self._used + size, self.nbytes + size
            if self._used == _BUFFER_BYTES:
                self._send()

    def _send(self) -> None:
        if self._buffer is None:
            return
        self._keep_to_rate(self._used)
        buffer, self._buffer = self._buffer, None
        transfer: Transfer | None = None
        try:
            with self._named():
                transfer = self._engine.write(self._file, self.nbytes - self._used, buffer[: self._used])
        finally:
            self._staging.give(buffer, after=transfer)

    def _keep_to_rate(self, nbytes: int) -> None:
        """Wait until ``nbytes`` more may go. Time that was not used is not made up for."""
        now = time.monotonic()
        while self.rate_bytes and (left := self._due - now) > 0:
            time.sleep(min(left, _NAP_S))  # short naps: the rate may be lifted meanwhile
            now = time.monotonic()
        if self.rate_bytes:
            self._due = max(self._due, now) + nbytes / self.rate_bytes

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise unwritable(self.path, error) from error

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None and not self._closed:
                self.close()
        finally:
            self.abort()  # does nothing after a good end


class Wanted(NamedTuple):
    """Bytes of a box from ``lo`` on, for ``out`` (uint8, contiguous, on any device); ``what`` names them in errors."""

    box: Box
    lo: int
    out: torch.Tensor
    what: str


class _Piece(NamedTuple):
    """A checksummed piece of a file, and who wants a part of it."""

    file: str
    start: int
    end: int
    crc: int
    wanted: Wanted


class ChunkReader:
    """Reads parts of boxes from the chunk files of a folder, whole pieces at a time, and lets no byte out unchecked.

    One thread at a time may use it.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self._open: OrderedDict[str, int] = OrderedDict()
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def read_many(self, wanted: Iterable[tuple[Box, int, torch.Tensor, str]]) -> None:
        """Fill many tensors, in the order of the files. Each is (box, first byte, uint8 tensor, name for errors).

        Raises CheckpointError that names file, offset and ``what`` when a file is missing, cut, unreadable or damaged;
        tensors may be filled in part then, but only with bytes that were checked. Raises ValueError for a tensor that
        cannot be filled.
        """
        pieces = sorted(
            (piece for each in wanted for piece in self._pieces(Wanted(*each))), key=lambda p: (p.file, p.start)
        )
        if pieces and not self._buffer.numel():
            self._buffer = aligned_empty(PIECE_BYTES)
        checked, asked, ahead_bytes = ("", -1, 0), 0, 0
        for index, piece in enumerate(pieces):
            while asked < len(pieces) and (asked <= index or ahead_bytes < _AHEAD_BYTES):
                later, asked = pieces[asked], asked + 1
                ahead_bytes += later.end - later.start
                with self._named(later):
                    os.posix_fadvise(self._file(later), later.start, later.end - later.start, os.POSIX_FADV_WILLNEED)
            ahead_bytes -= piece.end - piece.start
            values = self._buffer[: piece.end - piece.start]
            if checked != (piece.file, piece.start, piece.crc):  # parts of one piece may go to several tensors
                with self._named(piece):
                    self._load(piece, values)
                checked = (piece.file, piece.start, piece.crc)
            box, lo, out, _ = piece.wanted
            begin, end = max(lo, piece.start - box.offset), min(lo + out.numel(), piece.end - box.offset)
            at = box.offset - piece.start
            out.view(-1)[begin - lo : end - lo].copy_(values[begin + at : end + at])

    def close(self) -> None:
        """Close the files; may be called again."""
        while self._open:
            os.close(self._open.popitem()[1])
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def _pieces(self, wanted: Wanted) -> Iterator[_Piece]:
        box, lo, out, what = wanted
        hi = lo + out.numel()
        if out.dtype is not torch.uint8 or not out.is_contiguous():
            raise ValueError(f"{what}: bytes go to contiguous uint8 tensors, not {tuple(out.shape)} {out.dtype}")
        if os.path.basename(box.file) != box.file or box.offset < 0 or len(box.crcs) != -(-box.extent // PIECE_BYTES):
            raise CheckpointError(
                f"{what}: the manifest in {self.folder} gives it an impossible place ({box.file!r} at {box.offset})"
            )
        if not 0 <= lo <= hi <= box.extent:
            raise CheckpointError(
                f"{what}: bytes {lo} to {hi} are not in its box of {box.extent} bytes in {self.folder / box.file}"
            )
        for index in range(lo // PIECE_BYTES, -(-hi // PIECE_BYTES) if lo < hi else 0):
            start, end = index * PIECE_BYTES, min((index + 1) * PIECE_BYTES, box.extent)
            yield _Piece(box.file, box.offset + start, box.offset + end, box.crcs[index], wanted)

    def _load(self, piece: _Piece, values: torch.Tensor) -> None:
        """Read and check the bytes of ``piece``."""
        fd, path, (file, start, end, crc, (_, _, _, what)) = self._file(piece), self.folder / piece.file, piece
        array: Any = values.numpy()
        memory, size = memoryview(array), os.fstat(fd).st_size
        if size < end:
            raise CheckpointError(
                f"{path} is cut: it has {size} bytes, {what} lies up to byte {end}; fetch it again from where the "
                "checkpoint was saved, or use another checkpoint"
            )
        at = 0
        while at < len(memory):
            if not (count := os.preadv(fd, [memory[at:]], start + at)):
                raise OSError(errno.ENODATA, os.strerror(errno.ENODATA), file)
            at += count
        if (actual := crc32c(values)) != crc:
            raise CheckpointError(
                f"{path} is damaged between bytes {start} and {end}, where {what} lies: its checksum is {actual:08x}, "
                f"not {crc:08x}; fetch it again from where the checkpoint was saved, or use another checkpoint"
            )

    def _file(self, piece: _Piece) -> int:
        """A descriptor of its file, of which a few stay open."""
        fd = self._open.pop(piece.file, None)
        if fd is None:  # opening a pipe would wait for somebody who writes
            fd = os.open(self.folder / piece.file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        self._open[piece.file] = fd
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise CheckpointError(
                f"{self.folder / piece.file} is not a regular file; fetch it again from where the checkpoint was saved"
            )
        if len(self._open) > _OPEN_FILES:
            os.close(self._open.popitem(last=False)[1])
        return fd

    @contextlib.contextmanager
    def _named(self, piece: _Piece) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            what = f"{self.folder / piece.file}, where {piece.wanted.what} lies, cannot be read"
            raise _explained(what, error, _READING) from error

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
