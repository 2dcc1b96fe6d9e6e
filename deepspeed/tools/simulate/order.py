"""Is every access ordered after those it must come after? Vector clocks over streams (Mattern 1989; torch's sanitizer
of CUDA streams works alike, with one clock for each tensor instead of byte ranges).
"""

import itertools
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from deepspeed.tools.simulate.events import (
    DEVICE,
    DRIVE_READS,
    DRIVE_WRITES,
    HOST,
    PINNED,
    WORKER,
    Allocate,
    Event,
    Free,
    HostWait,
    Launch,
    Record,
    Seen,
    Site,
    Touch,
    Wait,
    place_of,
)

Clock = dict[int, int]
_DRIVES = (DRIVE_READS, DRIVE_WRITES)
_CUT = ("client/zero/init.py", "_cut")  # cuts what a constructor has left empty like all else
_LAST_OWNER = "the memory's last owner"
_LEAST_PART, _FEW, _WIDE = 4096, 4, -1


class Access(NamedTuple):
    """Access to bytes [start, stop) of a buffer by the ``number``-th launch, on ``stream``: a read or a write."""

    start: int
    stop: int
    stream: int
    number: int
    writes: bool
    name: str
    site: Site

    def __str__(self) -> str:
        where = {HOST: "by the host", WORKER: "by the update"}.get(self.stream, f"on stream {self.stream}")
        return f"{'write' if self.writes else 'read'} of {self.name} {where} at {place_of(self.site)}"


@dataclass(frozen=True)
class Unordered:
    """Two accesses that may happen in either order, or one to memory that may already be somebody else's."""

    problem: str
    first: Access
    second: Access
    buffer: Allocate

    def __str__(self) -> str:
        b = self.buffer
        return (
            f"{self.problem}: {self.second}\n  is not ordered after the {self.first};\n"
            f"  buffer of {b.nbytes:,} bytes ({b.category or b.place}), allocated at {place_of(b.site)}"
        )


class _Buffer:
    """Keep a buffer's accesses by the parts that they touch; accesses to many parts are ``_WIDE``. A buffer of
    thousands of parameters has thousands of accesses; an access to one parameter is to be compared with few.
    """

    __slots__ = ("accesses", "allocated", "freed", "grain")

    def __init__(self, allocated: Allocate) -> None:
        self.allocated = allocated
        self.grain = max(allocated.nbytes >> 8, _LEAST_PART)
        self.accesses = defaultdict[int, list[Access]](list)
        self.freed: Access | None = None

    def parts(self, access: Access) -> Collection[int]:
        """Return the parts where the access is kept."""
        first, last = access.start // self.grain, (access.stop - 1) // self.grain
        return range(first, last + 1) if last - first < _FEW else (_WIDE,)


class OrderCheck:
    """Check the events of a run; ``problems`` has each unordered pair of places once."""

    def __init__(self) -> None:
        self.problems: list[Unordered] = []
        self._clocks: defaultdict[int, Clock] = defaultdict(dict)
        self._asking: defaultdict[int, Clock] = defaultdict(dict)  # by drive, what another thread that asks has done
        self._events: dict[int, Clock] = {}
        self._of_drives: set[int] = set()
        self._buffers: dict[int, _Buffer] = {}
        self._number = 0
        self._seen: set[tuple[object, ...]] = set()

    def knows(self, clock: Clock | None = None) -> Clock:
        """Return what the program knows to have happened; if ``clock`` is given, that is known from here on."""
        before = self._clocks[HOST]
        self._clocks[HOST] = dict(before if clock is None else clock)
        return before

    def feed(self, event: Event) -> None:
        if isinstance(event, Launch):
            self._launch(event)
        elif isinstance(event, Allocate):
            self._allocate(event)
        elif isinstance(event, Free):
            self._free(event)
        elif isinstance(event, Record):
            self._events[event.event] = dict(self._clocks[event.stream])
            if event.stream in _DRIVES:
                self._of_drives.add(event.event)
        elif isinstance(event, Wait):
            if event.stream in _DRIVES and event.event in self._of_drives:
                return  # a drive knows no events: only a thread that asks it has waited for something
            clocks = self._asking if event.stream in _DRIVES else self._clocks  # of a drive: its next transfer alone
            _merge(clocks[event.stream], self._events.get(event.event, {}))
        elif isinstance(event, HostWait) and event.orders:
            self._host_wait(event)
        elif isinstance(event, Seen):
            _merge(self._clocks[HOST], self._events.get(event.event, {}))

    def _host_wait(self, event: HostWait) -> None:
        if event.event is not None:
            clocks = [self._events.get(event.event, {})]
        elif event.stream is not None:
            clocks = [self._clocks[event.stream]]
        else:
            clocks = [clock for stream, clock in self._clocks.items() if stream != WORKER]  # no matter of the device
        for clock in clocks:
            _merge(self._clocks[HOST], clock)

    def _launch(self, event: Launch) -> None:
        self._number += 1
        if event.stream in _DRIVES:  # its transfers overtake each other: only what the program waited for is before
            self._clocks[event.stream] = self._asking.pop(event.stream, {})
        clock = self._clocks[event.stream]
        if event.stream != HOST:  # what the program did before, and waited for, is done before
            _merge(clock, self._clocks[HOST])
        for touches, writes in ((event.reads, False), (event.writes, True)):
            for touch in touches:
                self._access(touch, Access(*touch[1:], event.stream, self._number, writes, event.name, event.site))
        clock[event.stream] = self._number

    def _access(self, touch: Touch, access: Access) -> None:
        buffer = self._buffers.get(touch.buffer)
        if buffer is None or access.start >= access.stop:
            return
        if buffer.freed is not None:
            self._report("use of freed memory", buffer.freed, access, buffer)
            return
        parts = buffer.parts(access)
        cut = [(file, function) for file, _, function in access.site[:1]] == [_CUT]
        written = access.writes or cut or buffer.allocated.place != DEVICE
        for part in list(buffer.accesses) if _WIDE in parts else (*parts, _WIDE):
            if earlier := buffer.accesses.get(part):
                written = written or any(o.writes and o.name != _LAST_OWNER and _meet(o, access) for o in earlier)
                buffer.accesses[part] = self._compared(access, earlier, buffer)
        for part in parts:
            buffer.accesses[part].append(access)
        if not written:
            made = Access(
                *access[:2], buffer.allocated.stream, 0, writes=True, name="nobody", site=buffer.allocated.site
            )
            self._report("read of what nobody has written", made, access, buffer)

    def _compared(self, access: Access, earlier: list[Access], buffer: _Buffer) -> list[Access]:
        """Report unordered accesses; return those of ``earlier`` that later accesses must still be compared with."""
        clock, kept = self._clocks[access.stream], []
        for other in earlier:
            in_turn = other.stream == access.stream not in _DRIVES
            ordered = in_turn or clock.get(other.stream, 0) >= other.number
            either = access.writes or other.writes
            if not ordered and either and _meet(other, access):
                self._report("race", other, access, buffer)
            # Whatever has to come after ``other`` has to come after this one too, which comes after it.
            inside = access.start <= other.start and other.stop <= access.stop
            if not (inside and ordered and (access.writes or not other.writes)):
                kept.append(other)
        return kept

    def _allocate(self, event: Allocate) -> None:
        buffer = self._buffers[event.buffer] = _Buffer(event)
        if event.place == DEVICE:
            # The memory may have been another buffer's until all that its stream was given is done.
            last = self._clocks[event.stream].get(event.stream, 0)
            owner = Access(0, event.nbytes, event.stream, last, writes=True, name=_LAST_OWNER, site=event.site)
            buffer.accesses[_WIDE].append(owner)

    def _free(self, event: Free) -> None:
        buffer = self._buffers.get(event.buffer)
        if buffer is None:
            return
        stream = buffer.allocated.stream
        whole = (0, buffer.allocated.nbytes, stream, self._number)
        freed = Access(*whole, writes=True, name="the allocator", site=event.site)
        # The next owner's kernels come after this in the program, and so after all that the program has waited for.
        clock = dict(self._clocks[stream])
        _merge(clock, self._clocks[HOST])
        pinned = buffer.allocated.place == PINNED  # its allocator waits for copies of streams, and knows no drives
        for use in itertools.chain.from_iterable(buffer.accesses.values()):
            if pinned and use.stream not in _DRIVES:
                continue
            if use.stream != stream and use.stream not in event.covered and clock.get(use.stream, 0) < use.number:
                self._report("freed while in use", use, freed, buffer)
        buffer.accesses.clear()
        buffer.freed = freed

    def _report(self, problem: str, first: Access, second: Access, buffer: _Buffer) -> None:
        key = (problem, first.site[:1], second.site[:1], first.name, second.name)
        if key not in self._seen:
            self._seen.add(key)
            self.problems.append(Unordered(problem, first, second, buffer.allocated))


def _meet(one: Access, other: Access) -> bool:
    return one.start < other.stop and other.start < one.stop


def _merge(clock: Clock, other: Clock) -> None:
    for stream, number in other.items():
        if clock.get(stream, 0) < number:
            clock[stream] = number
