"""What a folder's drive moves through the IO engine, and through the simplest loop there is.

The file has no name from the moment it is open, so whatever ends the process gives the space back.
"""

import contextlib
import os
import time
import uuid
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from deepspeed.errors import DeepSpeedError, UsageError
from deepspeed.tier.aio import AioEngine, DirectFile
from deepspeed.tier.aligned import ALIGN, aligned_empty
from deepspeed.tier.transfer import Transfer

PIECE_BYTES = 64 << 20  # memory used, whatever the size of the file: it holds the same bytes over and over
WAYS = ("engine", "plain")
Rates = dict[str, dict[str, list[float]]]  # read or write -> way -> GB/s of every repetition


class WrongBytesError(DeepSpeedError):
    """What was read is not what had been written."""


@dataclass(frozen=True)
class Load:
    """How the engine is driven: bytes of a request, requests under way, threads where the page cache is in the way."""

    block_bytes: int = 1 << 20
    queue_depth: int = 32
    threads: int = 1
    backend: str = "auto"

    def engine(self) -> AioEngine:
        """An engine with these settings. Raises ValueError or TransferError as it does."""
        return AioEngine(
            queue_depth=self.queue_depth, block_bytes=self.block_bytes, threads=self.threads, backend=self.backend
        )


class Target:
    """``nbytes`` bytes under ``folder``, and memory to fill them from. Raises UsageError or TransferError."""

    def __init__(self, folder: str, nbytes: int) -> None:
        if nbytes < ALIGN or nbytes % ALIGN:
            raise UsageError(
                f"the size of the file is a multiple of {ALIGN} bytes, not {nbytes}; for example 1G, 64M or 16K"
            )
        if not os.path.isdir(folder):
            fault = "is not a folder" if os.path.exists(folder) else "does not exist"
            raise UsageError(f"the folder {folder} {fault}; name one on the drive to be measured")
        space = os.statvfs(folder)
        if (free := space.f_bavail * space.f_frsize) < nbytes:
            raise UsageError(
                f"{folder} has {free / 1e9:.2f} GB of free space and the file takes {nbytes / 1e9:.2f}; give a smaller "
                "--io_size"
            )
        self.nbytes = nbytes
        self.pattern = aligned_empty(min(nbytes, PIECE_BYTES)).random_()
        self.scratch = aligned_empty(self.pattern.numel())
        path = os.path.join(folder, f"ds_io.{uuid.uuid4().hex}.tmp")
        try:
            self.file = DirectFile(path, create=True)
            self.fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if self.file.direct else 0))
        except OSError as error:
            raise UsageError(
                f"no file can be made in {folder}: {error.strerror}; name a folder that you may write"
            ) from error
        finally:
            with contextlib.suppress(OSError):
                os.unlink(path)
        try:
            self.file.allocate(nbytes)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give the space back."""
        self.file.close()
        os.close(self.fd)

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Offset and bytes of each part of the file that is as long as the memory, or shorter."""
        for offset in range(0, self.nbytes, self.pattern.numel()):
            yield offset, min(self.pattern.numel(), self.nbytes - offset)


def through_engine(target: Target, engine: AioEngine, load: Load, *, write: bool) -> None:
    """Move the whole file; so many pieces are under way that the queue is full across their borders."""
    memory, start = (target.pattern, engine.write) if write else (target.scratch, engine.read)
    window = -(-load.queue_depth * load.block_bytes // PIECE_BYTES) + 1
    under_way: deque[Transfer] = deque()
    for offset, nbytes in target.pieces():
        under_way.append(start(target.file, offset, memory[:nbytes]))
        if len(under_way) > window:
            under_way.popleft().wait()
    for transfer in under_way:
        transfer.wait()


def through_loop(target: Target, load: Load, *, write: bool) -> None:
    """Move the whole file block by block, as programs without an engine do: one thread, O_DIRECT if there is any."""
    memory, call = (target.pattern, os.pwritev) if write else (target.scratch, os.preadv)
    view = memory.numpy().data
    for offset, nbytes in target.pieces():
        at = 0
        while at < nbytes:
            count = call(target.fd, [view[at : min(at + load.block_bytes, nbytes)]], offset + at)
            if count == 0:
                raise OSError(f"{target.file.path} ends at {offset + at} of {target.nbytes} bytes")
            at += count


def check(target: Target, engine: AioEngine) -> None:
    """Read everything back through the engine. Raises WrongBytesError."""
    for offset, nbytes in target.pieces():
        engine.read(target.file, offset, target.scratch[:nbytes].zero_()).wait()
        if not torch.equal(target.scratch[:nbytes], target.pattern[:nbytes]):
            raise WrongBytesError(
                f"{target.file.path}: other bytes are read than were written, between {offset} and {offset + nbytes}"
            )


def speed(target: Target, engine: AioEngine | None, load: Load, *, write: bool) -> float:
    """GB/s over the whole file, once; without an engine, of the loop.

    The file is written once before: blocks that never were are slow the first time, and reading them asks nothing of a
    drive.
    """
    begin = time.perf_counter()
    if engine is None:
        through_loop(target, load, write=write)
    else:
        through_engine(target, engine, load, write=write)
    return target.nbytes / (time.perf_counter() - begin) / 1e9


def compare(
    target: Target,
    engine: AioEngine,
    load: Load,
    operations: tuple[str, ...] = ("write", "read"),
    *,
    loops: int = 3,
    warmup: int = 1,
    count_warmup: bool = False,
    validate: bool = False,
) -> Rates:
    """Both ways in turn, ``loops`` times after ``warmup`` untimed ones; who begins changes. ``validate`` reads all
    back.

    Raises OSError when the drive fails, WrongBytesError when it lies.
    """
    through_engine(target, engine, load, write=True)
    rates: Rates = {operation: {way: [] for way in WAYS} for operation in operations}
    for turn in range(warmup + loops):
        for operation in operations:
            for way in WAYS if turn % 2 else reversed(WAYS):
                checked = validate and way == "engine"
                if checked and operation == "write":
                    target.pattern.random_()  # what an earlier turn left must not pass for this one's
                rate = speed(target, engine if way == "engine" else None, load, write=operation == "write")
                if checked:
                    check(target, engine)
                if turn >= warmup or count_warmup:
                    rates[operation][way].append(rate)
    return rates
