"""``aio_handle``: files to and from tensors, call by call, for programs that manage their own files."""

import ctypes
import functools
import os
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed.device import get_accelerator
from deepspeed.errors import DeepSpeedError
from deepspeed.observe.log import logger
from deepspeed.tier.aio import AioEngine, DirectFile
from deepspeed.tier.aligned import ALIGN, aligned_empty
from deepspeed.tier.transfer import Transfer

__all__ = ["FileMismatchError", "aio_handle", "aio_read", "aio_write", "deepspeed_memcpy"]

_MOST_OPEN = 128  # files at a time, two descriptors each: 1024 is a usual limit for a whole process
_CHECK_BYTES = 8 << 20

FileName = str | os.PathLike[str] | int


class FileMismatchError(DeepSpeedError, ValueError):
    """A file has other bytes, or another number of them, than the tensor it is read to or was written from."""


def _place(filename: FileName) -> str:
    """A path that leads to the file; a descriptor stays open and the caller's."""
    return f"/proc/self/fd/{filename}" if isinstance(filename, int) else os.fspath(filename)


def _check_size(file: DirectFile, offset: int, nbytes: int, *, whole: bool) -> None:
    size = file.size
    if whole and size != nbytes:
        raise FileMismatchError(
            f"{file.path} has {size} bytes and the tensor {nbytes}; read fills a tensor with a whole file, "
            "pread with a part"
        )
    if offset + nbytes > size:
        raise FileMismatchError(
            f"{file.path} has {size} bytes; {nbytes} from offset {offset} on are more than there are"
        )


def _check_contents(path: str, offset: int, host: torch.Tensor) -> None:
    """Compare the bytes of ``path`` from ``offset`` on with those of ``host``, through ordinary reads."""
    expected = host.reshape(-1).view(torch.uint8)
    with open(path, "rb") as file:
        file.seek(offset)
        for start in range(0, expected.numel(), _CHECK_BYTES):
            piece = expected[start : start + _CHECK_BYTES]
            data = bytearray(file.read(piece.numel()))
            if len(data) != piece.numel() or not torch.equal(torch.frombuffer(data, dtype=torch.uint8), piece):
                text = f"the {piece.numel()} bytes from offset {offset + start} on are not those of the tensor"
                raise FileMismatchError(f"{path}: {text}; does something else write to this file or tensor?")


@dataclass(frozen=True)
class _Operation:
    """One read or write. ``host`` is ``buffer`` itself where that is on the host; ``whole``: it is all of the file."""

    file: DirectFile
    transfer: Transfer
    buffer: torch.Tensor
    host: torch.Tensor
    offset: int
    write: bool
    whole: bool
    validate: bool

    def settle(self) -> Exception | None:
        """Wait, take the bytes to where they belong, close the file; how it failed, if it did."""
        try:
            self.transfer.wait()
            if self.write and self.whole and self.file.size > self.host.nbytes:
                os.truncate(self.file.path, self.host.nbytes)  # now, so that a write that fails takes nothing away
            if self.validate:
                _check_contents(self.file.path, self.offset, self.host)
            if not self.write and self.host is not self.buffer:
                self.buffer.copy_(self.host)
        except (OSError, ValueError, RuntimeError) as error:
            return error
        finally:
            self.file.close()
        return None


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _span(memory: torch.Tensor) -> tuple[ctypes.c_void_p, ctypes.c_size_t]:
    return ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.nbytes)


def _lock(memory: torch.Tensor) -> None:
    if memory.nbytes and _libc().mlock(*_span(memory)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


class _LockedBuffers:
    """Host tensors that the system keeps in memory until they are given back; by address."""

    def __init__(self) -> None:
        self._tensors: dict[int, torch.Tensor] = {}
        self._refused = False

    def new(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeros at a multiple of 4096; ordinary memory, and one line in the log, where locking is refused."""
        memory = aligned_empty(count, dtype=dtype)
        try:
            memory = get_accelerator().pin_memory(memory)
            if get_accelerator().is_synchronized_device():
                _lock(memory)
            self._tensors[memory.data_ptr()] = memory
        except (OSError, RuntimeError) as error:
            if not self._refused:
                text = "page-locked memory is refused (%s); ordinary memory serves. More may be had with ulimit -l"
                logger.warning(text, error)
            self._refused = True
        return memory

    def __contains__(self, tensor: torch.Tensor) -> bool:
        first, last = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        return any(start <= first and last <= start + whole.nbytes for start, whole in self._tensors.items())

    def free(self, tensor: torch.Tensor) -> bool:
        """Whether it was one of these."""
        whole = self._tensors.pop(tensor.data_ptr(), None)
        if whole is not None and get_accelerator().is_synchronized_device():
            _libc().munlock(*_span(whole))
        return whole is not None

    def clear(self) -> None:
        """Free all."""
        for tensor in list(self._tensors.values()):
            self.free(tensor)


def _end(engine: AioEngine, pending: deque[_Operation], locked: _LockedBuffers) -> None:
    while pending:
        failure = pending.popleft().settle()
        if failure is not None:
            logger.warning("file IO that nobody waited for failed: %s", failure)
    engine.close()
    locked.clear()


def _setting(name: str) -> Callable[["aio_handle"], Any]:
    return lambda handle: handle._settings[name]


class aio_handle(AbstractContextManager["aio_handle"]):
    """Reads and writes of whole tensors, from and to byte ``file_offset`` of a file; one thread uses it.

    A buffer is contiguous; one on a device travels through host memory. A file is a name or an open descriptor, which
    stays open. The ``sync`` calls return 1, the ``async`` ones 0, with :meth:`wait` to follow before the buffer is
    touched. A failure raises: an OSError that names the file, or FileMismatchError where the file has too few bytes.
    Nothing depends on alignment, but bytes travel fastest where address, offset and length are multiples of
    ``get_alignment()``. ``read`` and ``write`` move whole files and return 0; ``pread`` and ``pwrite`` move parts, and
    go on after they returned with ``async_op``. ``validate`` reads everything a second time, by ordinary means, and
    raises FileMismatchError where that gives other bytes.

    ``intra_op_parallelism`` is the number of threads where the page cache is in the way. ``single_submit`` and
    ``overlap_events`` are kept and returned only: requests are submitted together, and as room comes free. Close it, or
    let it be collected.
    """

    def __init__(
        self,
        block_size: int = 1 << 20,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size is a number of bytes, at least 1, not {block_size}")
        self._settings = {"block_size": block_size, "queue_depth": queue_depth, "threads": intra_op_parallelism}
        self._settings |= {"single_submit": single_submit, "overlap_events": overlap_events, "alignment": ALIGN}
        self._engine = AioEngine(
            queue_depth=queue_depth, block_bytes=-(-block_size // ALIGN) * ALIGN, threads=intra_op_parallelism
        )
        self._pending: deque[_Operation] = deque()
        self._ended: list[Exception | None] = []  # that were queued, before wait() was called
        self._locked = _LockedBuffers()
        self._last = weakref.finalize(self, _end, self._engine, self._pending, self._locked)

    get_block_size = _setting("block_size")
    get_queue_depth = _setting("queue_depth")
    get_single_submit = _setting("single_submit")
    get_overlap_events = _setting("overlap_events")
    get_intra_op_parallelism = get_thread_count = _setting("threads")
    get_alignment = _setting("alignment")

    def read(self, buffer: torch.Tensor, filename: FileName, validate: bool = False, file_offset: int = 0) -> int:
        """Fill ``buffer`` with a whole file, of exactly its size, or from ``file_offset`` on. 0."""
        return self._go(buffer, filename, file_offset, write=False, whole=file_offset == 0, validate=validate) - 1

    def write(self, buffer: torch.Tensor, filename: FileName, validate: bool = False, file_offset: int = 0) -> int:
        """Write ``buffer``; without an offset, the file has its bytes and no others afterwards. 0."""
        return self._go(buffer, filename, file_offset, write=True, whole=file_offset == 0, validate=validate) - 1

    def pread(
        self, buffer: torch.Tensor, filename: FileName, validate: bool, async_op: bool, file_offset: int = 0
    ) -> int:
        """Fill ``buffer`` with that much of the file. 1, or 0 with ``async_op``."""
        return self._go(buffer, filename, file_offset, write=False, later=async_op, validate=validate)

    def pwrite(
        self, buffer: torch.Tensor, filename: FileName, validate: bool, async_op: bool, file_offset: int = 0
    ) -> int:
        """Write ``buffer`` into the file, which keeps what it has elsewhere. 1, or 0 with ``async_op``."""
        return self._go(buffer, filename, file_offset, write=True, later=async_op, validate=validate)

    def _go(
        self,
        buffer: torch.Tensor,
        filename: FileName,
        file_offset: int = 0,
        *,
        write: bool,
        later: bool = False,
        whole: bool = False,
        validate: bool = False,
    ) -> int:
        operation = self._start(buffer, filename, file_offset, write=write, whole=whole, validate=validate)
        if later:
            self._pending.append(operation)
            return 0
        failure = operation.settle()
        if failure is not None:
            raise failure
        return 1

    sync_pread = functools.partialmethod(_go, write=False)
    sync_pwrite = functools.partialmethod(_go, write=True)
    async_pread = functools.partialmethod(_go, write=False, later=True)
    async_pwrite = functools.partialmethod(_go, write=True, later=True)

    def wait(self) -> int:
        """Until everything queued is done; how many that were. Raises the first failure, others are logged."""
        self._settle(keep=0)
        ended, self._ended = self._ended, []
        failures = [failure for failure in ended if failure is not None]
        for failure in failures[1:]:
            logger.warning("also failed: %s", failure)
        if failures:
            raise failures[0]
        return len(ended)

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: torch.Tensor) -> torch.Tensor:
        """``num_elem`` zeros of the example's dtype in page-locked memory, or ordinary where that is refused."""
        return self._locked.new(num_elem, example_tensor.dtype)

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
        """Let go of such a tensor; False when it is none. Its memory lives as long as the caller keeps it."""
        return self._locked.free(tensor)

    def is_pinned(self, buffer: torch.Tensor) -> bool:
        """Whether ``buffer`` is page-locked, by this handle or by torch."""
        return buffer in self._locked or get_accelerator().is_pinned(buffer)

    def close(self) -> None:
        """Finish what is queued and give threads and descriptors back. May be called again."""
        self._last()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(
        self, buffer: torch.Tensor, filename: FileName, offset: int, *, write: bool, whole: bool, validate: bool
    ) -> _Operation:
        if not self._last.alive:
            raise ValueError(f"this aio_handle is closed: {filename}")
        buffer = buffer.detach()
        if not buffer.is_contiguous():
            kind = f"strides {buffer.stride()} for shape {tuple(buffer.shape)}"
            raise ValueError(f"file IO takes contiguous tensors, not {kind}: {filename}")
        host = buffer
        if buffer.device.type != "cpu":
            host = aligned_empty(buffer.shape, dtype=buffer.dtype)
            if write:
                host.copy_(buffer)
        self._settle(keep=_MOST_OPEN - 1)
        file = DirectFile(_place(filename), create=write and not isinstance(filename, int), writable=write)
        try:
            if not write:
                _check_size(file, offset, buffer.nbytes, whole=whole)
            transfer = (self._engine.write if write else self._engine.read)(file, offset, host)
            return _Operation(file, transfer, buffer, host, offset, write, whole, validate)
        except BaseException:
            file.close()
            raise

    def _settle(self, *, keep: int) -> None:
        while len(self._pending) > keep:
            self._ended.append(self._pending.popleft().settle())


def _once(act: Callable[[aio_handle, torch.Tensor, FileName, bool], int]) -> Callable[..., int]:
    def call(
        buffer: torch.Tensor,
        filename: FileName,
        block_size: int,
        queue_depth: int,
        single_submit: bool,
        overlap_events: bool,
        validate: bool,
    ) -> int:
        with aio_handle(block_size, queue_depth, single_submit, overlap_events) as handle:
            return act(handle, buffer, filename, validate)

    return call


# a handle, one ``read`` or ``write``, and its end, in one call
aio_read, aio_write = _once(aio_handle.read), _once(aio_handle.write)


def deepspeed_memcpy(dest: torch.Tensor, src: torch.Tensor) -> int:
    """Copy ``src`` to ``dest``, of as many bytes. 0."""
    dest.copy_(src.view_as(dest))
    return 0
