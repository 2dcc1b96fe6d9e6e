"""When everything happens on a machine: streams run in order, the program launches ahead until it has to wait.

The length of a launch is its cost alone, but for kernels beside collectives (``contention``). Which collectives there
are beside a kernel is known when it is launched: what waits for it, or for nothing that came before, begins later.

Several ranks have a timeline each, and ``Meetings`` in common: a message, or a collective of several of them, begins
when the last of them has come to it. Until that is known whatever comes behind it waits in the queue of its stream, and
``settle`` goes on as far as it can.
"""

import bisect
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Sequence
from typing import NamedTuple

from deepspeed.errors import PipelineError
from deepspeed.tools.simulate.costs import Machine
from deepspeed.tools.simulate.events import (
    COMPUTE,
    HOST,
    WORKER,
    Event,
    HostWait,
    Launch,
    Phase,
    Record,
    Talk,
    Wait,
    place_of,
)

_IN_MEMORY = ("adam", "host")  # kinds of work that take the rate of the host's memory


class Interval(NamedTuple):
    """Interval of a stream: ``seconds`` from ``start``."""

    stream: int
    name: str
    label: str
    start: float
    seconds: float


class _Mark(NamedTuple):
    """Time of an event, and what comes last before it: (launch, label). ``recorded``: the program's time then."""

    time: float
    cause: tuple[str, str]
    recorded: float = 0.0


class Meetings:
    """Track which of ``ranks`` have come to what they do together, and when."""

    def __init__(self, ranks: Collection[int]) -> None:
        self._ranks = frozenset(ranks)
        self._come = defaultdict[tuple[str, int], dict[int, float]](dict)

    def joins(self, ranks: Collection[int]) -> bool:
        """Return whether several of these ranks are simulated."""
        return len(self._ranks.intersection(ranks)) > 1

    def begin(self, channel: str, number: int, rank: int, ranks: Collection[int], time: float) -> float | None:
        """Note that ``rank`` has come to the ``number``-th meeting of a channel; return its begin if all are there."""
        come = self._come[channel, number]
        come[rank] = time
        return max(come.values()) if len(come) == len(self._ranks.intersection(ranks)) else None


class _Item(NamedTuple):
    """Event given to a stream at the program's time ``given``; ``number``: position of a meeting in its channel."""

    event: Launch | Record | Wait | Phase
    given: float
    number: int = 0


class Timeline:
    """Compute when the events of a run happen.

    ``exposed``: seconds that the compute stream stood because of (launch, label) on another stream; ``late``: because
    the program had not launched yet, by what the program had last waited for ("" if for nothing); ``waited``: seconds
    and times that the program stood, by what and place; ``busy``: seconds of work by stream. With ``meetings`` this is
    ``rank`` of several.
    """

    def __init__(
        self, machine: Machine, *, keep: bool = False, rank: int = 0, meetings: Meetings | None = None
    ) -> None:
        self.machine, self.rank, self._meetings = machine, rank, meetings
        self.now = 0.0  # of the program
        self.exposed = defaultdict[tuple[str, str], float](float)
        self.late = defaultdict[str, float](float)
        self.waited = defaultdict[tuple[str, str], float](float)
        self.waits = Counter[tuple[str, str]]()
        self.busy = defaultdict[int, float](float)
        self.phases: list[tuple[str, float]] = []
        self.spans: list[Interval] | None = [] if keep else None
        self._ready: dict[int, _Mark] = {}
        self._events: dict[int, _Mark | None] = {}  # None: not known yet
        self._stood = ""
        self._program = deque[Event]()
        self._queues = defaultdict[int, deque[_Item]](deque)
        self._counts = Counter[str]()
        self._lost = 0.0  # of the next update, to what the program has done in host memory meanwhile
        self._links: list[tuple[float, float]] = []  # when collectives run that are not over yet

    @property
    def end(self) -> float:
        """Return when all that was launched is done; with an update behind the program, that and kernels."""
        if WORKER in self._ready:
            return max(self.now, self._at(COMPUTE).time)
        return self._idle()

    def _idle(self) -> float:
        """Return when the device is done with all that was launched."""
        return max([self.now, *(mark.time for stream, mark in self._ready.items() if stream != WORKER)])

    def restart(self) -> None:
        """Restart the times from here on, with the program and the device both idle."""
        self.now = self.end
        for count in (self.exposed, self.late, self.waited, self.waits, self.busy):
            count.clear()
        self.phases.clear()
        if self.spans:
            self.spans.clear()

    def feed(self, event: Event) -> None:
        if self._program or not self._take(event):
            self._program.append(event)

    def settle(self) -> bool:
        """Go on as far as what is known allows; return whether anything went on."""
        moved = False
        for stream, queue in self._queues.items():
            while queue and self._do(stream, queue[0]):
                queue.popleft()
                moved = True
        while self._program and self._take(self._program[0]):
            self._program.popleft()
            moved = True
        return moved

    def stuck(self) -> list[str]:
        """Return what still waits for other ranks."""
        heads = [queue[0].event for queue in self._queues.values() if queue]
        texts = [f"{e.name} {e.label} of ranks {e.work.ranks}" for e in heads if isinstance(e, Launch)]
        return texts or [type(event).__name__ for event in [*self._program][:1]]

    def ready(self, stream: int) -> float:
        """Return when all that a stream was given is done."""
        return self._at(stream).time

    def done(self, event: int) -> bool:
        """Return whether an event has happened at the time of the program."""
        mark = self._events.get(event)
        return mark is None or mark.time <= self.now

    def happens(self, event: int) -> float:
        """Return the time of a recorded event; on an idle stream, the time at which it was recorded."""
        mark = self._events[event]
        assert mark is not None
        return max(mark.time, mark.recorded)

    def host_work(self, seconds: float, name: str = "") -> None:
        """Keep the program busy for ``seconds``."""
        if self.spans is not None and name:
            self.spans.append(Interval(HOST, name, "", self.now, seconds))
        self.now += seconds
        self.busy[HOST] += seconds

    def _at(self, stream: int) -> _Mark:
        return self._ready.get(stream, _Mark(0.0, ("", "")))

    # -- the program ----------------------------------------------------------------------------------------------
    def _take(self, event: Event) -> bool:
        """Do the program's part of an event; return False where the program cannot go on yet."""
        if isinstance(event, Launch):
            if event.stream == HOST:
                seconds = self.machine.seconds(event.work, event.name)
                self.host_work(seconds + self._shared(event, seconds), event.name)
                return True
            if event.stream == WORKER:
                self._give(event.stream, event)
                return True
            if self.machine.on_host and self._queues[COMPUTE]:
                return False
            self.now += self.machine["launch_s"]
            self._give(event.stream, event)
        elif isinstance(event, Record):
            self._events[event.event] = None
            self._give(event.stream, event)
        elif isinstance(event, Wait):
            self._give(event.stream, event)
        elif isinstance(event, Phase):
            self._give(COMPUTE, event)
        elif isinstance(event, HostWait):
            return self._host_wait(event)
        elif isinstance(event, Talk):
            return self._talk(event)
        return True

    def _shared(self, event: Launch, seconds: float) -> float:
        """Return by how much host-memory work takes longer beside an update, which loses as much."""
        busy = min(seconds, max(0.0, self._at(WORKER).time - self.now)) if event.work.kind in _IN_MEMORY else 0.0
        self._lost += busy
        return busy

    def _number(self, channel: str) -> int:
        self._counts[channel] += 1
        return self._counts[channel]

    def _joins(self, ranks: tuple[int, ...]) -> bool:
        return self._meetings is not None and self._meetings.joins(ranks)

    def _talk(self, event: Talk) -> bool:
        if event.channel and self._meetings is not None and self._joins(event.ranks):
            number = self._counts[event.channel] + 1
            begin = self._meetings.begin(event.channel, number, self.rank, event.ranks, self.now)
            if begin is None:
                return False
            self._number(event.channel)
            self.host_work(begin - self.now, "wait for the other stages")
        self.host_work(event.seconds, "agreement")
        return True

    def _host_wait(self, event: HostWait) -> bool:
        queues = self._queues.values() if event.stream is None else [self._queues[event.stream]]
        if event.event is not None:
            until = self._events.get(event.event, _Mark(0.0, ("", "")))
            if until is None:
                return False
            time = until.time
        elif any(queues):
            return False
        else:
            time = self._idle() if event.stream is None else self._at(event.stream).time
        key = (event.what, place_of(event.site))
        self.waits[key] += 1
        if time > self.now:
            self.waited[key] += time - self.now
            if self.spans is not None:
                self.spans.append(Interval(HOST, event.what, "", self.now, time - self.now))
            self.now, self._stood = time, event.what
        self.now += self.machine["wait_s"]
        return True

    # -- streams --------------------------------------------------------------------------------------------------
    def _give(self, stream: int, event: Launch | Record | Wait | Phase) -> None:
        meets = isinstance(event, Launch) and self._joins(event.work.ranks)
        item = _Item(event, self.now, self._number(event.work.channel) if meets else 0)  # type: ignore[union-attr]
        queue = self._queues[stream]
        if queue or not self._do(stream, item):
            queue.append(item)

    def _do(self, stream: int, item: _Item) -> bool:
        """Do the item at the head of a stream; return False where it waits for something not known yet."""
        event = item.event
        if isinstance(event, Launch):
            return self._launch(event, item)
        if isinstance(event, Record):
            self._events[event.event] = self._at(stream)._replace(recorded=item.given)
        elif isinstance(event, Wait):
            return self._wait(event, item.given)
        elif isinstance(event, Phase):
            # the program runs ahead: a phase begins when what was launched before it is done
            self.phases.append((event.name, max(item.given, self._at(COMPUTE).time)))
        return True

    def _launch(self, event: Launch, item: _Item) -> bool:
        ready, seconds = self._at(event.stream).time, self.machine.seconds(event.work, event.name)
        start = max(ready, item.given)
        if event.stream == WORKER:
            seconds, self._lost = seconds + self._lost, 0.0
        if item.number and self._meetings is not None:
            work = event.work
            begin = self._meetings.begin(work.channel, item.number, self.rank, work.ranks, start)
            if begin is None:
                return False
            start = begin
        if event.work.kind == "collective":
            bisect.insort(self._links, (start, start + seconds))
        if event.stream == COMPUTE and item.given > ready:
            self.late[self._stood] += item.given - ready
        if event.stream == COMPUTE and not self.machine.on_host:
            seconds = self._beside_links(start, seconds)
        self.busy[event.stream] += seconds
        self._ready[event.stream] = _Mark(start + seconds, (event.name, event.label))
        if event.stream == COMPUTE:
            self._stood = ""
        if self.machine.on_host and event.work.kind != "collective":
            self.now = start + seconds
        if self.spans is not None:
            self.spans.append(Interval(event.stream, event.name, event.label, start, seconds))
        return True

    def _beside_links(self, start: float, seconds: float) -> float:
        """Return a kernel's seconds: a collective beside it has some of the processors and of the memory's rate."""
        self._links = [link for link in self._links if link[1] > start]
        at, remaining, rate = start, seconds, 1 - self.machine["contention"]
        for begin, end in self._links:
            alone = max(0.0, begin - at)
            if alone >= remaining:
                break
            at, remaining = max(at, begin), remaining - alone
            beside = max(0.0, min(remaining, (end - at) * rate))
            at, remaining = at + beside / rate, remaining - beside
        return at + remaining - start

    def _wait(self, event: Wait, given: float) -> bool:
        ready = self._at(event.stream)
        mark = self._events.get(event.event, ready)
        if mark is None:
            return False
        if mark.time <= ready.time:
            return True
        if event.stream == COMPUTE:
            launched = max(ready.time, min(given, mark.time))
            self.late[self._stood] += launched - ready.time
            self.exposed[mark.cause] += mark.time - launched
        self._ready[event.stream] = mark
        return True


def together(timelines: Sequence[Timeline], events: Sequence[Sequence[Event]]) -> None:
    """Feed each timeline its events and settle all of them. PipelineError where ranks wait for ever for each other."""
    for timeline, trace in zip(timelines, events, strict=True):
        for event in trace:
            timeline.feed(event)
    while any([timeline.settle() for timeline in timelines]):
        pass
    if waiting := [f"rank {t.rank}: {'; '.join(stuck)}" for t in timelines if (stuck := t.stuck())]:
        raise PipelineError(f"the ranks wait for each other for ever: {', '.join(waiting)}")
