"""The profile that ``flops_profiler`` asks an engine for: one update timed, and the next one counted.

Counting takes longer than computing, and compiled code runs uncompiled for it: so times come from another update.
"""

from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepspeed.accelerator.device import get_accelerator
from deepspeed.comm.collectives import AxisGroup, sum_in_place
from deepspeed.config import DeepSpeedConfig
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.monitor.events import PHASE
from deepspeed.monitor.log import log_dist, logger
from deepspeed.profiling.flops_profiler.counter import BACKWARD, FORWARD, RECOMPUTED
from deepspeed.profiling.flops_profiler.profiler import FlopsProfiler, write_report
from deepspeed.profiling.flops_profiler.report import amount, render
from deepspeed.profiling.peak import peak_tflops


class ProfileState(Enum):
    """Purpose of the update under way."""

    WAITING = "waiting"
    TIMING = "timing"
    COUNTING = "counting"
    DONE = "done"


class StepProfile:
    """Follow an engine's phases; ``flops_per_update`` is the mean over the ranks, without recomputation, once known.

    ``settings``: the block flops_profiler. Raises DeepSpeedConfigError where ``output_file`` cannot be written.
    """

    def __init__(self, model: nn.Module, config: DeepSpeedConfig, job: AxisGroup) -> None:
        self._settings, self._job, self._dtype = config.flops_profiler, job, config.compute_dtype
        self._part = "this rank's part of the model, " if config.tensor_parallel.ways > 1 else ""
        self.profiler = FlopsProfiler(model, recompute_fwd_factor=self._settings.recompute_fwd_factor)
        self.state = ProfileState.WAITING
        self.flops_per_update: float | None = None
        self._spans: dict[str, list[tuple[Any, Any]]] = {}
        self._seconds: dict[str, float] = {}
        self._updates = 0
        _check_writable(self._settings.output_file)
        self.await_step(0)

    @property
    def peak(self) -> float | None:
        """Return this device's peak in operations a second; None where the peak is not known."""
        tflops = self._settings.peak_tflops or peak_tflops(get_accelerator().product_name(), self._dtype)
        return None if tflops is None else tflops * 1e12

    def __call__(self, kind: str, name: str) -> Callable[[], None] | None:
        """Listen to the engine's "forward", "backward" and "step"."""
        if kind != PHASE:
            return None
        if name == "step":
            self.profiler.stop_profile()
        elif self.busy and not self.profiler.started and torch.is_grad_enabled() and self.profiler.model.training:
            counts = self.state is ProfileState.COUNTING
            self.profiler.resume(count=counts, time=not counts)
        if self.state is not ProfileState.TIMING or not (self.profiler.started or name == "step"):
            return None
        start, end = (get_accelerator().Event(enable_timing=True) for _ in range(2))
        start.record()
        self._spans.setdefault(name, []).append((start, end))
        return lambda: end.record()

    def micro_batch_ends(self, update: int | None) -> None:
        """End a call of ``engine.step``, with ``update`` updates if it was one. Collective after the counted one."""
        self.profiler.stop_profile()
        if update is None:
            return
        self._updates = update
        if self.state is ProfileState.TIMING:
            get_accelerator().synchronize()
            for name, spans in self._spans.items():
                self._seconds[name] = sum(start.elapsed_time(end) for start, end in spans) / 1e3
            self.state = ProfileState.COUNTING
        elif self.state is ProfileState.COUNTING:
            self.state = ProfileState.DONE
            self._report(update)
        self.await_step(update)

    @property
    def busy(self) -> bool:
        """Return whether the update under way is timed or counted, which takes longer."""
        return self.state in (ProfileState.TIMING, ProfileState.COUNTING)

    def await_step(self, updates: int) -> None:
        """Start the profile with the next update if it is due after ``updates`` updates."""
        if self.state is ProfileState.WAITING and updates >= self._settings.profile_step:
            self.state = ProfileState.TIMING

    def _report(self, update: int) -> None:
        figures = self.profiler.profile(f"update {update - 1}, {self._part}rank {self._job.ranks[0]}")
        parts = (FORWARD, BACKWARD, RECOMPUTED)
        device = torch.empty(0, device=get_accelerator().current_device_name()).device
        sums = torch.tensor([figures.totals[part] for part in parts], dtype=torch.float64, device=device)
        totals = sum_in_place(sums, self._job).tolist()
        self.flops_per_update = (totals[0] + totals[1]) / self._job.size
        figures.notes.extend(self._notes(totals))
        s = self._settings
        if self._job.index:
            return
        text = render(figures, depth=s.module_depth, top=s.top_modules, detailed=s.detailed)
        if s.output_file is None:
            log_dist(text)
            return
        write_report(text, s.output_file)
        log_dist(f"the flops profile of update {update - 1} is in {s.output_file}")

    def _notes(self, totals: list[float]) -> list[str]:
        """Return lines for people about the whole update. ``totals``: operations by part, of all ranks."""
        model, again = totals[0] + totals[1], totals[2]
        notes = [
            f"all {self._job.size} ranks, one update: {amount(model, 'FLOPS')}, and {amount(again, 'FLOPS')} recomputed"
        ]
        seconds = sum(self._seconds.values())
        if not seconds:
            return notes
        times = ", ".join(f"{name} {value * 1e3:.3f} ms" for name, value in self._seconds.items())
        rate, hardware = model / self._job.size / seconds, (model + again) / self._job.size / seconds
        notes += [f"an update on rank {self._job.ranks[0]}: {seconds * 1e3:.3f} ms ({times})"]
        notes += [f"a rank: {amount(rate, 'FLOPS/s')}, with recomputation {amount(hardware, 'FLOPS/s')}"]
        if (peak := self.peak) is None:
            text = "the peak of this device is not known; set flops_profiler.peak_tflops for the share of it (MFU)"
            return [*notes, text]
        return [*notes, f"MFU {rate / peak:.2%} of {amount(peak, 'FLOPS/s')}, with recomputation {hardware / peak:.2%}"]

    def mfu(self, seconds: float, share: float = 1.0) -> float | None:
        """Return the share of the device's peak that an update of ``seconds`` reaches; None while a figure is unknown.

        ``share``: the update's tokens over those of the update that was counted.
        """
        if self.flops_per_update is None or (peak := self.peak) is None or seconds <= 0:
            return None
        return self.flops_per_update * share / seconds / peak

    def close(self) -> None:
        """End the run's profile; warn if no profile was made."""
        self.profiler.stop_profile()
        if self.state is not ProfileState.DONE and self._job.index == 0:
            logger.warning(
                "flops_profiler.profile_step %d: no profile was made: the run ended after %d updates, and the profile "
                "takes update profile_step and the one after it",
                self._settings.profile_step,
                self._updates,
            )


def _check_writable(output_file: str | None) -> None:
    """Raise DeepSpeedConfigError before training, rather than after the profile, if the file cannot be written."""
    if output_file is None:
        return
    path = Path(output_file)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a", encoding="utf-8"):
            pass
    except OSError as error:
        raise DeepSpeedConfigError(
            f"flops_profiler.output_file {output_file!r} cannot be written: {error}. Choose another file."
        ) from error
