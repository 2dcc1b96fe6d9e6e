"""What an engine reports of each update besides loss and learning rate: gradient norms, rates, memory.

Everything is of rank 0, which writes it; rates are by the host's clock from one update to the next, so that what a run
does between updates counts too.
"""

import time
from typing import Any

import torch

from deepspeed.device import get_accelerator
from deepspeed.observe import hostmem


def tokens_in(inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The elements of ``input_ids``, or of the first tensor of whole numbers with two dimensions; 0 without one."""
    values = [kwargs[name] for name in ("input_ids", "tokens") if name in kwargs] or [*inputs, *kwargs.values()]
    for value in values:
        if isinstance(value, dict) or hasattr(value, "keys"):
            return tokens_in((), dict(value))
        whole = isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex())
        if whole and value.dim() == 2 and value.dtype is not torch.bool:
            return int(value.numel())
    return 0


def clipped_norm(norm: float, limit: float) -> float:
    """The norm after clipping to ``limit``, 0 for none."""
    return norm / max(1.0, (norm + 1e-6) / limit) if limit > 0 else norm


class UpdateMetrics:
    """The figures of one engine, by name, from update to update."""

    def __init__(self) -> None:
        self._tokens = 0
        self._counted_tokens: int | None = None  # of the update that the profile has counted
        self._last_s: float | None = None
        self.seconds: float | None = None
        """Of the last update, from the end of the one before."""

    def note_inputs(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A micro-batch of this rank sets out."""
        self._tokens += tokens_in(inputs, kwargs)

    def of_update(self, engine: Any) -> dict[str, float]:
        """An update of ``engine`` has ended; what is not known is left out. Reads the norm, so it waits for it."""
        now = time.perf_counter()
        self.seconds, self._last_s = None if self._last_s is None else now - self._last_s, now
        tokens, self._tokens = self._tokens, 0
        return {**self._norms(engine), **self._rates(engine, tokens), **_memory(engine)}

    def _norms(self, engine: Any) -> dict[str, float]:
        norm = engine.get_global_grad_norm()
        if norm is None:
            return {}
        before = {"grad_norm": norm}
        if engine.was_step_applied():
            before["grad_norm_clipped"] = clipped_norm(norm, engine.gradient_clipping())
        return before

    def _rates(self, engine: Any, tokens: int) -> dict[str, float]:
        profile, seconds = engine.step_profile, self.seconds
        if profile is not None and self._counted_tokens is None and profile.flops_per_update is not None:
            self._counted_tokens = tokens
            return {}  # this update was counted, which takes its time
        if not seconds or (profile is not None and profile.busy):
            return {}
        rates = {"samples_per_s": engine.train_batch_size() / seconds}
        if tokens:
            rates["tokens_per_s"] = tokens * engine.mesh.data.size / seconds
        if profile is None or profile.flops_per_update is None:
            return rates
        share = tokens / self._counted_tokens if tokens and self._counted_tokens else 1.0
        rates["tflops_per_rank"] = profile.flops_per_update * share / seconds / 1e12
        mfu = profile.mfu(seconds, share)
        return rates if mfu is None else {**rates, "mfu": mfu}


def _memory(engine: Any) -> dict[str, float]:
    """Bytes: in use and at peak, of the device and of the host; and what states were planned to take on each tier."""
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
