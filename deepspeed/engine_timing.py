"""``wall_clock_breakdown``: how long forward, backward and step take. Off, nothing is synchronised and nothing is timed."""

import contextlib
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from deepspeed.config import DeepSpeedConfig
from deepspeed.observe.timers import NoopTimer, SynchronizedWallClockTimer, ThroughputTimer

PHASES = ("forward", "backward", "step")


class EngineTiming:
    """Mixin with the timers of an engine; ``monitor`` is where event writers will attach."""

    timers: SynchronizedWallClockTimer | NoopTimer
    tput_timer: ThroughputTimer
    monitor: Any = None

    def _start_timing(self, config: DeepSpeedConfig) -> None:
        on = config.wall_clock_breakdown
        self.timers = SynchronizedWallClockTimer() if on else NoopTimer()
        every = config.steps_per_print if config.steps_per_print else None
        self.tput_timer = ThroughputTimer(Namespace(enabled=on), config.train_batch_size, steps_per_output=every)

    @contextlib.contextmanager
    def _clock(self, name: str) -> Iterator[None]:
        timer = self.timers(name)
        if getattr(timer, "started_", False):  # a forward inside a forward is part of it
            yield
            return
        timer.start()
        try:
            yield
        finally:
            timer.stop()

    def _report_times(self) -> None:
        self.timers.log(PHASES)

    def get_wall_clock_timers(self) -> SynchronizedWallClockTimer | NoopTimer:
        """The timers by name; harmless stand-ins unless ``wall_clock_breakdown`` is on."""
        return self.timers
