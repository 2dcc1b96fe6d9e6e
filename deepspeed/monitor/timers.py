"""Wall-clock timers of named phases, samples per second, profiler ranges, and the memory in use."""

import functools
import gc
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

from deepspeed.accelerator.device import NullEvent, get_accelerator
from deepspeed.errors import UsageError
from deepspeed.monitor import hostmem
from deepspeed.monitor.log import log_dist

P = ParamSpec("P")
R = TypeVar("R")


def memory_report() -> str:
    """Return one line: device bytes now and at peak, host bytes now and at peak, machine use."""
    accelerator, total = get_accelerator(), hostmem.host_total_bytes()
    rows = [("process RSS", hostmem.rss_bytes(), hostmem.peak_rss_bytes())]
    if accelerator.device_name() != "cpu":
        rows.insert(0, ("allocated", accelerator.memory_allocated(), accelerator.max_memory_allocated()))
        rows.insert(1, ("reserved", accelerator.memory_reserved(), accelerator.max_memory_reserved()))
    used = [f"{name} {now / 2**30:.2f} GB (peak {peak / 2**30:.2f} GB)" for name, now, peak in rows]
    machine = f"machine {(total - hostmem.host_available_bytes()) / 2**30:.2f} of {total / 2**30:.2f} GB"
    return ", ".join([*used, machine])


def see_memory_usage(message: str, force: bool = False) -> None:
    """Collect garbage, log ``message`` and the memory in use on rank 0, start new peaks; only with ``force``."""
    if force:
        gc.collect()
        log_dist(f"{message}: {memory_report()}", stacklevel=2)
        get_accelerator().reset_peak_memory_stats()


def trimmed_mean(values: list[float]) -> float:
    """Return the mean without the lowest and the highest tenth of the values; 0 without values."""
    cut = len(values) // 10
    return sum(sorted(values)[cut : len(values) - cut]) / max(1, len(values) - 2 * cut)


class PhaseTimer:
    """Timer of one phase, in milliseconds. Starting and stopping wait for the device first."""

    def __init__(self, name: str) -> None:
        self.name_, self.started_ = name, False
        self._start = self._elapsed_ms = 0.0
        self._records: list[float] = []

    def start(self) -> None:
        """Start the timer; UsageError when it runs already."""
        if self.started_:
            raise UsageError(f"The timer {self.name_!r} runs already; stop it before starting it again.")
        get_accelerator().synchronize()
        self._start = time.perf_counter()
        self.started_ = True

    def stop(self, reset: bool = False, record: bool = False) -> None:
        """Stop and add to the time so far, or ``reset`` it to this span; ``record`` keeps the span for ``mean``."""
        if not self.started_:
            raise UsageError(f"The timer {self.name_!r} does not run; start it before stopping it.")
        get_accelerator().synchronize()
        span = (time.perf_counter() - self._start) * 1e3
        self._elapsed_ms = span if reset else self._elapsed_ms + span
        self._records += [span] if record else []
        self.started_ = False

    def reset(self) -> None:
        """Stop the timer, set its time to zero and drop the recorded spans."""
        self.__init__(self.name_)  # type: ignore[misc]

    def elapsed(self, reset: bool = True) -> float:
        """Return the milliseconds so far; ``reset`` zeroes them. A running timer is stopped to read and goes on."""
        if running := self.started_:
            self.stop()
        elapsed, self._elapsed_ms = self._elapsed_ms, 0.0 if reset else self._elapsed_ms
        if running:
            self.start()
        return elapsed

    def mean(self) -> float:
        """Return the mean of recorded spans without the lowest and highest tenth, in milliseconds; 0 without spans."""
        return trimmed_mean(self._records)


class SynchronizedWallClockTimer:
    """Keep timers by name; start and stop wait for the device first, so device work is charged where it was issued."""

    Timer = PhaseTimer
    memory_usage = staticmethod(memory_report)

    def __init__(self) -> None:
        self.timers: dict[str, PhaseTimer] = {}

    def __call__(self, name: str) -> PhaseTimer:
        """Return the timer ``name``, made on first use."""
        return self.timers.setdefault(name, PhaseTimer(name))

    def has_timer(self, name: str) -> bool:
        """Return whether ``name`` was used."""
        return name in self.timers

    def get_timers(self) -> dict[str, PhaseTimer]:
        """Return all timers by name."""
        return self.timers

    def log(
        self,
        names: Iterable[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: list[int] | None = None,
    ) -> None:
        """Log the times of ``names`` divided by ``normalizer``, in milliseconds; rank 0 by default."""
        timers = [self.timers[name] for name in names if name in self.timers]
        times = [f"{timer.name_}: {timer.elapsed(reset=reset) / normalizer:.2f}" for timer in timers]
        memory = f" | {memory_report()}" if memory_breakdown else ""
        log_dist(f"time (ms) | {' | '.join(times)}{memory}", ranks=ranks)

    def get_mean(self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """Return the mean recorded time per name in milliseconds, divided by ``normalizer``."""
        means = {name: self.timers[name].mean() / normalizer for name in names if name in self.timers}
        for name in means if reset else ():
            self.timers[name].reset()
        return means


class NoopTimer:
    """Replace the timers when nothing is timed: every name is accepted and takes no time."""

    class Timer:
        """Timer that always reads zero."""

        def start(self, *_args: Any, **_kwargs: Any) -> float:
            """Return zero milliseconds."""
            return 0.0

        stop = reset = elapsed = mean = start

    def __call__(self, name: str) -> Timer:
        return self.Timer()

    def has_timer(self, name: str) -> bool:
        return True

    def get_timers(self, *_args: Any, **_kwargs: Any) -> dict[str, Any]:
        return {}

    log = get_mean = get_timers


class ThroughputTimer:
    """Measure samples per second over updates of ``batch_size`` samples, without the first ``start_step`` (warm-up).

    ``steps_per_output`` None never logs. ``config`` may hold ``enabled`` (a disabled timer does nothing) and
    ``synchronized``: events on the device's stream are measured. The update that logs waits for them, and so does each
    read of ``avg_samples_per_sec``, ``step_elapsed_time`` (of the update under way) or ``total_elapsed_time`` (both in
    seconds). Otherwise only the host's time counts.
    """

    def __init__(
        self,
        config: Any = None,
        batch_size: int = 1,
        start_step: int = 2,
        steps_per_output: float | None = None,
        monitor_memory: bool = False,
        logging_fn: Callable[[str], None] | None = None,
    ) -> None:
        self.enabled = bool(getattr(config, "enabled", True))
        self.synchronized = bool(getattr(config, "synchronized", True))
        self.batch_size, self.start_step = max(1, batch_size), start_step
        self.steps_per_output, self.monitor_memory = steps_per_output or None, monitor_memory
        self.logging = logging_fn or log_dist
        self.epoch_count = self.micro_step_count = self.global_step_count = 0
        self._start: Any = None
        self._spans = deque[tuple[int, Any, Any]]()  # updates before it, first and last event; not added up yet
        self._step_s = self._total_s = 0.0
        self._samples = 0  # of the counted updates

    def update_epoch_count(self) -> None:
        """Begin a new epoch."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self) -> None:
        """Begin a micro-batch. A second start without a stop counts from the second start."""
        if self.enabled:
            self._start = self._now()

    def _now(self) -> Any:
        event = get_accelerator().Event(enable_timing=True) if self.synchronized else NullEvent()
        event.record()
        return event

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """End a micro-batch; with ``global_step`` also an update."""
        if not self.enabled or self._start is None:
            return
        counted = self.global_step_count >= self.start_step
        if counted:
            self._spans.append((self.global_step_count, self._start, self._now()))
            self._add_up(wait=False)
        self._start = None
        self.micro_step_count += 1
        if not global_step:
            return
        self._samples += self.batch_size if counted else 0
        every = self.steps_per_output
        report = counted and report_speed and every and (self.global_step_count + 1) % every == 0
        now = self.batch_size / max(self.step_elapsed_time, 1e-9) if report else 0.0
        self.global_step_count += 1
        self._total_s, self._step_s = self._total_s + self._step_s, 0.0
        if report:
            memory = f", {memory_report()}" if self.monitor_memory else ""
            self.logging(
                f"epoch={self.epoch_count}, micro_step={self.micro_step_count}, global_step={self.global_step_count}, "
                f"samples/s now {now:.2f}, average {self.avg_samples_per_sec():.2f}{memory}"
            )

    def _add_up(self, *, wait: bool) -> None:
        """Add the measured spans to the sums; without ``wait`` only as far as the device has come."""
        late = (event for _, *events in reversed(self._spans) for event in reversed(events)) if wait else ()
        for event in late:  # the last first: that is the only one to wait for, if all are of one stream
            if not event.query():
                event.synchronize()
        while self._spans and all(event.query() for event in self._spans[0][1:]):
            update, start, end = self._spans.popleft()
            seconds = start.elapsed_time(end) / 1e3
            if update == self.global_step_count:
                self._step_s += seconds
            else:
                self._total_s += seconds

    @property
    def step_elapsed_time(self) -> float:
        self._add_up(wait=True)
        return self._step_s

    @property
    def total_elapsed_time(self) -> float:
        self._add_up(wait=True)
        return self._total_s

    def avg_samples_per_sec(self) -> float:
        """Return samples per second over all counted updates; -inf before the first."""
        seconds = self.total_elapsed_time
        return self._samples / seconds if self._samples and seconds > 0 else float("-inf")


def instrument_w_nvtx(func: Callable[P, R]) -> Callable[P, R]:
    """Wrap ``func`` so that the device profiler shows it as a range of its name."""

    @functools.wraps(func)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        get_accelerator().range_push(func.__qualname__)
        try:
            return func(*args, **kwargs)
        finally:
            get_accelerator().range_pop()

    return wrapped
