"""Loss scaling for fp16: a constant, or a scale that halves on overflow and doubles after a quiet window."""

from typing import Any

from deepspeed.config import DeepSpeedConfig
from deepspeed.errors import UsageError


class LossScaler:
    """Scale that never changes; with scale 1 fp32 and bf16 training use it, too."""

    dynamic = False

    def __init__(self, scale: float = 1.0) -> None:
        self.cur_scale = float(scale)
        self.cur_iter = 0

    @property
    def loss_scale(self) -> float:
        """Return the factor by which the loss is multiplied and the gradients are divided."""
        return self.cur_scale

    def update(self, overflow: bool) -> None:  # noqa: FBT001
        """Count one optimizer step; the scale stays."""
        self.cur_iter += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain numbers."""
        return {"dynamic": self.dynamic, "cur_scale": self.cur_scale, "cur_iter": self.cur_iter}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the counter; the scale stays the configured one, which the user may have changed since the save."""
        self.cur_iter = int(state.get("cur_iter", 0))


class DynamicLossScaler(LossScaler):
    """Halve on overflow, after ``hysteresis - 1`` that are let pass; double after ``scale_window`` good steps in a row.

    With ``consecutive_hysteresis`` every good step gives the let-pass credit back, otherwise only a doubling does. An
    overflow at ``min_scale`` raises.
    """

    dynamic = True

    def __init__(
        self,
        init_scale: float = 2.0**16,
        *,
        scale_window: int = 1000,
        min_scale: float = 1.0,
        hysteresis: int = 2,
        consecutive_hysteresis: bool = False,
    ) -> None:
        super().__init__(init_scale)
        self.last_overflow_iter = -1
        self.scale_window, self.scale_factor, self.min_scale = scale_window, 2.0, float(min_scale)
        self.delayed_shift = self.cur_hysteresis = hysteresis
        self.consecutive_hysteresis = consecutive_hysteresis

    def update(self, overflow: bool) -> None:  # noqa: FBT001
        """Move to the next optimizer step; ``overflow``: some gradient on some rank was not finite.

        Raises UsageError, and changes nothing, on overflow while the scale is at its minimum.
        """
        stable = self.cur_iter - self.last_overflow_iter - 1
        if overflow and self.delayed_shift > 1 and self.cur_hysteresis > 1:
            self.cur_hysteresis -= 1
        elif overflow:
            if self.cur_scale <= self.min_scale:
                raise UsageError(
                    f"fp16 loss scale is already at its minimum {self.min_scale:g} and the gradients of optimizer step "
                    f"{self.cur_iter} are still not finite, so scaling is not the cause: the log names the first bad "
                    "parameter. Lower the learning rate, set gradient_clipping, check the data and the loss for "
                    "inf/nan, train in bf16, or lower fp16.min_loss_scale"
                )
            self.cur_scale = max(self.cur_scale / self.scale_factor, self.min_scale)
        elif stable > 0 and stable % self.scale_window == 0:
            self.cur_hysteresis = self.delayed_shift
            self.cur_scale *= self.scale_factor
        elif self.consecutive_hysteresis:
            self.cur_hysteresis = self.delayed_shift
        if overflow:
            self.last_overflow_iter = self.cur_iter
        self.cur_iter += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain numbers; ``load_state_dict`` continues the trace exactly."""
        last = {"last_overflow_iter": self.last_overflow_iter, "cur_hysteresis": self.cur_hysteresis}
        return super().state_dict() | last

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore scale and counters; window, floor and hysteresis stay the configured ones."""
        if not state.get("dynamic", True):
            return
        self.cur_scale = float(state["cur_scale"])
        self.cur_iter = int(state["cur_iter"])
        self.last_overflow_iter = int(state["last_overflow_iter"])
        self.cur_hysteresis = int(state.get("cur_hysteresis", self.delayed_shift))


def computes_in_fp16(cfg: DeepSpeedConfig) -> bool:
    """Return whether forwards compute in fp16, by autocast or throughout."""
    return (cfg.torch_autocast.dtype if cfg.torch_autocast.enabled else cfg.compute_dtype) == "fp16"


def build_loss_scaler(cfg: DeepSpeedConfig) -> LossScaler:
    """Build a config's scaler: for fp16 as its block says, dynamic for autocast to it, 1 for every other dtype."""
    fp16 = cfg.fp16 if cfg.fp16.enabled else type(cfg.fp16)()  # its defaults
    if not computes_in_fp16(cfg) or fp16.loss_scale:
        return LossScaler(fp16.loss_scale or 1.0)
    return DynamicLossScaler(
        2.0**fp16.initial_scale_power,
        scale_window=fp16.loss_scale_window,
        min_scale=fp16.min_loss_scale,
        hysteresis=fp16.hysteresis,
        consecutive_hysteresis=fp16.consecutive_hysteresis,
    )
