"""``ds_io`` and ``ds_bench io``: how fast a folder's drive is through the IO engine, beside a plain loop.

    ds_io --folder /nvme
    ds_io --folder /nvme --read --io_size 4G --queue_depth 64 --json

One file is written to the folder; it has no name from the moment it is open, so it is gone when the command ends,
however it ends. Speeds are in GB/s (10^9 bytes). Buffers are in host memory, and one process loads one drive: flags of
other tools for GPU direct storage, pinning and several processes are not here. Exit status: 0; 2 when the command line
or the folder is wrong, or the drive fails; 130 after Ctrl-C.
"""

import contextlib
import os
import time
import uuid
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed.errors import DeepSpeedError, UsageError
from deepspeed.tier.aio import AioEngine, DirectFile
from deepspeed.tier.arena import ALIGN, aligned_empty
from deepspeed.tier.transfer import Transfer
from deepspeed.tools.bench.common import check_folder, spread, titled

PIECE_BYTES = 64 << 20  # memory used, whatever the size of the file: it holds the same bytes over and over
WAYS = ("engine", "plain")


@dataclass(frozen=True)
class Load:
    """Settings of the engine: bytes of a request, requests under way, threads where the page cache is in the way."""

    block_bytes: int = 1 << 20
    queue_depth: int = 32
    threads: int = 1
    backend: str = "auto"

    def engine(self) -> AioEngine:
        """Return an engine with these settings. Raises ValueError or TransferError as the engine does."""
        return AioEngine(**vars(self))


class Target:
    """File of ``nbytes`` bytes under ``folder``, and memory to fill it from. Raises UsageError or TransferError."""

    def __init__(self, folder: str, nbytes: int) -> None:
        if nbytes < ALIGN or nbytes % ALIGN:
            raise UsageError(f"--io_size is a multiple of {ALIGN} bytes, not {nbytes}; for example 1G, 64M or 16K")
        check_folder(folder, nbytes, "the file takes", "give a smaller --io_size")
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
        """Close the file, which frees its space on the drive."""
        self.file.close()
        os.close(self.fd)

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Yield offset and bytes of each part of the file that is as long as the memory, or shorter."""
        for offset in range(0, self.nbytes, self.pattern.numel()):
            yield offset, min(self.pattern.numel(), self.nbytes - offset)


def through_engine(target: Target, engine: AioEngine, load: Load, *, write: bool) -> None:
    """Move the whole file; enough pieces are under way to keep the queue full across their borders."""
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
    """Read everything back through the engine. Raises DeepSpeedError where bytes differ from those written."""
    for offset, nbytes in target.pieces():
        engine.read(target.file, offset, target.scratch[:nbytes].zero_()).wait()
        if not torch.equal(target.scratch[:nbytes], target.pattern[:nbytes]):
            raise DeepSpeedError(
                f"{target.file.path}: other bytes are read than were written, between {offset} and {offset + nbytes}"
            )


def speed(target: Target, engine: AioEngine | None, load: Load, *, write: bool) -> float:
    """Return GB/s over the whole file, which was written before; without an engine, of the loop."""
    begin = time.perf_counter()
    if engine is None:
        through_loop(target, load, write=write)
    else:
        through_engine(target, engine, load, write=write)
    return target.nbytes / (time.perf_counter() - begin) / 1e9


def _compare(target: Target, engine: AioEngine, load: Load, options: Any) -> dict[str, dict[str, list[float]]]:
    """Return GB/s of both ways by operation, in turns. OSError if the drive fails, DeepSpeedError for wrong data."""
    # Blocks that never were written are slow the first time, and reading them asks nothing of a drive.
    through_engine(target, engine, load, write=True)
    operations = [name for name in ("write", "read") if getattr(options, name)] or ["write", "read"]
    rates: dict[str, dict[str, list[float]]] = {name: {way: [] for way in WAYS} for name in operations}
    for turn in range(options.warmup_loops + options.loops):
        for operation, samples in rates.items():
            for way in WAYS if turn % 2 else reversed(WAYS):
                checked = options.validate and way == "engine"
                if checked and operation == "write":
                    target.pattern.random_()  # what an earlier turn left must not pass for this one's
                rate = speed(target, engine if way == "engine" else None, load, write=operation == "write")
                if checked:
                    check(target, engine)
                if turn >= options.warmup_loops or options.include_warmup_time:
                    samples[way].append(rate)
    return rates


def as_text(facts: dict[str, Any], _: Any) -> str:
    how = "past the page cache" if facts["direct"] else "through the page cache, as this filesystem has no O_DIRECT"
    rows: list[list[str | float]] = [["GB/s", "way", "median", "min", "max", "of plain"]]
    for operation, result in facts["results"].items():
        for way, beside in (("engine", f"{result['ratio']:.2f}x"), ("plain", "")):
            rows.append([operation, way, *(result[way][key] for key in ("median", "min", "max")), beside])
    title = (
        f"{facts['folder']}: {facts['io_size'] / 1e6:.1f} MB, {how}\n"
        f"engine: {facts['backend']}, blocks of {facts['block_size'] >> 10} KiB, {facts['queue_depth']} under way, "
        f"threads {facts['io_parallel']}; plain: one thread, one block at a time"
    )
    return titled(title, rows, left=2)


def measure(options: Any) -> dict[str, Any]:
    """Return GB/s of both ways. Raises UsageError, DeepSpeedError, OSError."""
    depth = 1 if options.sequential_requests else options.queue_depth
    load = Load(options.block_size, depth, options.io_parallel, options.backend)
    with load.engine() as engine, contextlib.closing(Target(options.folder, options.io_size)) as target:
        results: dict[str, Any] = _compare(target, engine, load, options)
        facts = {"folder": os.path.abspath(options.folder), "backend": engine.backend, "direct": target.file.direct}
    for result in results.values():
        result |= {way: spread(result[way]) for way in WAYS}
        result["ratio"] = result["engine"]["median"] / result["plain"]["median"]
    facts |= {name: getattr(options, name) for name in ("io_size", "block_size", "io_parallel", "loops")}
    return facts | {"queue_depth": depth, "unit": "GB/s", "results": results}
