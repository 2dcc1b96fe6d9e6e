"""``aio_handle``: files to and from tensors, call by call, for programs that manage their own files."""

import ctypes
import functools
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import SimpleNamespace

import torch
from torch import Tensor

from deepspeed.accelerator.device import get_accelerator
from deepspeed.client.attrs import answers
from deepspeed.errors import DeepSpeedError
from deepspeed.monitor.log import logger
from deepspeed.tier.aio import AioEngine, DirectFile
from deepspeed.tier.arena import ALIGN, aligned_empty

__all__ = ["FileMismatchError", "aio_handle", "aio_read", "aio_write", "deepspeed_memcpy"]

_MOST_OPEN = 128  # files at a time, two descriptors each: 1024 is a usual limit for a whole process
_CHECK_BYTES = 8 << 20

Name = str | os.PathLike[str] | int


class FileMismatchError(DeepSpeedError, ValueError):
    """Error of a file with other bytes, or another number of them, than the tensor it is read to or written from."""


def _check_size(file: DirectFile, offset: int, nbytes: int, *, whole: bool) -> None:
    facts, hint = f"{file.path} has {file.size} bytes", "read fills a tensor with a whole file, pread with a part"
    if whole and file.size != nbytes:
        raise FileMismatchError(f"{facts} and the tensor {nbytes}; {hint}")
    if offset + nbytes > file.size:
        raise FileMismatchError(f"{facts}; {nbytes} from offset {offset} on are more than there are")


def _check_contents(path: str, offset: int, host: Tensor) -> None:
    """Compare the bytes of ``path`` from ``offset`` on with ``host``, by ordinary reads. Raises FileMismatchError."""
    expected = host.reshape(-1).view(torch.uint8).numpy().data
    with open(path, "rb") as file:
        file.seek(offset)
        for start in range(0, len(expected), _CHECK_BYTES):
            piece = expected[start : start + _CHECK_BYTES]
            if file.read(len(piece)) != piece:
                text = f"the {len(piece)} bytes from offset {offset + start} on are not those of the tensor"
                raise FileMismatchError(f"{path}: {text}; does something else write to this file or tensor?")


def _operation(
    engine: AioEngine, buffer: Tensor, name: Name, offset: int, *, write: bool, whole: bool, validate: bool
) -> Iterator[None]:
    """Start one read or write, ``yield``, then complete it. A device tensor's bytes travel through ``host``."""
    host = buffer
    if buffer.device.type != "cpu":
        host = aligned_empty(buffer.shape, dtype=buffer.dtype)
        if write:
            host.copy_(buffer)
    # a descriptor stays open and the caller's
    path, create = (f"/proc/self/fd/{name}", False) if isinstance(name, int) else (os.fspath(name), write)
    with DirectFile(path, create=create, writable=write) as file:
        if not write:
            _check_size(file, offset, buffer.nbytes, whole=whole)
        transfer = (engine.write if write else engine.read)(file, offset, host)
        yield
        transfer.wait()
        if write and whole and file.size > host.nbytes:
            os.truncate(file.path, host.nbytes)  # now, so that a write that fails takes nothing away
        if validate:
            _check_contents(file.path, offset, host)
        if not write and host is not buffer:
            buffer.copy_(host)


def _finish(operation: Iterator[None]) -> Exception | None:
    """Complete an operation; return its error, or None."""
    try:
        next(operation, None)
    except (OSError, ValueError, RuntimeError) as error:
        return error
    return None


def _lock(memory: Tensor, call: str = "mlock") -> None:
    """Call ``mlock`` or ``munlock`` where the host is the device; elsewhere the device's driver locks."""
    if memory.nbytes and get_accelerator().is_synchronized_device():
        libc = ctypes.CDLL(None, use_errno=True)
        if libc[call](ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.nbytes)) and call == "mlock":
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _end(engine: AioEngine, pending: deque[Iterator[None]], locked: dict[int, Tensor]) -> None:
    while pending:
        if failure := _finish(pending.popleft()):
            logger.warning("file IO that nobody waited for failed: %s", failure)
    engine.close()
    while locked:
        _lock(locked.popitem()[1], "munlock")


class aio_handle(AbstractContextManager["aio_handle"]):
    """Read and write whole tensors, from and to byte ``file_offset`` of a file; for one thread.

    A buffer is contiguous; a device's travels through host memory. A file is a name (``filename``) or an open
    descriptor (as ``filename`` or ``fd``), which stays open. The ``sync`` calls return 1, the ``async`` ones 0, with
    :meth:`wait` to follow before the buffer is touched. A failure raises: an OSError that names the file, or
    FileMismatchError where the file has too few bytes. Alignment is not required, but bytes travel fastest where
    address, offset and length are multiples of ``get_alignment()``. ``read`` and ``write`` move whole files (from
    ``file_offset`` on, parts) and return 0; ``pread`` and ``pwrite`` move parts, and with ``async_op`` go on after
    they returned. ``validate`` reads everything a second time, by ordinary means, and raises FileMismatchError where
    that gives other bytes.

    ``intra_op_parallelism`` is the number of threads where the page cache is in the way. ``single_submit`` and
    ``overlap_events`` are kept and returned only: requests are submitted together, as room comes free.
    """

    def __init__(
        self,
        block_size: int = 1 << 20,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
    ) -> None:
        self._settings = SimpleNamespace(block=block_size, depth=queue_depth, threads=intra_op_parallelism)
        self._settings.single, self._settings.overlap, self._settings.alignment = single_submit, overlap_events, ALIGN
        self._engine = AioEngine(block_bytes=block_size, queue_depth=queue_depth, threads=intra_op_parallelism)
        self._pending: deque[Iterator[None]] = deque()
        self._ended: list[Exception | None] = []  # that were queued, before wait() was called
        self._locked, self._lock_refused = dict[int, Tensor](), False
        self._last = weakref.finalize(self, _end, self._engine, self._pending, self._locked)

    get_block_size, get_queue_depth = answers("_settings.block"), answers("_settings.depth")
    get_single_submit, get_overlap_events = answers("_settings.single"), answers("_settings.overlap")
    get_intra_op_parallelism = get_thread_count = answers("_settings.threads")
    get_alignment = answers("_settings.alignment")

    def _go(
        self,
        buffer: Tensor,
        filename: Name | None = None,
        file_offset: int = 0,
        *,
        fd: int | None = None,
        later: bool = False,
        **how: bool,
    ) -> int:
        name = fd if filename is None else filename
        if name is None or (filename is not None and fd is not None):
            raise TypeError("reads and writes take one of filename and fd")
        if not self._last.alive:
            raise ValueError(f"this aio_handle is closed: {name}")
        buffer = buffer.detach()
        if not buffer.is_contiguous():
            kind = f"strides {buffer.stride()} for shape {tuple(buffer.shape)}"
            raise ValueError(f"file IO takes contiguous tensors, not {kind}: {name}")
        self._settle(keep=_MOST_OPEN - 1)
        operation = _operation(self._engine, buffer, name, file_offset, **{"whole": False, "validate": False} | how)
        next(operation)
        if later:
            self._pending.append(operation)
        elif failure := _finish(operation):
            raise failure
        return int(not later)

    def _whole(
        self, buffer: Tensor, filename: Name, validate: bool = False, file_offset: int = 0, *, write: bool
    ) -> int:
        self._go(buffer, filename, file_offset, write=write, whole=file_offset == 0, validate=validate)
        return 0

    def _part(
        self, buffer: Tensor, filename: Name, validate: bool, async_op: bool, file_offset: int = 0, *, write: bool
    ) -> int:
        return self._go(buffer, filename, file_offset, write=write, later=async_op, validate=validate)

    read, write = functools.partialmethod(_whole, write=False), functools.partialmethod(_whole, write=True)
    pread, pwrite = functools.partialmethod(_part, write=False), functools.partialmethod(_part, write=True)
    sync_pread = functools.partialmethod(_go, write=False)
    sync_pwrite = functools.partialmethod(_go, write=True)
    async_pread = functools.partialmethod(_go, write=False, later=True)
    async_pwrite = functools.partialmethod(_go, write=True, later=True)

    def wait(self) -> int:
        """Wait until all queued requests are done; return their number. Raises the first failure, others are logged."""
        self._settle(keep=0)
        ended, self._ended = self._ended, []
        failures = [failure for failure in ended if failure is not None]
        for failure in failures[1:]:
            logger.warning("also failed: %s", failure)
        if failures:
            raise failures[0]
        return len(ended)

    def _settle(self, *, keep: int) -> None:
        while len(self._pending) > keep:
            self._ended.append(_finish(self._pending.popleft()))

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: Tensor) -> Tensor:
        """Return ``num_elem`` zeros of the example's dtype at a multiple of 4096, page-locked where allowed."""
        memory = aligned_empty(num_elem, dtype=example_tensor.dtype)
        try:
            memory = get_accelerator().pin_memory(memory)
            _lock(memory)
            self._locked[memory.data_ptr()] = memory
        except (OSError, RuntimeError) as error:
            text = "page-locked memory is refused (%s); ordinary memory serves. More may be had with ulimit -l"
            if not self._lock_refused:
                logger.warning(text, error)
            self._lock_refused = True
        return memory

    def free_cpu_locked_tensor(self, tensor: Tensor) -> bool:
        """Unlock a tensor of ``new_cpu_locked_tensor``; False for others. Its memory lives as long as the tensor."""
        whole = self._locked.pop(tensor.data_ptr(), None)
        if whole is not None:
            _lock(whole, "munlock")
        return whole is not None

    def is_pinned(self, buffer: Tensor) -> bool:
        """Tell whether ``buffer`` is page-locked, by this handle or by torch."""
        first, last = buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes
        locked = any(start <= first and last <= start + whole.nbytes for start, whole in self._locked.items())
        return locked or get_accelerator().is_pinned(buffer)

    def close(self) -> None:
        """Finish queued requests and release threads and descriptors. May be called again."""
        self._last()

    def __exit__(self, *_: object) -> None:
        self.close()


def _once(act: Callable[..., int]) -> Callable[..., int]:
    def call(
        buffer: Tensor,
        filename: Name,
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


def deepspeed_memcpy(dest: Tensor, src: Tensor) -> int:
    """Copy ``src`` to ``dest``, which has as many elements; return 0."""
    dest.copy_(src.view_as(dest))
    return 0
