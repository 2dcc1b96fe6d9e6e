"""What an engine measures while it trains: phases, memory, samples per second. Switched off, it synchronises and times
nothing.
"""

import contextlib
import math
from argparse import Namespace
from collections.abc import Iterator

import torch

from deepspeed.config import DeepSpeedConfig
from deepspeed.observe.memory import see_memory_usage
from deepspeed.observe.monitor import MonitorMaster
from deepspeed.observe.timers import NoopTimer, SynchronizedWallClockTimer, ThroughputTimer

PHASES = ("forward", "backward", "step")


class EngineTiming:
    """Mixin with the timers and the metric writers of an engine."""

    timers: SynchronizedWallClockTimer | NoopTimer
    tput_timer: ThroughputTimer
    monitor: MonitorMaster
    _losses: list[torch.Tensor]
    _spent_ms: dict[str, float]  # by phase, since the last update
    _phases: list[str]
    _memory_breakdown: bool

    def _start_timing(self, config: DeepSpeedConfig) -> None:
        self.monitor = MonitorMaster(None)  # replaced by initialize, which makes the real one before anything else
        self._losses = []
        self._spent_ms = {}
        self.timers = SynchronizedWallClockTimer() if config.wall_clock_breakdown else NoopTimer()
        self._memory_breakdown = config.memory_breakdown
        self._phases = []
        every = config.steps_per_print
        reports = every is not None and math.isfinite(every)
        throughput = config.timers.throughput
        # A report that is never due needs no measurement, so a silent run does not wait for its device either.
        wanted = Namespace(enabled=throughput.enabled and reports, synchronized=throughput.synchronized)
        self.tput_timer = ThroughputTimer(wanted, config.train_batch_size, steps_per_output=every if reports else None)

    @contextlib.contextmanager
    def _clock(self, name: str) -> Iterator[None]:
        if name in self._phases:  # a forward inside a forward is part of it
            yield
            return
        self._phases.append(name)
        timer = self.timers(name)
        before = timer.elapsed(reset=False)
        timer.start()
        try:
            yield
        finally:
            timer.stop()
            self._phases.remove(name)
            self._spent_ms[name] = self._spent_ms.get(name, 0.0) + timer.elapsed(reset=False) - before
        see_memory_usage(f"memory after {name}", force=self._memory_breakdown)

    def _note_loss(self, loss: torch.Tensor) -> None:
        """Remember the undivided loss of one micro-batch for the metrics; nothing is read from the device yet."""
        if self.monitor.enabled:
            self._losses.append(loss.detach())

    def _write_metrics(self, samples: int, *, lr: list[float], loss_scale: float | None) -> None:
        """The metrics of one update, at ``samples`` samples: learning rate, mean loss of this rank, loss scale, times
        where taken.
        """
        spent, self._spent_ms = self._spent_ms, {}
        if not self.monitor.enabled:
            return
        found = {"lr": lr[0] if lr else None, "loss_scale": loss_scale}
        if self._losses:
            found["train_loss"] = float(torch.stack([loss.float() for loss in self._losses]).mean())
            self._losses.clear()
        found |= {f"elapsed_time_ms_{phase}": time for phase, time in spent.items() if time > 0}
        self.monitor.write_events(
            [(f"Train/Samples/{name}", value, samples) for name, value in found.items() if value is not None]
        )

    def _report_times(self) -> None:
        self.timers.log(PHASES)

    def get_wall_clock_timers(self) -> SynchronizedWallClockTimer | NoopTimer:
        """The timers by name; harmless stand-ins unless ``wall_clock_breakdown`` is on."""
        return self.timers
