"""Adagrad that creates its accumulators at the first step, not when it is built."""

from typing import Any

import torch

from deepspeed.native.ops import CPU_ADAGRAD
from deepspeed.optim import host
from deepspeed.optim.base import GroupStep, check_ranges, new_moment


class Adagrad(GroupStep, torch.optim.Optimizer):
    """``g <- g + wd*p; s <- s + g*g; p <- p - lr/(1 + (t-1)*lr_decay) * g / (sqrt(s) + eps)`` (Duchi et al. 2011).

    torch's class allocates a full accumulator for every parameter in its constructor, which a sharded model
    cannot afford; the state keys (``step``, ``sum``) and the arithmetic are the same.

    Raises:
        OptimizerConfigError: a negative setting.
    """

    elementwise = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        *,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        fp32_states: bool = False,
    ) -> None:
        defaults = {"lr": lr, "lr_decay": lr_decay, "weight_decay": weight_decay, "eps": eps}
        defaults["initial_accumulator_value"] = initial_accumulator_value
        check_ranges(type(self).__name__, betas=None, **defaults)
        super().__init__(params, defaults | {"fp32_states": fp32_states})

    def _update_group(self, params: list[torch.Tensor], grads: list[torch.Tensor], group: dict[str, Any]) -> None:
        for param, grad in zip(params, grads, strict=True):
            self._update(param, grad, group)

    def _state_of(self, param: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        state: dict[str, Any] = self.state[param]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["sum"] = new_moment(param, group, group["initial_accumulator_value"])
        return state

    def _update(self, param: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        state = self._state_of(param, group)
        state["step"] += 1
        total = state["sum"]
        rate = float(group["lr"]) / (1 + (float(state["step"]) - 1) * group["lr_decay"])
        if host.usable(CPU_ADAGRAD, param, grad, total):
            out = self._output_of(param)
            host.adagrad_step(
                param, grad, total, rate=rate, eps=group["eps"], weight_decay=group["weight_decay"], out=out
            )
            return
        value, grad = param.to(total.dtype), grad.to(total.dtype)
        if group["weight_decay"]:
            grad = grad.add(value, alpha=group["weight_decay"])
        total.addcmul_(grad, grad)
        param.copy_(value.addcdiv(grad, total.sqrt().add_(group["eps"]), value=-rate))
