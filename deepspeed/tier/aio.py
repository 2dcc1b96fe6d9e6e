"""Asynchronous reads and writes between host tensors and files.

``AioEngine`` hands transfers to csrc/aio (io_uring, else libaio, else threads); where that cannot be compiled, Python
threads do them. Bytes go through O_DIRECT where offset, address and length allow it, else through the page cache.
"""

import contextlib
import ctypes
import errno
import functools
import itertools
import os
import threading
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ClassVar

import torch

from deepspeed.accelerator.native.build import load, try_load
from deepspeed.accelerator.native.spec import ASYNC_IO
from deepspeed.errors import DeepSpeedError
from deepspeed.monitor.log import logger
from deepspeed.tier.arena import ALIGN, aligned_empty
from deepspeed.tier.transfer import Transfer

__all__ = ["ALIGN", "AioEngine", "DirectFile", "FileTransfer", "TransferError", "aligned_empty"]

_CODES = {"auto": 0, "io_uring": 1, "libaio": 2, "threads": 3}
_POOL = "ds-aio"  # how the names of Python threads begin that move bytes
_NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)
_FULL = "free space there, or name a larger disk (nvme_path)"
_ADVICE = {
    errno.ENOSPC: f"the filesystem is full; {_FULL}",
    errno.EDQUOT: f"the quota is used up; {_FULL}",
    errno.EFBIG: "the file may not grow that far; raise the limit (ulimit -f) or name another filesystem (nvme_path)",
    errno.EIO: "the disk failed; the kernel log (dmesg) says more",
    errno.ENODATA: "the file ends before that; it was cut, or never written so far",
    errno.EBADF: "the file is not open for that; open it with writable=True",
    errno.ECHILD: "this process was forked from the one that made the engine; make a new engine here",
}
_I, _L, _P = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "new": (_P, [_I, _I, _L, _I, ctypes.POINTER(_I)]),
    "backend": (_I, [_P]),
    "submit": (_L, [_P, _I, _I, _I, _L, _P, _L]),
    "wait": (_I, [_P, _L]),
    "done": (_I, [_P, _L]),
    "free": (None, [_P]),
}


class TransferError(DeepSpeedError, OSError):
    """Raised when a file could not be read or written; ``errno`` and ``filename`` say why and which."""


def _failure(code: int, operation: str, path: str) -> TransferError:
    advice = _ADVICE.get(code)
    return TransferError(code, f"{operation}: {os.strerror(code)}" + (f" ({advice})" if advice else ""), path)


class _Native:
    """Call csrc/aio: C functions, which leave the interpreter to other threads. ``submit`` gives a ticket or a negative
    errno, ``wait`` 0 or the first failure of a ticket, once.
    """

    def __init__(self, library: ctypes.CDLL, *, backend: str, depth: int, block: int, threads: int) -> None:
        def function(name: str) -> Any:
            call = library[f"ds_aio_{name}"]  # an object for each engine, so that signatures are nobody else's
            call.restype, call.argtypes = _SIGNATURES[name]
            return call

        error = ctypes.c_int(0)
        handle = function("new")(_CODES[backend], depth, block, threads, ctypes.byref(error))
        if not handle:
            why = f"is not to be had here ({os.strerror(-error.value)}); backend='auto' takes what there is"
            raise TransferError(-error.value, f"file IO by {backend!r} {why}")
        self.name, self.holds = list(_CODES)[function("backend")(handle)], 0
        calls = (functools.partial(function(name), handle) for name in ("submit", "wait", "done", "free"))
        self.submit, self.wait, self.done, self.free = calls


class _PythonThreads:
    """Make the same calls without native code: Python threads, through the page cache, each with a block at a time.

    A thread that moves a block holds the tensor: where the engine is collected on such a thread, nobody waits for it.
    """

    name, holds = "python", 1

    def __init__(self, *, block: int, threads: int) -> None:
        self._block, self._pid = block, os.getpid()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=_POOL)
        self._under_way: dict[int, list[Future[int]]] = {}
        self._tickets = itertools.count(1)

    def submit(
        self, write: int, direct: int, plain: int, offset: int, address: int, nbytes: int, tensor: torch.Tensor
    ) -> int:
        del direct
        ticket, begin = next(self._tickets), functools.partial(self._begin, tensor, write, plain)
        spans = [(at, min(self._block, nbytes - at)) for at in range(0, nbytes, self._block)]
        self._under_way[ticket] = [begin(offset + at, address + at, size) for at, size in spans]
        return ticket

    def _begin(self, *move: Any) -> "Future[int]":
        try:
            return self._pool.submit(_move, *move)
        except RuntimeError:  # the interpreter is ending, and pools take nothing more; a save still has to end
            done: Future[int] = Future()
            done.set_result(_move(*move))
            return done

    def wait(self, ticket: int) -> int:
        codes = [piece.result() for piece in self._under_way[ticket]]
        del self._under_way[ticket]
        return next(filter(None, codes), 0)

    def done(self, ticket: int) -> int:
        return int(all(piece.done() for piece in self._under_way[ticket]))

    def free(self) -> None:
        if os.getpid() == self._pid:  # a forked child has no threads to wait for
            in_pool = threading.current_thread().name.startswith(_POOL)
            self._pool.shutdown(wait=not in_pool)  # a thread cannot wait for itself


def _move(_: torch.Tensor, write: int, fd: int, offset: int, address: int, size: int) -> int:
    act, at = os.pwritev if write else os.preadv, 0
    memory = memoryview((ctypes.c_char * size).from_address(address)).cast("B")
    while at < size:
        try:
            count = act(fd, [memory[at:]], offset + at)
        except OSError as error:
            return -(error.errno or errno.EIO)
        if count == 0:
            return -errno.ENOSPC if write else -errno.ENODATA
        at += count
    return 0


class DirectFile(contextlib.AbstractContextManager["DirectFile"]):
    """File opened twice: with O_DIRECT where the filesystem has it (``direct``), and through the page cache.

    With ``create`` it is made if need be. Raise OSError as ``open`` does.
    """

    def __init__(self, path: str | os.PathLike[str], *, create: bool = False, writable: bool = True) -> None:
        self.path, self._direct = os.fspath(path), -1
        self._under_way: dict[FileTransfer, None] = {}
        flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC
        self._plain = os.open(self.path, flags | (os.O_CREAT if create else 0), 0o600)
        try:
            self._direct = os.open(self.path, flags | os.O_DIRECT)
        except OSError as error:
            if error.errno not in _NO_DIRECT:
                os.close(self._plain)
                raise
        if self.direct:
            # read-ahead would leave neighbours of a partial block in the page cache, for direct writes to find
            os.posix_fadvise(self._plain, 0, 0, os.POSIX_FADV_RANDOM)

    direct = property(lambda self: self._direct >= 0, doc="Whether whole blocks bypass the page cache.")
    size = property(lambda self: os.fstat(self._plain).st_size, doc="Bytes of the file now.")

    def allocate(self, nbytes: int) -> None:
        """Reserve disk space for the first ``nbytes`` bytes (the file never shrinks). Raise TransferError if full."""
        before = self.size
        if nbytes == 0:
            return
        try:
            _reserve(self._plain, nbytes)
        except OSError as error:
            if error.errno in (*_NO_DIRECT, errno.ENOSYS):
                os.ftruncate(self._plain, max(before, nbytes))  # it cannot reserve; a full disk shows later
                return
            os.ftruncate(self._plain, before)  # gives back the part that there was room for
            raise _failure(error.errno or errno.EIO, f"reserving {nbytes} bytes", self.path) from error

    def clear(self) -> None:
        """Give all disk space of the file back; its content is gone."""
        os.ftruncate(self._plain, 0)

    def close(self) -> None:
        """Close the file, when the transfers under way are done."""
        fds, self._plain, self._direct = (self._plain, self._direct), -1, -1  # no new ones from here on
        for transfer in list(self._under_way):
            transfer.settle()
        for fd in fds:
            if fd >= 0:
                os.close(fd)

    def __exit__(self, *_: object) -> None:
        self.close()


def _reserve(fd: int, nbytes: int) -> None:
    """Reserve disk space for the first ``nbytes`` bytes of a file. Raise OSError, EOPNOTSUPP among them. Not by
    ``os.posix_fallocate``: on a filesystem without reservations it writes a byte into every block.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    while libc.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(nbytes)):
        if (code := ctypes.get_errno()) != errno.EINTR:
            raise OSError(code, os.strerror(code))


class FileTransfer(Transfer):
    """Read or write of a file under way. It keeps the tensor alive and, while its engine is open, ends unwaited."""

    def __init__(
        self, engine: "AioEngine", file: DirectFile, *, write: bool, offset: int, tensor: torch.Tensor
    ) -> None:
        self.nbytes = tensor.nbytes
        self.asked = False  # whether somebody has called ``wait``, and so knows of a failure
        self._engine, self._file = engine, file
        self._tensor: torch.Tensor | None = tensor
        self._what = f"{'writing' if write else 'reading'} {self.nbytes} bytes at offset {offset}"
        self._lock = threading.Lock()
        # Lists that C code appends to: a handler that raises (Ctrl-C) between a return and an assignment would lose
        # values.
        self._ticket, self._code = list[int](), list[int]()
        with self._lock:
            # Known to both before either is asked whether it is open: closing them waits for what it finds.
            file._under_way[self] = engine._under_way[self] = None
            try:
                if engine._closed or file._plain < 0:
                    raise ValueError(f"{'this AioEngine' if engine._closed else file.path} is closed")
                submit, kept = engine._calls.submit, (tensor,) * engine._calls.holds
                move = (int(write), file._direct, file._plain, offset, tensor.data_ptr(), self.nbytes, *kept)
                self._ticket.extend([-errno.ECHILD] if engine._foreign() else itertools.starmap(submit, [move]))
                self._code.extend(code for code in self._ticket if code < 0)
            finally:
                if self._code or not self._ticket:
                    self._release()
        if any(self._code):  # a 0 is of another thread, which has waited for this one already
            raise self.failure(self._code[0])

    def wait(self) -> None:
        """Wait for the end. Raise TransferError, with the file and the offset, if it failed; may be called again."""
        self.asked = True
        if code := self.settle():
            raise self.failure(code)

    def done(self) -> bool:
        if self._code or self._engine._foreign():
            return True
        if not self._lock.acquire(blocking=False):
            return False  # somebody is waiting for it
        try:
            return bool(self._code) or self._engine._calls.done(self._ticket[0]) != 0
        finally:
            self._lock.release()

    def waits_for(self) -> str:
        """Name the transfer for a watch, while ``wait`` has not returned."""
        return f"{self._what} of {self._file.path}"

    def failure(self, code: int) -> TransferError:
        """Return the error that ``wait`` raises for a ``code`` of :meth:`settle`."""
        return _failure(-code, self._what, self._file.path)

    def settle(self) -> int:
        """Wait, and let go of the tensor; return 0 or a negative errno."""
        if not self._code and self._engine._foreign():
            return -errno.ECHILD  # before the lock, which another thread may have held when this process was forked
        with self._lock:
            if not self._code:
                self._code.extend(map(self._engine._calls.wait, self._ticket))
            self._release()
        return self._code[0] if self._code else -errno.ECANCELED  # cut short before it began

    def _release(self) -> None:
        self._tensor = None
        self._file._under_way.pop(self, None)
        self._engine._under_way.pop(self, None)


class AioEngine(contextlib.AbstractContextManager["AioEngine"]):
    """Move bytes between host tensors and files; several threads may use one engine.

    At most ``queue_depth`` pieces of ``block_bytes`` (made a multiple of 4096) are under way on O_DIRECT descriptors,
    and ``threads`` through the page cache. ``backend`` is "auto", "io_uring", "libaio" or "threads"; DS_AIO_BACKEND in
    the environment decides for "auto". ``backend`` of the engine is the one in use, "python" where the native code
    cannot be compiled.

    Raise ValueError for an argument, TransferError or BuildError when the named backend is not to be had.
    """

    begun: ClassVar[int] = 0  # transfers in this process, by which a watch sees that it comes further

    def __init__(
        self, *, queue_depth: int = 32, block_bytes: int = 1 << 20, threads: int = 1, backend: str = "auto"
    ) -> None:
        if not 1 <= queue_depth <= 4096 or not 1 <= threads <= 256:
            raise ValueError(f"queue_depth is 1 to 4096 and threads 1 to 256, not {queue_depth} and {threads}")
        if not 1 <= block_bytes <= 1 << 30:
            raise ValueError(f"a block (block_size, block_bytes) is 1 byte to 1 GiB, not {block_bytes}")
        backend = os.environ.get("DS_AIO_BACKEND") or "auto" if backend == "auto" else backend
        if backend not in _CODES:
            names = ", ".join(_CODES)
            raise ValueError(f"a backend of file IO is one of {names}, not {backend!r} (argument or DS_AIO_BACKEND)")
        library = load(ASYNC_IO) if backend in ("io_uring", "libaio") else try_load(ASYNC_IO)
        how = {"block": -(-block_bytes // ALIGN) * ALIGN, "threads": threads}
        self._calls = _Native(library, backend=backend, depth=queue_depth, **how) if library else _PythonThreads(**how)
        self.backend, self._pid, self._closed = self._calls.name, os.getpid(), False
        self._under_way: dict[FileTransfer, None] = {}  # oldest first; holds the tensors
        # also when it is never closed: at the end of the process, and before its tensors are collected with it
        self._end = weakref.finalize(self, self._calls.free)

    def read(self, file: DirectFile, offset: int, tensor: torch.Tensor) -> FileTransfer:
        """Start filling ``tensor`` (contiguous, on the host) with the bytes of ``file`` from ``offset`` (bytes) on.
        Raises ValueError for another tensor or something closed, TransferError when it cannot start; ``wait`` too.
        """
        return self._start(file, offset, tensor, write=False)

    def write(self, file: DirectFile, offset: int, tensor: torch.Tensor) -> FileTransfer:
        """Start writing ``tensor`` at ``offset``; it must not change before ``wait``. Errors as :meth:`read`."""
        return self._start(file, offset, tensor, write=True)

    def _start(self, file: DirectFile, offset: int, tensor: torch.Tensor, *, write: bool) -> FileTransfer:
        whole = tensor.layout is torch.strided and tensor.device.type == "cpu" and tensor.is_contiguous()
        if not whole or tensor.is_conj() or tensor.is_neg():
            kind = f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
            raise ValueError(f"file IO takes contiguous host tensors, not {kind}")
        if offset < 0:
            raise ValueError(f"an offset in {file.path} is not negative: {offset}")
        # transfers that nobody waits for let go of their tensors here; they still know how they ended
        for transfer in list(self._under_way)[:2]:
            if transfer.done():
                transfer.settle()
        AioEngine.begun += 1
        return FileTransfer(self, file, write=write, offset=offset, tensor=tensor)

    def _foreign(self) -> bool:
        return os.getpid() != self._pid

    def close(self) -> None:
        """End the engine when everything under way is done; log failures nobody asked for. May be called again."""
        if self._foreign() or self._closed:
            return
        self._closed = True
        for transfer in list(self._under_way):
            if (code := transfer.settle()) and not transfer.asked:
                logger.warning("file IO that nobody waited for failed: %s", transfer.failure(code))
        self._end()

    def __exit__(self, *_: object) -> None:
        self.close()
