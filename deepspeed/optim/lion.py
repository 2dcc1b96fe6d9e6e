"""Lion (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms")."""

from typing import Any

import torch

from deepspeed.native.ops import CPU_LION, FUSED_LION
from deepspeed.optim import cuda, host
from deepspeed.optim.base import Group, GroupStep, Tensors, checked


class Lion(GroupStep):
    """``u = sign(b1*m + (1-b1)*g); p <- p - lr*(u + wd*p); m <- b2*m + (1-b2)*g``, one moment per element.

    Raises:
        OptimizerConfigError: a setting out of range.
    """

    elementwise = True
    host_op, cuda_op = CPU_LION, FUSED_LION
    slots = ("exp_avg",)

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_states: bool = False,
    ) -> None:
        settings = checked(self, lr=lr, betas=betas, weight_decay=weight_decay)
        super().__init__(params, settings | {"fp32_states": fp32_states})

    def _on_cuda(self, columns: list[Tensors], states: list[Group], group: Group) -> bool:
        settings = {name: group[name] for name in ("lr", "betas", "weight_decay")}
        cuda.lion_step(*columns, **settings, outs=[self._output_of(p) for p in columns[0]])
        return True

    def _on_host(self, tensors: Tensors, state: Group, group: Group, out: torch.Tensor | None) -> None:
        decay = group["weight_decay"]
        host.lion_step(*tensors, lr=float(group["lr"]), betas=group["betas"], weight_decay=decay, out=out)

    def _update(self, param: torch.Tensor, grad: torch.Tensor, state: Group, group: Group) -> None:
        moment, (beta1, beta2), lr = state["exp_avg"], group["betas"], group["lr"]
        grad = grad.to(moment.dtype)
        blend = torch.lerp(moment, grad, 1 - beta1)
        update = torch.where(blend.isnan(), blend, blend.sign())  # torch's sign of not-a-number is 0
        param.copy_(param.to(moment.dtype).mul_(1 - lr * group["weight_decay"]).add_(update, alpha=-lr))
        moment.lerp_(grad, 1 - beta2)
