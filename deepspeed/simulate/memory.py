"""Bytes by place and category over a run, and what allocators make of them."""

import math
from collections import Counter
from dataclasses import dataclass, field

from deepspeed.simulate.allocator import CachingAllocator
from deepspeed.simulate.events import DEVICE, PINNED, Allocate, Event, Free


def pinned_bytes(nbytes: int) -> int:
    """What torch's caching allocator of pinned memory takes for that many: the next power of two."""
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
        """Look for the peak from here on."""
        self.peak, self.at_peak = self.now, {name: size for name, size in self.by_category.items() if size}


class Memory:
    """Feed it the events of a run. ``places``: bytes as they were asked for, of pinned memory as they are rounded."""

    def __init__(self, device_bytes: float = math.inf) -> None:
        self.places: dict[str, Usage] = {}
        self.allocator = CachingAllocator(device_bytes)
        self._buffers: dict[int, tuple[str, int, str]] = {}

    def of(self, place: str) -> Usage:
        """The bytes in that place."""
        return self.places.setdefault(place, Usage())

    def feed(self, event: Event) -> None:
        """The next event of the program."""
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
        """Look for peaks from here on, with the allocator's cache emptied."""
        for usage in self.places.values():
            usage.restart()
        self.allocator.empty_cache()
        self.allocator.retries = 0
        self.allocator.peak_allocated, self.allocator.peak_reserved = self.allocator.allocated, self.allocator.reserved
