"""What a folder's drive moves through the IO engine, and through the simplest loop there is.

The file has no name from the moment it is open, so whatever ends the process gives the space back.
"""

import contextlib
import os
import statistics
import time
import uuid
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from deepspeed.errors import DeepSpeedError, UsageError
from deepspeed.tier.aio import AioEngine, DirectFile
from deepspeed.tier.aligned import ALIGN, aligned_empty
from deepspeed.tier.transfer import Transfer

PIECE_BYTES = 64 << 20  # memory used, whatever the size of the file: it holds the same bytes over and over
WAYS = ("engine", "plain")


class WrongBytesError(DeepSpeedError):
    """What was read is not what had been written."""


@dataclass(frozen=True)
class Load:
    """How the engine is driven: bytes of one request, requests under way, threads for what passes through the page
    cache.
    """

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
    """``nbytes`` bytes on the drive under ``folder``, and host memory to fill them from.

    Raises UsageError for a folder or a size that cannot be used, TransferError when the space cannot be had.
    """

    def __init__(self, folder: str, nbytes: int) -> None:
        if nbytes < ALIGN or nbytes % ALIGN:
            raise UsageError(
                f"the size of the file is a multiple of {ALIGN} bytes, not {nbytes}; for example 1G, 64M or 16K"
            )
        _check_folder(folder, nbytes)
        self.nbytes = nbytes
        self.pattern = aligned_empty(min(nbytes, PIECE_BYTES)).random_()
        self.scratch = aligned_empty(self.pattern.numel())
        path = os.path.join(folder, f"ds_io.{uuid.uuid4().hex}.tmp")
        try:
            self.file = DirectFile(path, create=True)
            flags = os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if self.file.direct else 0)
            self.fd = os.open(path, flags)
        except OSError as error:
            raise UsageError(
                f"no file can be made in {folder}: {error.strerror}; name a folder that you may write"
            ) from error
        finally:
            with contextlib.suppress(OSError):
                os.unlink(path)
        self.file.path = path
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


def _check_folder(folder: str, nbytes: int) -> None:
    path = Path(folder)
    if not path.exists():
        raise UsageError(f"the folder {folder} does not exist; name one on the drive to be measured")
    if not path.is_dir():
        raise UsageError(f"{folder} is not a folder; name one on the drive to be measured")
    space = os.statvfs(folder)
    free = space.f_bavail * space.f_frsize
    if free < nbytes:
        raise UsageError(
            f"{folder} has {free / 1e9:.2f} GB of free space and the file takes {nbytes / 1e9:.2f}; give a "
            "smaller --io_size"
        )


def through_engine(target: Target, engine: AioEngine, *, write: bool, window: int) -> None:
    """Move the whole file; ``window`` pieces are handed over before the first is waited for."""
    memory, start = (target.pattern, engine.write) if write else (target.scratch, engine.read)
    under_way: deque[Transfer] = deque()
    for offset, nbytes in target.pieces():
        under_way.append(start(target.file, offset, memory[:nbytes]))
        if len(under_way) > window:
            under_way.popleft().wait()
    for transfer in under_way:
        transfer.wait()


def through_loop(target: Target, *, write: bool, block_bytes: int) -> None:
    """Move the whole file block after block, as a program without an engine does: O_DIRECT where there is any, one
    thread.
    """
    memory, call = (target.pattern, os.pwritev) if write else (target.scratch, os.preadv)
    view = memory.numpy().data
    for offset, nbytes in target.pieces():
        at = 0
        while at < nbytes:
            count = call(target.fd, [view[at : min(at + block_bytes, nbytes)]], offset + at)
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


@dataclass
class Speeds:
    """GB/s (10^9 bytes) of every repetition."""

    values: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Of the repetitions; 0 without any."""
        return statistics.median(self.values) if self.values else 0.0


Results = dict[str, dict[str, Speeds]]  # read or write -> way


def window_of(load: Load) -> int:
    """Pieces under way that keep the queue full across their borders."""
    return -(-load.queue_depth * load.block_bytes // PIECE_BYTES) + 1


def speed(target: Target, engine: AioEngine | None, load: Load, *, write: bool) -> float:
    """GB/s over the whole file, once; without an engine, of the loop."""
    begin = time.perf_counter()
    if engine is None:
        through_loop(target, write=write, block_bytes=load.block_bytes)
    else:
        through_engine(target, engine, write=write, window=window_of(load))
    return target.nbytes / (time.perf_counter() - begin) / 1e9


def fill(target: Target, engine: AioEngine, load: Load) -> None:
    """Write everything once: blocks that never were written are slow the first time, and reading them asks nothing of a
    drive.
    """
    through_engine(target, engine, write=True, window=window_of(load))


@dataclass(frozen=True)
class Plan:
    """What is measured: "read", "write" or both, how often, after how many untimed repetitions; ``validate`` reads all
    back.
    """

    operations: tuple[str, ...] = ("write", "read")
    loops: int = 3
    warmup: int = 1
    count_warmup: bool = False
    validate: bool = False


def compare(target: Target, engine: AioEngine, load: Load, plan: Plan) -> Results:
    """Both ways in turn; who begins changes every time. Raises OSError when the drive fails, WrongBytesError when it
    lies.
    """
    fill(target, engine, load)
    results: Results = {operation: {way: Speeds() for way in WAYS} for operation in plan.operations}
    for turn in range(plan.warmup + plan.loops):
        for operation in plan.operations:
            write = operation == "write"
            for way in WAYS if turn % 2 else reversed(WAYS):
                ours = way == "engine"
                if plan.validate and ours and write:
                    target.pattern.random_()  # what an earlier turn left must not pass for this one's
                found = speed(target, engine if ours else None, load, write=write)
                if plan.validate and ours:
                    check(target, engine)
                if turn >= plan.warmup or plan.count_warmup:
                    results[operation][way].values.append(found)
    return results
