"""Chunk files: the bytes of a checkpoint's boxes, streamed to and from the drive around the page cache, with checksums
on the way.

docs/checkpoint-format.md describes the files. Here is only what moves bytes; which tensor a box belongs to is the
manifest's matter.
"""

import contextlib
import ctypes
import errno
import functools
import mmap
import os
import stat
import time
from collections import OrderedDict, deque
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
from deepspeed.tier.aligned import ALIGN
from deepspeed.tier.staging import Staging
from deepspeed.tier.transfer import Transfer

_BUFFERS = 4
_BUFFER_BYTES = 4 << 20
_GAP_BYTES = 64 << 10  # read over a gap of so many bytes rather than begin another transfer
_OPEN_FILES = 32
_NAP_S = 0.1
_LOWEST_BIT = bytes(value & 1 for value in range(256))
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


@dataclass(frozen=True)
class Placement:
    """Where a box went: its first byte, its bytes up to the next box, the checksum of every PIECE_BYTES of them."""

    offset: int
    extent: int
    crcs: tuple[int, ...]


def _why(error: OSError, advice: dict[int, str]) -> str:
    code = error.errno or errno.EIO
    return os.strerror(code) + (f"; {advice[code]}" if code in advice else "")


def unwritable(path: Path, error: OSError) -> CheckpointError:
    """The error for a file or folder that cannot be written, with advice."""
    return CheckpointError(f"{path} cannot be written: {_why(error, _WRITING)}")


def _as_bytes(values: torch.Tensor) -> torch.Tensor:
    if values.layout is not torch.strided or not values.is_contiguous() or values.is_conj() or values.is_neg():
        raise ValueError(
            f"chunk files take contiguous tensors, not {tuple(values.shape)} {values.dtype} of strides "
            f"{values.stride()}"
        )
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
        self._boxes: list[_Open] = []
        self._inside = self._closed = False
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

    def append(self, values: torch.Tensor) -> int:
        """A box of the bytes of ``values`` (contiguous, on the host or a device); its index among the placements."""
        self.begin()
        self.add(values)
        return self.end()

    def begin(self) -> None:
        """Begin a box, whose values come by :meth:`add`."""
        if self._inside or self._closed:
            raise ValueError(
                f"{self.path}: {'the file is closed' if self._closed else 'a box is still open; end it first'}"
            )
        self._pad(ALIGN_BYTES)
        self._boxes.append(_Open(self.nbytes))
        self._inside = True

    def add(self, values: torch.Tensor) -> None:
        """The next bytes of the open box; ``values`` may change as soon as this returns."""
        if not self._inside:
            raise ValueError(f"{self.path}: values outside of a box; begin one first")
        self._put(_as_bytes(values))

    def end(self) -> int:
        """End the open box; its index among the placements."""
        self._inside = False
        return len(self._boxes) - 1

    def close(self) -> list[Placement]:
        """Pad the file to whole pages and bring it to the disk; the placement of every box in order. On failure the
        file is removed.
        """
        if self._inside or self._closed:
            raise ValueError(
                f"{self.path}: {'the file is closed' if self._closed else 'a box is still open; end it first'}"
            )
        try:
            self._pad(ALIGN)
            self._send()
            with self._named():
                self._staging.settle()
                # a descriptor of its own: fsync covers the file, whoever wrote it
                fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
                try:
                    if os.fstat(fd).st_size != self.nbytes:
                        os.ftruncate(fd, self.nbytes)
                    os.fsync(fd)
                finally:
                    os.close(fd)
        except BaseException:
            self.abort()
            raise
        self._release()
        return [Placement(box.offset, box.extent, tuple(box.crcs)) for box in self._boxes]

    def abort(self) -> None:
        """Remove the file, when what is under way has ended; does nothing after :meth:`close` or twice."""
        if self._closed:
            return
        # what fails from here on is of a file that nobody wants
        with contextlib.suppress(OSError):
            self._staging.settle()
        self._release()
        with contextlib.suppress(OSError):
            self.path.unlink()

    def _release(self) -> None:
        self._closed, self._inside, self._buffer = True, False, None
        self._engine.close()
        self._file.close()
        self._staging.clear()

    def _pad(self, multiple: int) -> None:
        missing = -self.nbytes % multiple
        if missing:
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
            size = min(total - at, _BUFFER_BYTES - self._used, box.left)
            target, source = self._buffer[self._used : self._used + size], data[at : at + size]
            if source.device.type == "cpu":
                crc = copy_with_crc32c(target, source, box.crc)
            else:
                target.copy_(source)
                crc = crc32c(target, box.crc)
            box.take(size, crc)
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
        if error is not None:
            self.abort()
        elif not self._closed:
            try:
                self.close()
            finally:
                self.abort()  # of a box that was left open; does nothing after a good end


@dataclass
class _Open:
    """A box whose extent may still grow."""

    offset: int
    extent: int = 0
    crcs: list[int] = field(default_factory=list)

    @property
    def left(self) -> int:
        """Bytes up to the end of the current piece."""
        return PIECE_BYTES - self.extent % PIECE_BYTES

    @property
    def crc(self) -> int:
        """Checksum of the current piece so far."""
        return self.crcs[-1] if self.extent % PIECE_BYTES else 0

    def take(self, nbytes: int, crc: int) -> None:
        """``nbytes`` more, which make the current piece's checksum ``crc``."""
        if self.extent % PIECE_BYTES:
            self.crcs[-1] = crc
        else:
            self.crcs.append(crc)
        self.extent += nbytes


class Wanted(NamedTuple):
    """Bytes of a box from ``lo`` on, for ``out`` (uint8, contiguous, on any device); ``what`` names them in errors."""

    box: Box
    lo: int
    out: torch.Tensor
    what: str


class _Piece(NamedTuple):
    """A checksummed piece, and the part of ``wanted`` that is in it."""

    start: int  # in the file
    end: int
    crc: int
    wanted: Wanted


@dataclass
class _Span:
    """One transfer: pieces that are near each other in a file, in order, with whole pages around them."""

    file: str
    start: int
    end: int
    pieces: list[_Piece]


class ChunkReader:
    """Reads parts of boxes from the chunk files of a folder, whole pieces at a time, and lets no byte out before it is
    checked.

    ``window_bytes``: memory for reading ahead; two pieces (8 MiB) are needed at least. One thread at a time may use it.
    """

    def __init__(self, folder: str | os.PathLike[str], *, window_bytes: int = 32 << 20) -> None:
        self.folder = Path(folder)
        self._count = _BUFFERS if window_bytes >= _BUFFERS * (PIECE_BYTES + 2 * ALIGN) else 2
        self._span_bytes = max(PIECE_BYTES + 2 * ALIGN, window_bytes // self._count // ALIGN * ALIGN)
        self._staging = Staging(self._count)
        self._engine = AioEngine(queue_depth=32)
        self._open: OrderedDict[str, _Source] = OrderedDict()

    def read(self, box: Box, lo: int, out: torch.Tensor, what: str) -> None:
        """Fill ``out`` (uint8) with the bytes of ``box`` from ``lo`` on. Raises as :meth:`read_many`."""
        self.read_many([(box, lo, out, what)])

    def read_many(self, wanted: Iterable[tuple[Box, int, torch.Tensor, str]]) -> None:
        """Fill many tensors, in the order of the files. Each is (box, first byte, uint8 tensor to fill, name for
        errors).

        Raises CheckpointError that names file, offset and ``what`` when a file is missing, cut, unreadable or damaged;
        tensors may be filled in part then, but only with bytes that were checked. Raises ValueError for a tensor that
        cannot be filled.
        """
        waiting: deque[tuple[_Span, torch.Tensor, Transfer | None]] = deque()
        try:
            for span in self._spans(Wanted(*each) for each in wanted):
                if len(waiting) == self._count:
                    self._finish(*waiting.popleft())
                buffer = self._staging.take(self._span_bytes)
                waiting.append((span, buffer, None))
                waiting[-1] = (span, buffer, self._begin(span, buffer))
            while waiting:
                self._finish(*waiting.popleft())
        finally:
            for _, buffer, transfer in waiting:  # after a failure
                self._staging.give(buffer, after=transfer)
            with contextlib.suppress(OSError):
                self._staging.settle()

    def close(self) -> None:
        """Close the files; may be called again."""
        self._engine.close()
        while self._open:
            self._open.popitem()[1].close()
        self._staging.clear()

    def _spans(self, wanted: Iterable[Wanted]) -> list[_Span]:
        pieces = sorted(
            (piece for each in wanted for piece in self._pieces(each)), key=lambda p: (p.wanted.box.file, p.start)
        )
        spans: list[_Span] = []
        for piece in pieces:
            start, end = piece.start // ALIGN * ALIGN, -(-piece.end // ALIGN) * ALIGN
            last = spans[-1] if spans else None
            if (
                last is not None
                and last.file == piece.wanted.box.file
                and start <= last.end + _GAP_BYTES
                and max(end, last.end) - last.start <= self._span_bytes
            ):
                last.end = max(end, last.end)
                last.pieces.append(piece)
            else:
                spans.append(_Span(piece.wanted.box.file, start, end, [piece]))
        return spans

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
        if lo == hi:
            return
        for index in range(lo // PIECE_BYTES, -(-hi // PIECE_BYTES)):
            start, end = index * PIECE_BYTES, min((index + 1) * PIECE_BYTES, box.extent)
            yield _Piece(box.offset + start, box.offset + end, box.crcs[index], wanted)

    def _begin(self, span: _Span, buffer: torch.Tensor) -> Transfer | None:
        """Start reading; None when the page cache had all of it."""
        what = span.pieces[0].wanted.what
        source = self._source(span.file, what)
        needed = max(piece.end for piece in span.pieces)
        if source.size < needed:
            blamed = next(piece for piece in span.pieces if piece.end > source.size)
            raise CheckpointError(
                f"{source.path} is cut: it has {source.size} bytes, {blamed.wanted.what} lies up to byte "
                f"{blamed.end}; fetch it again from "
                "where the checkpoint was saved, or use another checkpoint"
            )
        nbytes = min(span.end, source.size) - span.start
        got = source.cached(span.start, buffer[:nbytes])
        if got == nbytes:
            return None
        with self._named(source.path, what):
            return self._engine.read(source.file, span.start + got, buffer[got:nbytes])

    def _finish(self, span: _Span, buffer: torch.Tensor, transfer: Transfer | None) -> None:
        try:
            path = self.folder / span.file
            if transfer is not None:
                with self._named(path, span.pieces[0].wanted.what):
                    transfer.wait()
            checked = (-1, -1)
            for piece in span.pieces:
                values = buffer[piece.start - span.start : piece.end - span.start]
                if checked != (piece.start, piece.crc):  # parts of one piece may go to several tensors
                    self._check(path, piece, values)
                    checked = (piece.start, piece.crc)
                box, lo, out, _ = piece.wanted
                begin = max(lo, piece.start - box.offset)
                end = min(lo + out.numel(), piece.end - box.offset)
                at = box.offset - piece.start
                out.view(-1)[begin - lo : end - lo].copy_(values[begin + at : end + at])
        finally:
            self._staging.give(buffer, after=transfer)  # which may go on when waiting for it was interrupted

    @staticmethod
    def _check(path: Path, piece: _Piece, values: torch.Tensor) -> None:
        found = crc32c(values)
        if found != piece.crc:
            raise CheckpointError(
                f"{path} is damaged between bytes {piece.start} and {piece.end}, where {piece.wanted.what} "
                "lies: its checksum is "
                f"{found:08x}, not {piece.crc:08x}; fetch it again from where the checkpoint was saved, or use "
                "another checkpoint"
            )

    def _source(self, name: str, what: str) -> "_Source":
        found = self._open.pop(name, None)
        if found is None:
            with self._named(self.folder / name, what):
                found = _Source(self.folder / name)
        self._open[name] = found
        if len(self._open) > _OPEN_FILES:
            self._open.popitem(last=False)[1].close()
        return found

    @contextlib.contextmanager
    def _named(self, path: Path, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(f"{path}, where {what} lies, cannot be read: {_why(error, _READING)}") from error

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Source:
    """A file open for reading."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # before it is opened: opening a pipe would wait for somebody who writes
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise CheckpointError(f"{path} is not a regular file; fetch it again from where the checkpoint was saved")
        self.file = DirectFile(path, writable=False)
        self.size = self.file.size
        self._plain = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def cached(self, offset: int, buffer: torch.Tensor) -> int:
        """Fill ``buffer`` with the bytes from ``offset`` on if the page cache has them, without any IO; how many, in
        whole pages.
        """
        nbytes = buffer.numel()
        if not _resident(self._plain, offset, nbytes):
            return 0
        memory = (ctypes.c_char * nbytes).from_address(buffer.data_ptr())
        try:
            got = os.preadv(self._plain, [memory], offset, getattr(os, "RWF_NOWAIT", 0))
        except OSError:  # gone meanwhile, or the filesystem cannot tell
            return 0
        return got if got == nbytes else got // ALIGN * ALIGN

    def close(self) -> None:
        """When what is under way has ended."""
        self.file.close()
        os.close(self._plain)


@functools.cache
def _mincore() -> Any:
    return ctypes.CDLL(None).mincore


def _resident(fd: int, offset: int, nbytes: int) -> bool:
    """Whether the page cache has these bytes of a file.

    Not asked by a read that must not wait (RWF_NOWAIT): where pages are missing that starts reading them, beside the
    direct transfer.
    """
    begin = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    size = offset + nbytes - begin
    states = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    try:
        with mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, offset=begin) as pages:
            status = _mincore()(ctypes.byref(ctypes.c_char.from_buffer(pages)), ctypes.c_size_t(size), states)
    except (OSError, ValueError, AttributeError):  # such a file cannot be mapped, or not so far; another C library
        return False
    return status == 0 and 0 not in bytes(states).translate(_LOWEST_BIT)  # the other bits mean nothing
