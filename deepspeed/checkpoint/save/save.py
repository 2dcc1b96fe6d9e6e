"""One save: every rank streams its parts into a file of its own; the first rank joins the lists and publishes the
folder.

Ranks tell each other where their bytes lie through small files in the folder itself, so that a save can end in the
background without a collective. Nothing has its final name before every byte is on the disk.
"""

import atexit
import contextlib
import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from deepspeed.checkpoint.format import folders
from deepspeed.checkpoint.format.boxes import Span
from deepspeed.checkpoint.format.checksum import crc32c
from deepspeed.checkpoint.format.files import ChunkWriter
from deepspeed.checkpoint.format.manifest import MANIFEST, Box, Entry, Key, Manifest
from deepspeed.checkpoint.save.collect import Part
from deepspeed.errors import CheckpointError
from deepspeed.observe.log import logger
from deepspeed.tier.aligned import aligned_empty

_LIST = "rank_{:05d}.list"
_DATA = "rank_{:05d}.bin"
_FAILED = "rank_{:05d}.failed"
_SLAB = 32 << 20  # bytes of one snapshot buffer
_GIVEN_UP = "given up, because the save failed on another rank"
_NAP_S = 0.005  # between looks at the other ranks, at least
_PATIENCE_S = 600.0  # without a sign of life from another rank
_LAST_PATIENCE_S = 60.0  # the same when this process wants to end


@dataclass
class RankFile:
    """The file one rank writes, and the list of what is in it."""

    folder: Path
    rank: int
    expect_bytes: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    told: Callable[[int], None] = lambda _: None

    def __post_init__(self) -> None:
        self._writer = ChunkWriter(self.folder / _DATA.format(self.rank), expect_bytes=self.expect_bytes)
        self._parts: list[tuple[Key, torch.dtype, tuple[int, ...], Span]] = []

    def write(self, parts: Iterable[Part]) -> None:
        """Append ``parts``. Raises CheckpointError (disk full, ...)."""
        for part in parts:
            span = Span(part.lo, part.lo + part.values.numel(), part.region)
            self._parts.append(((part.state, part.name), part.values.dtype, part.shape, span))
            self._writer.append(part.values)
            self.told(part.values.nbytes)

    def limit(self, rate_bytes: int) -> None:
        """At most so many bytes a second from here on; 0 for no limit."""
        self._writer.rate_bytes = rate_bytes

    def close(self) -> None:
        """Bring everything to the disk and leave the list for the first rank."""
        name = _DATA.format(self.rank)
        places = self._writer.close()
        entries: dict[Key, Entry] = {}
        for (key, dtype, shape, (lo, hi, region)), place in zip(self._parts, places, strict=True):
            box = Box(name, place.offset, place.extent, lo, hi, tuple(place.crcs), region)
            known = entries.get(key)
            entries[key] = Entry(*key, dtype, shape, (*known.boxes, box) if known else (box,))
        files = {name: (self.folder / name).stat().st_size}
        content = Manifest(entries, files, self.facts).to_bytes(crc32c)
        folders.write_atomically(self.folder / _LIST.format(self.rank), content)

    def __enter__(self) -> "RankFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Tell the first rank, as far as that is still possible, and drop the file."""
        with contextlib.suppress(OSError, CheckpointError):
            self._writer.abort()
        with contextlib.suppress(OSError):
            (self.folder / _FAILED.format(self.rank)).write_text(str(error), encoding="utf-8")


class Snapshots:
    """Host memory for copies of parts, kept from one save to the next: mapping new memory takes longer than the copy
    itself.
    """

    def __init__(self) -> None:
        self._slabs: list[torch.Tensor] = []

    def copy(self, parts: Iterable[Part]) -> Iterator[Part]:
        """Copies of ``parts``, valid until the next call: training may go on."""
        index, used = -1, 0
        for part in parts:
            nbytes = part.values.nbytes
            if index < 0 or used + nbytes > self._slabs[index].numel():
                index, used = index + 1, 0
                self._make(index, nbytes)
            values = self._slabs[index][used : used + nbytes].view(part.values.dtype)
            values.copy_(part.values)
            used += -(-nbytes // 64) * 64
            yield replace(part, values=values)
        del self._slabs[index + 1 :]

    def _make(self, index: int, nbytes: int) -> None:
        """A slab of at least ``nbytes`` at ``index``."""
        if index < len(self._slabs) and self._slabs[index].numel() >= nbytes:
            return
        del self._slabs[index : index + 1]  # before the larger one is there
        self._slabs.insert(index, aligned_empty(max(_SLAB, nbytes)))


def drained(parts: "deque[Part]") -> Iterator[Part]:
    """``parts`` one by one, each let go of before the next."""
    while parts:
        yield parts.popleft()


def until(parts: Iterable[Part], stop: threading.Event) -> Iterator[Part]:
    """``parts``; raises CheckpointError once ``stop`` is set."""
    for part in parts:
        if stop.is_set():
            raise CheckpointError(_GIVEN_UP)
        yield part


def wait_for_ranks(folder: Path, ranks: int, *, stop: threading.Event | None = None) -> None:
    """Until every rank has left its list. Raises CheckpointError when one failed, or has written nothing for ten
    minutes.
    """
    begun, missing, written = time.monotonic(), set(range(ranks)), -1
    while missing:
        glance = time.monotonic()
        missing -= {r for r in missing if (folder / _LIST.format(r)).is_file()}
        failed = next((r for r in sorted(missing) if (folder / _FAILED.format(r)).is_file()), None)
        if failed is not None:
            raise CheckpointError(f"rank {failed}: {(folder / _FAILED.format(failed)).read_text(encoding='utf-8')}")
        if stop is not None and stop.is_set():
            raise CheckpointError(_GIVEN_UP)
        if (now := _last_write(folder, missing)) != written:
            begun, written = time.monotonic(), now
        if time.monotonic() - begun > (_PATIENCE_S if threading.main_thread().is_alive() else _LAST_PATIENCE_S):
            raise CheckpointError(
                f"ranks {sorted(missing)} have written nothing for {time.monotonic() - begun:.0f} s; they may have died"
            )
        if missing:  # many ranks take long to look at, and training needs this interpreter and the filesystem too
            time.sleep(max(_NAP_S, min(1.0, 20 * (time.monotonic() - glance))))


def _last_write(folder: Path, ranks: set[int]) -> int:
    """Something that changes when one of ``ranks`` writes or is done."""
    found = len(ranks)
    for rank in ranks:
        with contextlib.suppress(OSError):
            found += (folder / _DATA.format(rank)).stat().st_mtime_ns
    return found


def join_lists(folder: Path, ranks: int) -> Manifest:
    """One manifest out of every rank's list: boxes joined per tensor, ``facts["ranks"]`` in rank order."""
    whole = Manifest(facts={"ranks": []})
    for rank in range(ranks):
        path = folder / _LIST.format(rank)
        part = Manifest.from_bytes(path.read_bytes(), where=str(path), checksum=crc32c)
        whole.files |= part.files
        whole.facts["ranks"].append(part.facts)
        for key, entry in part.entries.items():
            known = whole.entries.get(key)
            if known is not None and (known.dtype, known.shape) != (entry.dtype, entry.shape):
                raise CheckpointError(
                    f"{entry.state} of {entry.name!r} is {known.dtype} {known.shape} on one rank and "
                    f"{entry.dtype} {entry.shape} on "
                    f"rank {rank}; ranks hold different models"
                )
            whole.entries[key] = (
                entry if known is None else Entry(*key, entry.dtype, entry.shape, (*known.boxes, *entry.boxes))
            )
    for entry in whole.entries.values():
        for gap in entry.faults():
            raise CheckpointError(
                f"elements {gap.lo} to {gap.hi} of {entry.state} of {entry.name!r} were written by {gap.times} "
                "ranks instead of one; "
                "ranks do not agree on who holds which part of it"
            )
    return whole


def publish(folder: Path, manifest: Manifest, tag: str, extra: Callable[[Path, Manifest], None]) -> Path:
    """Write the manifest and, with ``extra``, what else belongs into the folder; then give it its name."""
    for path in folder.glob("rank_*.list"):
        path.unlink()
    extra(folder, manifest)
    folders.write_atomically(folder / MANIFEST, manifest.to_bytes(crc32c))
    return folders.publish(folder, tag)


class Background:
    """A save that goes on in a thread. ``finished`` and ``error`` are this rank's own."""

    def __init__(
        self, tag: str, folder: Path, work: Callable[[threading.Event], None], *, hurry: Callable[[], None]
    ) -> None:
        self.tag, self.folder, self.hurry = (
            tag,
            folder,
            hurry,
        )  # the last: somebody waits, no limit on the rate any more
        self.error: BaseException | None = None
        self.told = False
        self.stop = threading.Event()
        self._work = work
        # Not a daemon: a process that ends by itself waits for its last checkpoint.
        self._thread = threading.Thread(target=self._run, name=f"checkpoint-{tag}", daemon=False)
        try:
            self._thread.start()
        except RuntimeError as error:  # too many of them, or this process is ending; the other ranks count on this one
            logger.warning("checkpoint %s is written at once, because no thread can be started: %s", tag, error)
            self.hurry()
            self._run()

    def _run(self) -> None:
        try:
            self._work(self.stop)
        except BaseException as error:
            self.error = error
            logger.error("the background save of checkpoint %s failed: %s", self.tag, error)
            atexit.register(self._end_badly)

    def _end_badly(self) -> None:
        """A process that ends without having heard of the failure must not end as if all were well."""
        if self.told:
            return
        self.told = True  # the other handlers first, which may call this one again
        atexit._run_exitfuncs()
        logger.error("ending with status 1, because checkpoint %s was not saved: %s", self.tag, self.error)
        sys.stdout.flush()
        os._exit(1)

    @property
    def finished(self) -> bool:
        return not self._thread.is_alive()

    def give_up(self) -> None:
        """End it soon: after the part that is being written, at full speed."""
        self.stop.set()
        self.hurry()

    def wait(self, seconds: float | None) -> None:
        """Until it has ended, or so long."""
        if not self.finished:
            self._thread.join(seconds)


def as_json(value: Any) -> str:
    """Canonical text, for comparing what ranks hold."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
