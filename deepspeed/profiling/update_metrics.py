"""What an engine reports of each update: loss, learning rate, gradient norms, rates, times, memory; and oddities.

Everything is of rank 0, which writes it, but a loss that is weighed by tokens is that of all ranks; rates are by the
host's clock from one update to the next.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch

from deepspeed.accelerator.device import get_accelerator
from deepspeed.comm.collectives import sum_in_place
from deepspeed.config import DeepSpeedConfig
from deepspeed.monitor import hostmem
from deepspeed.monitor.anomaly import AnomalyWatch
from deepspeed.monitor.log import log_dist
from deepspeed.monitor.monitor import MonitorMaster
from deepspeed.profiling.timeline.listen import Listener
from deepspeed.profiling.timeline.spans import StepSpans, clock_for
from deepspeed.sequence.batch import is_part

_PENDING = 64


def tokens_in(inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the elements of ``input_ids`` or ``tokens``, or of the first 2-D integer tensor; 0 without one."""
    values = [kwargs[name] for name in ("input_ids", "tokens") if name in kwargs] or [*inputs, *kwargs.values()]
    for value in values:
        if isinstance(value, dict) or hasattr(value, "keys"):
            return tokens_in((), dict(value))
        whole = isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex())
        if whole and value.dim() == 2 and value.dtype is not torch.bool:
            return int(value.numel())
    return 0


def clipped_norm(norm: float, limit: float) -> float:
    """Return the norm after clipping to ``limit``, 0 for none."""
    return norm / max(1.0, (norm + 1e-6) / limit) if limit > 0 else norm


class UpdateMetrics:
    """Collect one engine's figures, from update to update, for its ``monitor`` and its anomaly watch."""

    def __init__(self, config: DeepSpeedConfig, monitor: MonitorMaster) -> None:
        block, self._monitor = config.anomalies, monitor
        watches = monitor.enabled if block.enabled is None else block.enabled
        self._watch = AnomalyWatch(block.window) if watches else None
        self.wanted = monitor.enabled or watches
        self.more: Callable[[], Mapping[str, float]] = dict  # further figures; all ranks call it together
        self._tokens, self._of_parts = 0, False
        self._losses: list[torch.Tensor] = []  # undivided or weighed, since the last update
        self._counted_tokens: int | None = None  # of the update that the profile has counted
        self._last_s: float | None = None
        self._listener: Listener | None = None
        self.observed = False  # an observer, which listens already, puts what it hears into ``steps``
        self.steps = deque[StepSpans](maxlen=_PENDING)  # that the device has not passed yet

    def note_inputs(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count the tokens of a micro-batch that this rank starts."""
        if self._monitor.enabled:
            self._tokens += tokens_in(inputs, kwargs)
            self._of_parts = is_part(kwargs)

    def note_loss(self, loss: torch.Tensor, *, part: bool = False) -> None:
        """Keep a micro-batch's loss, times its weight if it has one, or ``part`` of one, as divided by the caller."""
        self._losses = [sum(self._losses, loss.float())] if part else [*self._losses, loss.float()]

    def forget(self) -> None:
        """Drop the losses of a window that begins anew."""
        self._losses = []

    def _loss(self, engine: Any) -> float | None:
        """Return the mean loss of the update's micro-batches, None without one; of weighed ones that of all ranks."""
        losses, self._losses = self._losses, []
        if not losses:
            return None
        total, weight = torch.stack(losses).sum(), engine._outcomes.last.weight
        return float(sum_in_place(total, engine.mesh.job)) / weight if weight else float(total) / len(losses)

    def report(self, engine: Any, spent_ms: Mapping[str, float]) -> None:
        """Write the figures of an update of ``engine``, log what is unusual; waits for losses and norm."""
        loss, norm = self._loss(engine), engine.get_global_grad_norm()
        if self._watch is not None:
            for text in self._watch.look(engine.global_steps, loss=loss, norm=norm):
                log_dist(text, level=logging.WARNING)
        if not self._monitor.enabled:
            return
        scale = engine.loss_scale() if engine.fp16_enabled() or engine.dynamic_loss_scale() else None
        values = {
            "lr": next((group["lr"] for group in engine._groups()), None),
            "loss_scale": scale,
            "train_loss": loss,
        }
        if norm is not None:
            values["grad_norm"] = norm
            if engine.was_step_applied():
                values["grad_norm_clipped"] = clipped_norm(norm, engine.gradient_clipping())
        values |= self._rates(engine) | _memory(engine) | self._communication(engine)
        values |= self.more()
        values |= {f"elapsed_time_ms_{phase}": time for phase, time in spent_ms.items() if time > 0}
        events = {f"Train/Samples/{name}": value for name, value in values.items() if value is not None}
        self._monitor.write_events([(name, value, engine.global_samples) for name, value in events.items()])

    def _communication(self, engine: Any) -> dict[str, float]:
        """Return milliseconds of the newest update that the device has passed: collectives under way, and waits."""
        if engine.mesh.job.size == 1:
            return {}
        if self._listener is not None:
            self.steps.append(self._listener.turn())
        elif not self.observed:
            self._listener = Listener(engine, clock_for(engine.device.type))
            engine._lasting.callback(self._listener.close)
            return {}
        newest: StepSpans | None = None
        while self.steps and self.steps[0].known():
            newest = self.steps.popleft()
        if newest is None or not newest.noted:
            return {}
        times = newest.summary()
        return {"communication_ms": times["communication_ms"], "exposed_communication_ms": times["wait_ms"]}

    def _rates(self, engine: Any) -> dict[str, float]:
        now = time.perf_counter()
        seconds, self._last_s = None if self._last_s is None else now - self._last_s, now
        profile, tokens, self._tokens = engine.step_profile, self._tokens, 0
        if profile is not None and profile.busy:  # such an update takes its time, and the profile's report goes on
            self._counted_tokens, self._last_s = tokens, None
            return {}
        if not seconds:
            return {}
        rates = {"samples_per_s": engine.tput_timer.batch_size / seconds}
        if tokens:
            whole = engine.mesh.cuts and not self._of_parts
            rates["tokens_per_s"] = tokens * (engine.mesh.data if whole else engine.mesh.zero).size / seconds
        if profile is None or profile.flops_per_update is None:
            return rates
        share = tokens / self._counted_tokens if tokens and self._counted_tokens else 1.0
        rates["tflops_per_rank"] = profile.flops_per_update * share / seconds / 1e12
        mfu = profile.mfu(seconds, share)
        return rates if mfu is None else {**rates, "mfu": mfu}


def _memory(engine: Any) -> dict[str, float]:
    """Return bytes: in use and at peak, of the device and of the host; and the states' planned bytes on each tier."""
    accelerator, plan = get_accelerator(), engine.memory_plan()
    values: dict[str, float] = {
        "memory_host_bytes": hostmem.rss_bytes(),
        "memory_host_peak_bytes": hostmem.peak_rss_bytes(),
        "states_host_bytes": plan.host,
        "states_drive_bytes": plan.drive,
    }
    if accelerator.device_name() != "cpu":
        values["memory_device_bytes"] = accelerator.memory_allocated()
        values["memory_device_peak_bytes"] = accelerator.max_memory_allocated()
        values["states_device_bytes"] = plan.device
    return values
