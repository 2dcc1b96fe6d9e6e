"""Lion (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms")."""

import itertools
from typing import Any

import torch

from deepspeed.native.ops import CPU_LION, FUSED_LION
from deepspeed.optim import cuda, host
from deepspeed.optim.base import GroupStep, check_ranges, new_moment


class Lion(GroupStep, torch.optim.Optimizer):
    """``u = sign(b1*m + (1-b1)*g); p <- p - lr*(u + wd*p); m <- b2*m + (1-b2)*g``, one moment per element.

    Raises:
        OptimizerConfigError: a setting out of range.
    """

    elementwise = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_states: bool = False,
    ) -> None:
        check_ranges(type(self).__name__, betas=betas, lr=lr, weight_decay=weight_decay)
        defaults = {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay, "fp32_states": fp32_states}
        super().__init__(params, defaults)

    def _update_group(self, params: list[torch.Tensor], grads: list[torch.Tensor], group: dict[str, Any]) -> None:
        moments = [self._state_of(p, group)["exp_avg"] for p in params]
        if params and cuda.usable(FUSED_LION, itertools.chain(params, grads, moments)):
            settings = {name: group[name] for name in ("lr", "betas", "weight_decay")}
            cuda.lion_step(params, grads, moments, **settings, outs=self._outputs_of(params))
            return
        for param, grad in zip(params, grads, strict=True):
            self._update(param, grad, group)

    def _state_of(self, param: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        state: dict[str, Any] = self.state[param]
        if not state:
            state["exp_avg"] = new_moment(param, group)
        return state

    def _update(self, param: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        state = self._state_of(param, group)
        moment, (beta1, beta2), lr = state["exp_avg"], group["betas"], group["lr"]
        if host.usable(CPU_LION, param, grad, moment):
            out = self._output_of(param)
            host.lion_step(
                param, grad, moment, lr=float(lr), betas=group["betas"], weight_decay=group["weight_decay"], out=out
            )
            return
        grad = grad.to(moment.dtype)
        blend = torch.lerp(moment, grad, 1 - beta1)
        update = torch.where(blend.isnan(), blend, blend.sign())  # torch's sign of not-a-number is 0
        if param.dtype == moment.dtype:
            param.mul_(1 - lr * group["weight_decay"]).add_(update, alpha=-lr)
        else:
            param.copy_(param.to(moment.dtype).mul_(1 - lr * group["weight_decay"]).add_(update, alpha=-lr))
        moment.lerp_(grad, 1 - beta2)
