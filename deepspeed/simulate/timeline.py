"""When everything happens on a machine: streams run in order, the program launches ahead until it has to wait.

The length of a launch is its cost alone: kernels and collectives that run side by side do not slow each other.
"""

from collections import Counter, defaultdict
from typing import NamedTuple

from deepspeed.simulate.costs import Machine
from deepspeed.simulate.events import COMPUTE, HOST, Event, HostWait, Launch, Phase, Record, Wait, place_of


class Interval(NamedTuple):
    """Something took from ``start`` for ``seconds`` on a stream."""

    stream: int
    name: str
    label: str
    start: float
    seconds: float


class _Mark(NamedTuple):
    """When an event happens, and what comes last before it: (launch, label). ``recorded``: the program's time then."""

    time: float
    cause: tuple[str, str]
    recorded: float = 0.0


class Timeline:
    """Feed it the events of a run.

    ``exposed``: seconds that the compute stream stood because of (launch, label) on another stream; ``late``: because
    the program had not launched yet, by what the program had last waited for ("" if for nothing); ``waited``: seconds
    and times that the program stood, by what and place; ``busy``: seconds of work by stream.
    """

    def __init__(self, machine: Machine, *, keep: bool = False) -> None:
        self.machine = machine
        self.now = 0.0  # of the program
        self.exposed = defaultdict[tuple[str, str], float](float)
        self.late = defaultdict[str, float](float)
        self.waited = defaultdict[tuple[str, str], float](float)
        self.waits = Counter[tuple[str, str]]()
        self.busy = defaultdict[int, float](float)
        self.phases: list[tuple[str, float]] = []
        self.spans: list[Interval] | None = [] if keep else None
        self._ready: dict[int, _Mark] = {}
        self._events: dict[int, _Mark] = {}
        self._stood = ""

    @property
    def end(self) -> float:
        """When all that was launched is done."""
        return max([self.now, *(mark.time for mark in self._ready.values())])

    def restart(self) -> None:
        """Count from here on, with the program and the device both idle."""
        self.now = self.end
        for count in (self.exposed, self.late, self.waited, self.waits, self.busy):
            count.clear()
        self.phases.clear()
        if self.spans:
            self.spans.clear()

    def feed(self, event: Event) -> None:
        """The next event of the program."""
        if isinstance(event, Launch):
            self._launch(event)
        elif isinstance(event, Record):
            self._events[event.event] = self._at(event.stream)._replace(recorded=self.now)
        elif isinstance(event, Wait):
            self._wait(event)
        elif isinstance(event, HostWait):
            self._host_wait(event)
        elif isinstance(event, Phase):
            # the program runs ahead: a phase begins when what was launched before it is done
            self.phases.append((event.name, max(self.now, self._at(COMPUTE).time)))

    def done(self, event: int) -> bool:
        """Whether an event has happened at the time of the program."""
        return event not in self._events or self._events[event].time <= self.now

    def happens(self, event: int) -> float:
        """The time of an event that has been recorded; on an idle stream that of recording it."""
        mark = self._events[event]
        return max(mark.time, mark.recorded)

    def host_work(self, seconds: float, name: str = "") -> None:
        """The program is busy for so long."""
        if self.spans is not None and name:
            self.spans.append(Interval(HOST, name, "", self.now, seconds))
        self.now += seconds
        self.busy[HOST] += seconds

    def _at(self, stream: int) -> _Mark:
        return self._ready.get(stream, _Mark(0.0, ("", "")))

    def _launch(self, event: Launch) -> None:
        seconds = self.machine.seconds(event.work, event.name)
        if event.stream == HOST:
            self.host_work(seconds, event.name)
            return
        self.now += self.machine["launch_s"]
        ready = self._at(event.stream).time
        if event.stream == COMPUTE and self.now > ready:
            self.late[self._stood] += self.now - ready
        start = max(ready, self.now)
        self.busy[event.stream] += seconds
        self._ready[event.stream] = _Mark(start + seconds, (event.name, event.label))
        if event.stream == COMPUTE:
            self._stood = ""
        if self.machine.on_host and event.work.kind != "collective":
            self.now = start + seconds
        if self.spans is not None:
            self.spans.append(Interval(event.stream, event.name, event.label, start, seconds))

    def _wait(self, event: Wait) -> None:
        mark = self._events.get(event.event)
        mine = self._at(event.stream)
        if mark is None or mark.time <= mine.time:
            return
        if event.stream == COMPUTE:
            launched = max(mine.time, min(self.now, mark.time))
            self.late[self._stood] += launched - mine.time
            self.exposed[mark.cause] += mark.time - launched
        self._ready[event.stream] = mark

    def _host_wait(self, event: HostWait) -> None:
        if event.event is not None:
            until = self._events[event.event].time if event.event in self._events else 0.0
        else:
            until = self.end if event.stream is None else self._at(event.stream).time
        key = (event.what, place_of(event.site))
        self.waits[key] += 1
        if until > self.now:
            self.waited[key] += until - self.now
            if self.spans is not None:
                self.spans.append(Interval(HOST, event.what, "", self.now, until - self.now))
            self.now, self._stood = until, event.what
        self.now += self.machine["wait_s"]
