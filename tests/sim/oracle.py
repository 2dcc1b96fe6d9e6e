"""Order by brute force: the set of launches before each, and every pair of accesses in conflict. For small programs."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

from deepspeed.tools.simulate.events import (
    DEVICE,
    HOST,
    PINNED,
    Allocate,
    Event,
    Free,
    HostWait,
    Launch,
    Record,
    Seen,
    Touch,
    Wait,
)

Pair = tuple[int, int]


def _before(events: Sequence[Event], left_out: Collection[int]) -> list[int]:
    """For each event a bit set: positions of those that are certainly done when it begins on its stream (a buffer's
    when it is allocated, or its memory given away). The events of drives are not known here.
    """
    done: defaultdict[int, int] = defaultdict(int)  # stream -> set
    recorded: dict[int, int] = {}
    home: dict[int, int] = {}
    sets: list[int] = []
    for position, event in enumerate(events):
        mine = 0
        if isinstance(event, Launch):
            done[event.stream] |= done[HOST]
            mine = done[event.stream]
            done[event.stream] |= 1 << position
        elif isinstance(event, (Allocate, Free)):
            if isinstance(event, Allocate):
                home[event.buffer] = event.stream if event.place == DEVICE else HOST
            mine = done[home.get(event.buffer, HOST)] | done[HOST]
        elif isinstance(event, Record):
            recorded[event.event] = done[event.stream]
        elif isinstance(event, Wait) and position not in left_out:
            done[event.stream] |= recorded.get(event.event, 0)
        elif isinstance(event, Seen):
            done[HOST] |= recorded.get(event.event, 0)
        elif isinstance(event, HostWait) and event.orders:
            streams = list(done) if event.stream is None else [event.stream]
            sources = [recorded.get(event.event, 0)] if event.event is not None else [done[s] for s in streams]
            for source in sources:
                done[HOST] |= source
        sets.append(mine)
    return sets


class Conflicts:
    """The pairs of positions that have to be in order, whatever the waits are."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.events = events
        self.pairs: list[Pair] = []
        accesses: dict[int, list[tuple[int, Touch, bool]]] = {}
        places: dict[int, Allocate] = {}
        last: dict[int, int] = {}  # launch of each stream
        for position, event in enumerate(events):
            if isinstance(event, Allocate):
                accesses[event.buffer], places[event.buffer] = [], event
                if event.place == DEVICE and event.stream in last:  # the memory may be in use until then
                    accesses[event.buffer].append((last[event.stream], Touch(event.buffer, 0, event.nbytes), True))
            elif isinstance(event, Launch):
                touched = [(t, False) for t in event.reads] + [(t, True) for t in event.writes]
                for touch, writes in touched:
                    for other, earlier, wrote in accesses.get(touch.buffer, ()):
                        if other != position and (writes or wrote) and _meet(touch, earlier):
                            self.pairs.append((other, position))
                    if touch.buffer in accesses:
                        accesses[touch.buffer].append((position, touch, writes))
                last[event.stream] = position
            elif isinstance(event, Free) and event.buffer in accesses:
                others = [o for o, _, _ in accesses.pop(event.buffer) if self._counts(o, event, places[event.buffer])]
                self.pairs += [(other, position) for other in others]
        self.pairs = list(dict.fromkeys(self.pairs))

    def _counts(self, position: int, free: Free, buffer: Allocate) -> bool:
        """Whether the end of the memory has to wait for that launch."""
        launch = self.events[position]
        assert isinstance(launch, Launch)
        home = buffer.stream if buffer.place == DEVICE else HOST
        return buffer.place != PINNED and launch.stream != home and launch.stream not in free.covered

    def unordered(self, *, left_out: Collection[int] = ()) -> list[Pair]:
        """Those without order, if the waits at these positions are left out."""
        before = _before(self.events, left_out)
        return [(first, second) for first, second in self.pairs if not before[second] >> first & 1]


def _meet(a: Touch, b: Touch) -> bool:
    return a.start < b.stop and b.start < a.stop


def waits_of(events: Iterable[Event]) -> list[int]:
    """Positions of the waits of streams."""
    return [position for position, event in enumerate(events) if isinstance(event, Wait)]
