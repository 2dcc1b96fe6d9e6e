"""Adagrad that creates its accumulators at the first step, not when it is built."""

from typing import Any

import torch

from deepspeed.native.ops import CPU_ADAGRAD
from deepspeed.optim import host
from deepspeed.optim.base import Group, GroupStep, Tensors, checked


class Adagrad(GroupStep):
    """``g <- g + wd*p; s <- s + g*g; p <- p - lr/(1 + (t-1)*lr_decay) * g / (sqrt(s) + eps)`` (Duchi et al. 2011).

    torch's class allocates a full accumulator for every parameter in its constructor, which a sharded model
    cannot afford; the state keys (``step``, ``sum``) and the arithmetic are the same.

    Raises:
        OptimizerConfigError: a negative setting.
    """

    elementwise = True
    host_op = CPU_ADAGRAD
    slots = ("step", "sum")

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
        settings = checked(self, lr=lr, lr_decay=lr_decay, weight_decay=weight_decay, eps=eps)
        settings |= checked(self, initial_accumulator_value=initial_accumulator_value)
        super().__init__(params, settings | {"fp32_states": fp32_states})

    def _on_host(self, tensors: Tensors, state: Group, group: Group, out: torch.Tensor | None) -> None:
        rate, decay = _rate(state, group), group["weight_decay"]
        host.adagrad_step(*tensors, rate=rate, eps=group["eps"], weight_decay=decay, out=out)

    def _update(self, param: torch.Tensor, grad: torch.Tensor, state: Group, group: Group) -> None:
        state["step"] += 1
        total = state["sum"]
        value, grad = param.to(total.dtype), grad.to(total.dtype)
        if group["weight_decay"]:
            grad = grad.add(value, alpha=group["weight_decay"])
        total.addcmul_(grad, grad)
        param.copy_(value.addcdiv(grad, total.sqrt().add_(group["eps"]), value=-_rate(state, group)))


def _rate(state: Group, group: Group) -> float:
    return float(group["lr"]) / (1 + (float(state["step"]) - 1) * float(group["lr_decay"]))
