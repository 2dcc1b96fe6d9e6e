"""LAMB (You et al. 2020, "Large Batch Optimization for Deep Learning")."""

from typing import Any

import torch

from deepspeed.errors import OptimizerConfigError
from deepspeed.native.ops import FUSED_LAMB
from deepspeed.optim import cuda
from deepspeed.optim.base import Group, GroupStep, Tensors, checked

_NUMBERS = ("lr", "betas", "eps", "weight_decay", "min_coeff", "max_coeff", "eps_inside_sqrt", "bias_correction")


class Lamb(GroupStep):
    """Adam's direction, scaled for each parameter tensor by a trust ratio.

    ``u = m_hat / (sqrt(v_hat) + eps) + wd*p``; ``r = clamp(||p|| / ||u||, min_coeff, max_coeff)``, 1 where a norm is 0;
    ``p <- p - lr*r*u``. With ``eps_inside_sqrt`` the divisor is ``sqrt(v_hat + eps)``.
    The norms are those of whole tensors, so this optimizer must see whole parameters.

    Raises:
        OptimizerConfigError: a setting out of range, or ``max_grad_norm`` (clipping belongs to ``gradient_clipping``).
    """

    elementwise = False
    cuda_op = FUSED_LAMB
    _ratios: dict[torch.Tensor, torch.Tensor]

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
    ) -> None:
        name = type(self).__name__
        if max_grad_norm > 0:
            raise OptimizerConfigError(
                f"{name}: max_grad_norm {max_grad_norm} is not applied here; set gradient_clipping in the config"
            )
        if not min_coeff <= max_coeff:
            raise OptimizerConfigError(f"{name}: min_coeff {min_coeff} is above max_coeff {max_coeff}; exchange them")
        settings = checked(self, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        settings |= checked(self, max_coeff=max_coeff, min_coeff=min_coeff)
        super().__init__(params, settings | {"bias_correction": bias_correction, "eps_inside_sqrt": eps_inside_sqrt})

    def get_lamb_coeffs(self) -> list[float]:
        """Trust ratios of the last step, one per updated parameter in group order; empty before the first step."""
        ratios = vars(self).get("_ratios", {})
        return [float(ratios[p]) for group in self.param_groups for p in group["params"] if p in ratios]

    def _remember(self, params: Tensors, ratios: Tensors) -> None:
        vars(self).setdefault("_ratios", {}).update(zip(params, ratios, strict=True))

    def _on_cuda(self, columns: list[Tensors], states: list[Group], group: Group) -> bool:
        number = int(states[0]["step"]) + 1
        if any(int(state["step"]) + 1 != number for state in states):  # one that joined later counts for itself
            return False
        for state in states:
            state["step"] += 1
        numbers, outs = {name: group[name] for name in _NUMBERS}, [self._output_of(p) for p in columns[0]]
        self._remember(columns[0], cuda.lamb_step(*columns, step=number, **numbers, outs=outs))
        return True

    def _update(self, param: torch.Tensor, grad: torch.Tensor, state: Group, group: Group) -> None:
        exp_avg, exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
        beta1, beta2 = group["betas"]
        state["step"] += 1
        steps = float(state["step"])
        correct1, correct2 = (1 - beta1**steps, 1 - beta2**steps) if group["bias_correction"] else (1.0, 1.0)
        grad = grad.to(exp_avg.dtype)
        exp_avg.lerp_(grad, 1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        second = exp_avg_sq / correct2
        divisor = second.add_(group["eps"]).sqrt_() if group["eps_inside_sqrt"] else second.sqrt_().add_(group["eps"])
        update = (exp_avg / correct1).div_(divisor).add_(param, alpha=group["weight_decay"])
        weight_norm, update_norm = torch.linalg.vector_norm(param), torch.linalg.vector_norm(update)
        # torch.where keeps the decision on the device; reading the norms here would stall it once per parameter
        ratio = torch.where(
            (weight_norm > 0) & (update_norm > 0),
            (weight_norm / update_norm).clamp(group["min_coeff"], group["max_coeff"]),
            1.0,
        )
        param.sub_(update.mul_(ratio), alpha=group["lr"])
        self._remember([param], [ratio])
