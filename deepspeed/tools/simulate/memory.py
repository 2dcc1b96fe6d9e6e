"""Bytes by place and category over a run, and what PyTorch's caching allocator for CUDA reserves for them.

With default settings: size classes, a pool for each stream, best fit, splitting and merging, as docs/notes/cuda
("Memory management") and the allocator's own source describe them; expandable segments are not modelled.
"""

import bisect
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from deepspeed.tools.simulate.events import DEVICE, PINNED, Allocate, Event, Free

_GRAIN, _SMALL, _SMALL_SEGMENT = 512, 1 << 20, 2 << 20
_LARGE, _LARGE_SEGMENT, _ROUND = 10 << 20, 20 << 20, 2 << 20


def _rounded(nbytes: int, grain: int) -> int:
    return -(-nbytes // grain) * grain


class _Block:
    """Piece of a segment; ``previous`` and ``next`` are its neighbours in the segment."""

    __slots__ = ("free", "next", "pool", "previous", "size")

    def __init__(self, size: int, pool: "list[Any]", previous: "_Block | None", following: "_Block | None") -> None:
        self.size, self.pool, self.previous, self.next, self.free = size, pool, previous, following, False


class CachingAllocator:
    """Count bytes allocated now, and reserved now and at most.

    Where another segment would pass ``limit``, the device's bytes, segments without a block in use are given back
    first, ``retries`` times; a real program would fail for what is reserved beyond the limit even then.
    """

    def __init__(self, limit: float = math.inf) -> None:
        self.limit, self.retries = limit, 0
        self.allocated = self.reserved = self.peak_reserved = 0
        self._pools: dict[tuple[int, bool], list[tuple[int, int, _Block]]] = {}
        self._blocks: dict[int, _Block] = {}
        self._order = 0

    def allocate(self, buffer: int, nbytes: int, stream: int) -> None:
        """Allocate a block for ``buffer`` from the pool of ``stream``."""
        size = max(_GRAIN, _rounded(nbytes, _GRAIN))
        small = size <= _SMALL
        pool = self._pools.setdefault((stream, small), [])
        at = bisect.bisect_left(pool, (size,))
        if at < len(pool):
            block = pool.pop(at)[2]
        else:
            segment = _SMALL_SEGMENT if small else _LARGE_SEGMENT if size < _LARGE else _rounded(size, _ROUND)
            if self.reserved + segment > self.limit:
                self.retries += 1
                self.empty_cache()
            block = _Block(segment, pool, None, None)
            self.reserved += segment
            self.peak_reserved = max(self.peak_reserved, self.reserved)
        rest = block.size - size
        if rest >= _GRAIN if small else rest > _SMALL:
            other = _Block(rest, pool, block, block.next)
            if block.next is not None:
                block.next.previous = other
            block.next, block.size = other, size
            self._put(other)
        block.free = False
        self._blocks[buffer] = block
        self.allocated += block.size

    def free(self, buffer: int) -> None:
        """Give the block of ``buffer`` back, merged with free neighbours."""
        block = self._blocks.pop(buffer)
        self.allocated -= block.size
        for other in (block.previous, block.next):
            if other is not None and other.free:
                self._take(other)
                block.size += other.size
                if other is block.previous:
                    block.previous = other.previous
                    if block.previous is not None:
                        block.previous.next = block
                else:
                    block.next = other.next
                    if block.next is not None:
                        block.next.previous = block
        self._put(block)

    def empty_cache(self) -> None:
        """Give segments without a block in use back to the device."""
        for pool in self._pools.values():
            whole = [entry for entry in pool if entry[2].previous is None and entry[2].next is None]
            self.reserved -= sum(size for size, _, _ in whole)
            pool[:] = [entry for entry in pool if entry not in whole]

    def _put(self, block: _Block) -> None:
        self._order += 1
        block.free = True
        bisect.insort(block.pool, (block.size, self._order, block))

    def _take(self, block: _Block) -> None:
        at = bisect.bisect_left(block.pool, (block.size,))
        while block.pool[at][2] is not block:
            at += 1
        del block.pool[at]


def pinned_bytes(nbytes: int) -> int:
    """Return the bytes that torch's allocator of pinned memory takes for ``nbytes``: the next power of two."""
    return 1 << max(0, nbytes - 1).bit_length()


@dataclass
class Usage:
    """Bytes in one place: now, at most, and by category in both cases."""

    now: int = 0
    peak: int = 0
    by_category: Counter[str] = field(default_factory=Counter)
    at_peak: dict[str, int] = field(default_factory=dict)

    def add(self, nbytes: int, category: str) -> None:
        self.now += nbytes
        self.by_category[category] += nbytes
        if self.now > self.peak:
            self.restart()

    def restart(self) -> None:
        """Restart the peak from here on."""
        self.peak, self.at_peak = self.now, {name: size for name, size in self.by_category.items() if size}


class Memory:
    """Follow memory over the events of a run. ``places``: bytes as they were asked for, pinned memory as rounded."""

    def __init__(self, device_bytes: float = math.inf) -> None:
        self.places: dict[str, Usage] = {}
        self.allocator = CachingAllocator(device_bytes)
        self._buffers: dict[int, tuple[str, int, str]] = {}

    def of(self, place: str) -> Usage:
        return self.places.setdefault(place, Usage())

    def feed(self, event: Event) -> None:
        if isinstance(event, Allocate) and event.nbytes:
            size = pinned_bytes(event.nbytes) if event.place == PINNED else event.nbytes
            self._buffers[event.buffer] = (event.place, size, event.category)
            self.of(event.place).add(size, event.category)
            if event.place == DEVICE:
                self.allocator.allocate(event.buffer, event.nbytes, event.stream)
        elif isinstance(event, Free) and event.buffer in self._buffers:
            place, size, category = self._buffers.pop(event.buffer)
            self.of(place).add(-size, category)
            if place == DEVICE:
                self.allocator.free(event.buffer)

    def restart(self) -> None:
        """Restart the peaks from here on, with the allocator's cache emptied."""
        for usage in self.places.values():
            usage.restart()
        self.allocator.empty_cache()
        self.allocator.retries = 0
        self.allocator.peak_reserved = self.allocator.reserved
