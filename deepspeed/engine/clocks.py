"""Clocks of an engine's phases, and its watch over host memory. Switched off, they synchronise and time nothing."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from deepspeed.config import DeepSpeedConfig
from deepspeed.observe import hostmem
from deepspeed.observe.events import FLUSH, PHASE, Events
from deepspeed.observe.log import logger
from deepspeed.observe.timers import NoopTimer, SynchronizedWallClockTimer, see_memory_usage
from deepspeed.zero.memory.fit import MemoryPlan

PHASES = ("forward", "backward", "step")


class PhaseClock:
    """Time the phases of an engine: ``with clock("forward"):``; tell listeners of ``events`` of each."""

    def __init__(self, config: DeepSpeedConfig, of_runtime: Events) -> None:
        """Make the timers, if ``config`` wants them; ``of_runtime`` are the events of the runtime, which flushes."""
        self.events = Events()
        self.timers: Any = NoopTimer()
        if config.wall_clock_breakdown:
            self.timers = SynchronizedWallClockTimer()
            of_runtime.append(self._time_flush)
        self._memory = config.memory_breakdown
        self._spent_ms: dict[str, float] = {}  # by phase, since they were taken
        self._phases: list[str] = []  # under way

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the phase ``name`` inside; one inside a phase of the same name is part of it."""
        if name in self._phases:
            yield
            return
        self._phases.append(name)
        timer = self.timers(name)
        before = timer.elapsed(reset=False)
        timer.start()
        try:
            with self.events.range(name, PHASE, name):
                yield
        finally:
            timer.stop()
            self._phases.remove(name)
            self._add(name, timer.elapsed(reset=False) - before)
        see_memory_usage(f"memory after {name}", force=self._memory)

    def _add(self, name: str, spent_ms: float) -> None:
        self._spent_ms[name] = self._spent_ms.get(name, 0.0) + spent_ms

    def _time_flush(self, kind: str, _: object) -> Callable[[], None] | None:
        """Time the end of a backward; ``elapsed_time_ms_backward`` is made of this and of "backward_inner"."""
        if kind != FLUSH:
            return None
        timer = self.timers("backward_allreduce")
        before = timer.elapsed(reset=False)
        timer.start()

        def end() -> None:
            timer.stop()
            reduced = timer.elapsed(reset=False) - before
            self._add("backward_allreduce", reduced)
            self._add("backward_inner", -reduced)

        return end

    def take_spent_ms(self) -> dict[str, float]:
        """Return the milliseconds of each phase since the last call."""
        spent, self._spent_ms = self._spent_ms, {}
        if "backward_inner" in spent:  # so far the negative of the rest
            spent["backward_inner"] += spent.get("backward", 0.0)
        return spent


class HostMemoryWatch:
    """Warn once when this rank holds more than ``memory.host_limit``, which model states do not explain."""

    def __init__(self, limit: int | None, plan: Callable[[], MemoryPlan], rank: int) -> None:
        self._limit, self._plan = limit, plan
        self._rank = rank

    def look(self) -> None:
        """Compare the resident bytes of this process with the limit."""
        limit = self._limit
        if limit is None:
            return
        resident = hostmem.rss_bytes()
        if resident <= limit:
            return
        self._limit = None
        logger.warning(
            "rank %d holds %d MiB of host memory, more than memory.host_limit (%d MiB); model states were planned at "
            "%d MiB, so the rest is activations, data or other objects: use smaller batches, activation checkpointing "
            "or fewer loader workers",
            *(self._rank, resident >> 20, limit >> 20, self._plan().host >> 20),
        )
