"""Chunk files: the bytes of boxes, to and from the drive, with checksums; described in docs/checkpoint-format.md."""

import contextlib
import errno
import itertools
import os
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from deepspeed.checkpoint.format.checksum import copy_with_crc32c, crc32c
from deepspeed.checkpoint.format.manifest import ALIGN_BYTES, PIECE_BYTES, Box
from deepspeed.errors import CheckpointError
from deepspeed.tier.aio import AioEngine, DirectFile
from deepspeed.tier.arena import ALIGN, Arena, aligned_empty
from deepspeed.tier.staging import Staging
from deepspeed.tier.transfer import Transfer
from deepspeed.zero.regions import Span

_BUFFERS = 4
_BUFFER_BYTES = 4 << 20
_AHEAD = 8  # pieces that the system is asked to read ahead
_OPEN_FILES = 32
_NAP_S = 0.1
_WRITING = {
    errno.ENOSPC: "the filesystem is full; free space there or save to another one",
    errno.EDQUOT: "the quota is used up; free space there or save to another filesystem",
    errno.EFBIG: "files may not grow that far; raise the limit (ulimit -f) or save to another filesystem",
    errno.EIO: "the disk failed; the kernel log (dmesg) says more",
    errno.ENOMEM: "this is host memory for its buffers and copies, not the filesystem; leave more of it free",
    errno.EROFS: "the filesystem cannot be written; save to another one",
    errno.EACCES: "its folder cannot be written by this user; save to another one",
}
_AGAIN = "fetch it again from where the checkpoint was saved, or use another checkpoint"
_READING = {
    errno.ENOENT: f"it is missing; {_AGAIN}",
    errno.EACCES: "this user may not read it; change its permissions",
    errno.EIO: "the disk failed; the kernel log (dmesg) says more",
    **dict.fromkeys((errno.EISDIR, errno.ESPIPE), f"it is not a regular file; {_AGAIN}"),
}


@contextlib.contextmanager
def explained(path: Path, label: str = "") -> Iterator[None]:
    """Raise an OSError of the body as CheckpointError with advice, to write ``path`` or read ``label`` from it."""
    try:
        yield
    except OSError as error:
        code, advice = error.errno or errno.EIO, _READING if label else _WRITING
        verb = f", where {label} lies, cannot be read" if label else " cannot be written"
        more = f"; {advice[code]}" if code in advice else ""
        raise CheckpointError(f"{path}{verb}: {os.strerror(code)}{more}") from error


class ChunkWriter:
    """Write a new file of boxes from front to back through a few staging buffers, by one thread at a time.

    ``rate_bytes``: limit per second (0: none). ``expect_bytes``: size reserved at once, to detect a full disk early.
    ``pinned``: arena of page-locked memory for the buffers, for copies from a device. Methods raise CheckpointError
    with advice when the file cannot be written; after that only ``abort`` may be called.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, rate_bytes: int = 0, expect_bytes: int = 0, pinned: Arena | None = None
    ) -> None:
        self.path = Path(path)
        self.rate_bytes = rate_bytes
        self.nbytes = 0  # written so far, padding included
        self._boxes: list[tuple[int, Span, list[int]]] = []  # where each begins, what it holds, its checksums
        self._buffer: torch.Tensor | None = None
        self._used = 0
        self._due = 0.0
        self._staging = Staging(_BUFFERS, arena=pinned, pin=True)
        with explained(self.path), contextlib.ExitStack() as undone:
            os.close(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666))
            undone.callback(self.path.unlink)
            self._file = undone.enter_context(DirectFile(self.path))
            self._file.allocate(-(-expect_bytes // ALIGN) * ALIGN)
            self._engine: AioEngine | None = AioEngine(queue_depth=2 * _BUFFERS)
            undone.pop_all()

    def append(self, values: torch.Tensor | Iterable[torch.Tensor], span: Span) -> None:
        """Append a box with the bytes of ``values`` (a tensor on any device, or its parts in order) of ``span``."""
        self._check_open()
        self._pad(ALIGN_BYTES)
        self._boxes.append((self.nbytes, span, []))
        for part in [values] if isinstance(values, torch.Tensor) else values:
            self._put(part.detach().contiguous().view(-1).view(torch.uint8))

    def close(self) -> list[Box]:
        """Pad the file to whole pages and sync it; return the boxes in order. On failure the file is removed."""
        self._check_open()
        try:
            self._pad(ALIGN)
            with explained(self.path):
                self._send()
                self._staging.settle()
                with self.path.open("r+b") as file:  # fsync covers the file, whoever wrote it
                    file.truncate(self.nbytes)
                    os.fsync(file.fileno())
        except BaseException:
            self.abort()
            raise
        self._release()
        ends = [*(start for start, _, _ in self._boxes[1:]), self.nbytes]
        return [
            Box(self.path.name, start, end - start, lo, hi, tuple(crcs), region)
            for (start, (lo, hi, region), crcs), end in zip(self._boxes, ends, strict=False)
        ]

    def abort(self) -> None:
        """Remove the file, after pending writes have ended; does nothing after :meth:`close` or a second time."""
        if self._engine is not None:
            with contextlib.suppress(OSError):  # what fails from here on is of a file that nobody wants
                self._staging.settle()
            self._release()
            with contextlib.suppress(OSError):
                self.path.unlink()

    def _release(self) -> None:
        engine, self._engine, self._buffer = self._check_open(), None, None
        engine.close()
        self._file.close()
        self._staging.clear()

    def _check_open(self) -> AioEngine:
        if self._engine is None:
            raise ValueError(f"{self.path}: the file is closed")
        return self._engine

    def _pad(self, multiple: int) -> None:
        if missing := -self.nbytes % multiple:
            self._put(torch.zeros(missing, dtype=torch.uint8))

    def _put(self, data: torch.Tensor) -> None:
        """Copy ``data`` into the staging buffers, and update the checksums of the last box."""
        at, (start, _, crcs) = 0, self._boxes[-1]
        while at < data.numel():
            if self._buffer is None:
                with explained(self.path):
                    self._buffer = self._staging.take(_BUFFER_BYTES)
                self._used = 0
            inside = (self.nbytes - start) % PIECE_BYTES  # of the piece that is not complete yet
            size = min(data.numel() - at, _BUFFER_BYTES - self._used, PIECE_BYTES - inside)
            target, source = self._buffer[self._used : self._used + size], data[at : at + size]
            crc = crcs.pop() if inside else 0
            on_host = source.device.type == "cpu"
            crcs.append(copy_with_crc32c(target, source, crc) if on_host else crc32c(target.copy_(source), crc))
            at, self._used, self.nbytes = at + size, self._used + size, self.nbytes + size
            if self._used == _BUFFER_BYTES:
                with explained(self.path):
                    self._send()

    def _send(self) -> None:
        """Write out the staging buffer, at ``rate_bytes`` a second at most. Unused time gives no credit for later."""
        if self._buffer is None:
            return
        now = time.monotonic()
        while self.rate_bytes and (delay := self._due - now) > 0:
            time.sleep(min(delay, _NAP_S))  # short naps: the rate may be lifted meanwhile
            now = time.monotonic()
        if self.rate_bytes:
            self._due = max(self._due, now) + self._used / self.rate_bytes
        buffer, self._buffer = self._buffer, None
        transfer: Transfer | None = None
        try:
            transfer = self._check_open().write(self._file, self.nbytes - self._used, buffer[: self._used])
        finally:
            self._staging.give(buffer, after=transfer)

    def __enter__(self) -> "ChunkWriter":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is None and self._engine is not None:
                self.close()
        finally:
            self.abort()  # does nothing after a good end


class Wanted(NamedTuple):
    """Read request: bytes of a box from ``lo`` on, into ``out`` (flat uint8, any device); errors name ``what``."""

    box: Box
    lo: int
    out: torch.Tensor
    what: str


class _Piece(NamedTuple):
    """Checksummed piece of a file."""

    file: str
    start: int
    end: int
    crc: int


class ChunkReader:
    """Read parts of boxes, whole pieces at a time, and check every byte; for one thread at a time."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self._open: OrderedDict[str, int] = OrderedDict()
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def read_many(self, wanted: Iterable[Wanted]) -> None:
        """Fill many tensors in the order of the files. Raises CheckpointError that names file, offset and ``what``."""
        readers: dict[_Piece, list[Wanted]] = {}  # parts of one piece may go to several tensors
        for request in wanted:
            box, lo, out, _ = request
            hi = lo + out.numel()
            for index in range(lo // PIECE_BYTES, -(-hi // PIECE_BYTES) if lo < hi else 0):
                start, end = index * PIECE_BYTES, min((index + 1) * PIECE_BYTES, box.extent)
                piece = _Piece(box.file, box.offset + start, box.offset + end, box.crcs[index])
                readers.setdefault(piece, []).append(request)
        ahead = iter(pieces := sorted(readers))
        if pieces and not self._buffer.numel():
            self._buffer = aligned_empty(PIECE_BYTES)
        for index, piece in enumerate(pieces):
            for later in itertools.islice(ahead, 1 if index else _AHEAD):
                fd = self._file(later.file, readers[later][0].what)
                with contextlib.suppress(OSError):  # it is only a hint
                    os.posix_fadvise(fd, later.start, later.end - later.start, os.POSIX_FADV_WILLNEED)
            values = self._load(piece, readers[piece][0].what)
            for box, lo, out, _ in readers[piece]:
                begin, end = max(lo, piece.start - box.offset), min(lo + out.numel(), piece.end - box.offset)
                at = box.offset - piece.start
                out[begin - lo : end - lo].copy_(values[begin + at : end + at])

    def close(self) -> None:
        """Close the files; may be called again."""
        while self._open:
            os.close(self._open.popitem()[1])
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def _load(self, piece: _Piece, label: str) -> torch.Tensor:
        """Read ``piece`` into the shared buffer and check it; the result is valid until the next call."""
        file, start, end, crc = piece
        fd, path, values = self._file(file, label), self.folder / file, self._buffer[: end - start]
        array: Any = values.numpy()
        memory, at = memoryview(array), 0
        while at < len(memory):
            with explained(path, label):
                count = os.preadv(fd, [memory[at:]], start + at)
            if not count:
                size = os.fstat(fd).st_size
                raise CheckpointError(f"{path} is cut: it has {size} bytes, {label} lies up to byte {end}; {_AGAIN}")
            at += count
        if (actual := crc32c(values)) != crc:
            text = f"where {label} lies: its checksum is {actual:08x}, not {crc:08x}; {_AGAIN}"
            raise CheckpointError(f"{path} is damaged between bytes {start} and {end}, {text}")
        return values

    def _file(self, name: str, label: str) -> int:
        """Return a descriptor of the file; a few files stay open."""
        fd, path = self._open.pop(name, None), self.folder / name
        if fd is None:
            with explained(path, label):  # opening a pipe would wait for somebody who writes
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        self._open[name] = fd
        if len(self._open) > _OPEN_FILES:
            os.close(self._open.popitem(last=False)[1])
        return fd
