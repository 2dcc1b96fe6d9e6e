"""What an engine knows of its updates, what it measures and what it says of itself.

Switched off, the measurements synchronise and time nothing.
"""

import contextlib
import copy
import importlib
import math
import weakref
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from logging import WARNING
from typing import Any

import torch

from deepspeed.client.engine_facts import EngineFacts
from deepspeed.comm.collectives import gather_objects
from deepspeed.config import DeepSpeedConfig
from deepspeed.config.model.settings import declared_fields, settings
from deepspeed.errors import UsageError, counted
from deepspeed.observe import hostmem
from deepspeed.observe.events import FLUSH, METRICS, PHASE, Events
from deepspeed.observe.log import log_dist, logger
from deepspeed.observe.timers import NoopTimer, SynchronizedWallClockTimer, ThroughputTimer, see_memory_usage
from deepspeed.profiling.layer_watch import LayerWatch
from deepspeed.profiling.update_metrics import UpdateMetrics
from deepspeed.version import __version__
from deepspeed.zero.plan import StatePlan
from deepspeed.zero.unit import Unit
from deepspeed.zero.update.apply import captured_groups
from deepspeed.zero.update.result import StepResult

PHASES = ("forward", "backward", "step")


def _heard(name: str, text: str) -> Any:
    """Make a property, with the docstring ``text``, that takes in the outcome of all updates before it answers."""
    return property(
        lambda self: getattr(self._hear(), name), lambda self, value: setattr(self._hear(), name, value), None, text
    )


_ADVICE = "call it after every backward(), or see set_gradient_accumulation_boundary()"


@dataclass
class StepCalls:
    """Warn once where ``step`` is not called as the engine counts, by the order of calls between two of them; and at
    the end of an engine, or of the process, where it was never called.
    """

    backwards: int = 0  # since the last call of ``step``
    pairs: int = 0  # of these with a forward before each
    outside: int = 0  # of those outside no_sync
    length: int = 1  # of the window
    stepped: bool = False  # ever
    alike: int = 0  # calls in a row that came only after a whole window
    _forward: bool = False
    _warned: bool = False

    def __post_init__(self) -> None:
        weakref.finalize(self, _tell_at_end, vars(self))  # which does not keep this alive

    def restart(self, *, stepped: bool = False) -> None:
        """Reset the counts of calls since the last ``step``."""
        self.backwards = self.pairs = self.outside = 0
        self.stepped |= stepped

    def forward(self) -> None:
        self._forward |= torch.is_grad_enabled()

    def backward(self, length: int, *, local: bool) -> None:
        """Note that a backward has begun, in a window of ``length`` calls of ``step``; ``local``: inside no_sync."""
        self.backwards += 1
        self.pairs += self._forward
        self.outside += self._forward and not local
        self.length, self._forward = length, False
        # Several losses of a micro-batch are legal, and so is a sum by hand of many micro-batches.
        if self.outside >= (max(4 * length, 32) if length > 1 else 512):
            self._warn(f"{self.outside} micro-batches have come without engine.step(): nothing is updated")

    def step(self, length: int) -> None:
        self.alike = self.alike + 1 if length > 1 and self.pairs == self.backwards == length else 0
        if self.alike >= length > 1:
            self._warn(
                f"engine.step() comes after every {length} micro-batches only, and as gradient_accumulation_steps is "
                f"{length} the engine updates at every {length}th call, after {length * length} micro-batches"
            )
        self.restart(stepped=True)

    def _warn(self, text: str) -> None:
        if not self._warned:
            log_dist(f"{text}; {_ADVICE}", level=WARNING)
        self._warned = self.stepped = True


def _tell_at_end(calls: dict[str, Any]) -> None:
    """Warn where an engine ends that has never updated."""
    if calls["outside"] > calls["length"] and not calls["stepped"]:
        log_dist(f"{calls['outside']} micro-batches, and engine.step() was never called: {_ADVICE}", level=WARNING)


class EngineReports(EngineFacts):
    """Mixin with the outcomes of updates, and the engine's clocks."""

    # -- what updates came to -------------------------------------------------------------------------------------
    def _start_hearing(self) -> None:
        self._result = StepResult()  # of the last update
        self._unheard: list[StepResult] = []  # what the device has decided, and the program not read yet
        self._overflowed = self._updated = False
        self._skipped = self._bad_row = 0  # in all, and in a row up to the last update
        self._culprit = ""  # of the first in that row, as far as this rank knows

    def _hear(self, *, wait: bool = True) -> "EngineReports":
        """Take in the outcome of updates; without ``wait`` only as far as it is known."""
        while self._unheard and (wait or self._unheard[0].known()):
            result = self._unheard.pop(0)
            self._overflowed = result.overflow
            self._skipped += self._overflowed
            self._bad_row = self._bad_row + 1 if self._overflowed else 0
            self._culprit = result.culprit if self._bad_row == 1 else self._culprit
            if self._overflowed and result.undo is not None:
                result.undo()
        return self

    def _step_schedule(self, settings: dict[str, Any]) -> None:
        """Step the schedule after an update that was applied. One that the device may still skip counts as applied
        until its outcome is known, before the next update, save or load. Then the schedule is put back, and the values
        that it has written into groups, where nobody else has changed them.
        """
        schedule, optimizer = self.lr_scheduler, self.basic_optimizer
        if not self._hear(wait=False)._unheard:
            if self.was_step_applied():
                schedule.step(**settings)
            return
        state, before = copy.deepcopy(schedule.state_dict()), captured_groups(optimizer)
        schedule.step(**settings)
        after = captured_groups(optimizer)

        def put_back() -> None:
            schedule.load_state_dict(state)
            for group, old, new in zip(optimizer.param_groups, before, after, strict=True):
                group.update({key: value for key, value in old.items() if group.get(key) == new.get(key)})

        self._unheard[-1].undo = put_back

    def _hear_or_end(self, limit: int) -> None:
        """Take in known outcomes; raise UsageError, on all ranks, after ``limit`` skips in a row (0: never)."""
        self._hear(wait=0 < limit <= self._bad_row + len(self._unheard))
        if 0 < limit <= self._bad_row:
            name = next(filter(None, gather_objects(self._culprit, self.mesh.job)), "an unknown parameter")
            raise UsageError(
                f"{self._bad_row} updates in a row were skipped (anomalies.nonfinite_updates; 0: go on): since step "
                f"{self.global_steps - self._bad_row + 1}, when the gradient of {name} was not finite. Lower the "
                "learning rate, set gradient_clipping, or check the data and the loss for inf/nan"
            )

    skipped_steps = _heard("_skipped", "Updates that were left out, as a gradient was not finite.")
    overflowed = _heard("_overflowed", "Whether the last update was left out.")

    # -- clocks and metrics ---------------------------------------------------------------------------------------
    def _start_timing(self, config: DeepSpeedConfig) -> None:
        self._events = Events()
        self._losses: list[torch.Tensor] = []  # undivided, of each micro-batch since the last update
        self._spent_ms: dict[str, float] = {}  # by phase, since the last update
        self._phases: list[str] = []
        self._over_limit = False  # of host memory, and the log says so
        self.timers: Any = SynchronizedWallClockTimer() if config.wall_clock_breakdown else NoopTimer()
        if config.wall_clock_breakdown:
            self.runtime.events.append(self._time_flush)
        throughput, every = config.timers.throughput, config.steps_per_print
        # A report that is never due needs no measurement.
        reports = throughput.enabled and every is not None and math.isfinite(every)
        measured = Namespace(enabled=reports, synchronized=throughput.synchronized)
        self.tput_timer = ThroughputTimer(measured, config.train_batch_size, steps_per_output=every)
        self.update_metrics, self.step_profile = UpdateMetrics(config, self.monitor), None
        self.flops_profiler: Any = None
        if config.anomalies.per_layer and config.anomalies.enabled is not False:
            self.runtime.events.append(LayerWatch(self.module, self.runtime, config.anomalies.window))
        if config.flops_profiler.enabled:  # torch's counter takes a while to import
            kind = importlib.import_module("deepspeed.profiling.flops_profiler.in_engine").StepProfile
            self.step_profile = kind(self.module, config, self.mesh.job)
            self.flops_profiler = self.step_profile.profiler
            self._events.append(self.step_profile)
            self._lasting.callback(self.step_profile.close)

    def _watch_memory(self) -> None:
        """Warn once when this rank holds more than ``memory.host_limit``, which model states do not explain."""
        limit = self._config.memory.host_limit
        if limit is None or self._over_limit or (resident := hostmem.rss_bytes()) <= limit:
            return
        self._over_limit = True
        logger.warning(
            "rank %d holds %d MiB of host memory, more than memory.host_limit (%d MiB); model states were planned at "
            "%d MiB, so the rest is activations, data or other objects: use smaller batches, activation checkpointing "
            "or fewer loader workers",
            *(self.global_rank, resident >> 20, limit >> 20, self.memory_plan().host >> 20),
        )

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
            with self._events.range(name, PHASE, name):
                yield
        finally:
            timer.stop()
            self._phases.remove(name)
            self._spent_ms[name] = self._spent_ms.get(name, 0.0) + timer.elapsed(reset=False) - before
        see_memory_usage(f"memory after {name}", force=self._config.memory_breakdown)

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
            for name, share in (("backward_allreduce", reduced), ("backward_inner", -reduced)):
                self._spent_ms[name] = self._spent_ms.get(name, 0.0) + share

        return end

    def _write_metrics(self) -> None:
        """Report the metrics of one update: learning rate, mean loss here, loss scale, times, and more."""
        spent, self._spent_ms = self._spent_ms, {}
        if "backward_inner" in spent:  # so far the negative of the rest
            spent["backward_inner"] += spent.get("backward", 0.0)
        losses, self._losses = self._losses, []
        if self.update_metrics.wanted:
            self.update_metrics.report(self, losses, spent)
        if self._events:
            self._events.begin(METRICS)


def _rest(state: StatePlan | None) -> str:
    return "-" if state is None else f"{''.join(way.value for way in state.spread)} {state.tier.value}"


def _numel(units: list[Unit]) -> int:
    return sum(segment.numel for unit in units for segment in unit.layout.segments)


def state_dump(engine: EngineReports) -> str:
    """Format the resolved keys with their origins, the units with their rest places, and the optimizer's groups."""
    secret = {field.path for field in declared_fields(DeepSpeedConfig) if not field.info.repr}
    shown = [item for item in settings(engine._config) if item.pattern not in secret]
    config = [f"  {item.path} = {item.value!r} ({item.origin})" for item in shown]
    units = [
        f"  {unit.name}: {_numel([unit]):,} elements in {counted(len(unit.params), 'parameter')}, {unit.dtype}, "
        f"PARAM {_rest(unit.plan.param)}, GRAD {_rest(unit.plan.grad)}, OPTIM {_rest(unit.plan.optim)}"
        for unit in engine.runtime.units
    ]
    options = [", ".join(f"{k}={v}" for k, v in g.items() if k != "params") for g in engine._groups()]
    optimizer = [f"  group {i}: {text}" for i, text in enumerate(options)]
    name = type(engine.basic_optimizer).__name__ if options else "none"
    lines = ["configuration:", *config, f"units ({len(units)}):", *units, f"optimizer {name}:", *optimizer]
    return "\n".join(lines)


def report_start(engine: EngineReports) -> None:
    """Log one line about ``engine``, and the reports of ``dump_state`` and ``memory_breakdown``."""
    units, offload = engine.runtime.units, engine.runtime.plan.offload
    log_dist(
        f"DeepSpeed {__version__}: {_numel(units):,} parameters in {counted(len(units), 'unit')} "
        f"({sum(u.movable for u in units)} sharded), ZeRO stage {engine.zero_optimization_stage()}, "
        f"{counted(engine.mesh.job.size, 'rank')}, {engine._config.compute_dtype}, batch {engine.train_batch_size()} = "
        f"micro-batch {engine._micro} x accumulation {engine._gas} x data-parallel ranks {engine.mesh.data.size}"
    )
    offloaded = any(state is not None and state.away for unit in units for state in (unit.plan.param, unit.plan.optim))
    if offloaded or offload.host_limit or offload.device_limit:
        log_dist(f"{'; '.join(engine.places())}\n{engine.memory_plan().table()}")
    if engine.dump_state():
        log_dist(f"dump_state\n{state_dump(engine)}")
    see_memory_usage("memory after initialize", force=engine.memory_breakdown())
