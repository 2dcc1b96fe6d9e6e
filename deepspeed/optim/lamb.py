"""LAMB (You et al. 2020, "Large Batch Optimization for Deep Learning")."""

import itertools
from typing import Any

import torch

from deepspeed.errors import OptimizerConfigError
from deepspeed.native.ops import FUSED_LAMB
from deepspeed.optim import cuda
from deepspeed.optim.base import GroupStep, check_ranges


class Lamb(GroupStep, torch.optim.Optimizer):
    """Adam's direction, scaled for each parameter tensor by a trust ratio.

    ``u = m_hat / (sqrt(v_hat) + eps) + wd*p``; ``r = clamp(||p|| / ||u||, min_coeff, max_coeff)``, 1 where a norm is 0;
    ``p <- p - lr*r*u``. With ``eps_inside_sqrt`` the divisor is ``sqrt(v_hat + eps)``.
    The norms are those of whole tensors, so this optimizer must see whole parameters.

    Raises:
        OptimizerConfigError: a setting out of range, or ``max_grad_norm`` (clipping belongs to ``gradient_clipping``).
        RuntimeError: ``amsgrad``.
    """

    elementwise = False
    _ratios: dict[torch.Tensor, torch.Tensor]

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,  # noqa: FBT001, FBT002
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,  # noqa: FBT001, FBT002
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,  # noqa: FBT001, FBT002
    ) -> None:
        name = type(self).__name__
        if amsgrad:
            raise RuntimeError(f"{name} does not support amsgrad; drop the flag")
        if max_grad_norm > 0:
            raise OptimizerConfigError(
                f"{name}: max_grad_norm {max_grad_norm} is not applied here; set gradient_clipping in the config"
            )
        check_ranges(name, betas=betas, lr=lr, eps=eps, weight_decay=weight_decay)
        if not 0 <= min_coeff <= max_coeff:
            raise OptimizerConfigError(
                f"{name}: 0 <= min_coeff <= max_coeff is needed, not {min_coeff} and {max_coeff}"
            )
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": tuple(betas),
            "eps": eps,
            "eps_inside_sqrt": eps_inside_sqrt,
        }
        super().__init__(
            params, defaults | {"weight_decay": weight_decay, "max_coeff": max_coeff, "min_coeff": min_coeff}
        )

    def get_lamb_coeffs(self) -> list[float]:
        """Trust ratios of the last step, one per updated parameter in group order; empty before the first step."""
        ratios = vars(self).get("_ratios", {})
        return [float(ratios[p]) for group in self.param_groups for p in group["params"] if p in ratios]

    def _update_group(self, params: list[torch.Tensor], grads: list[torch.Tensor], group: dict[str, Any]) -> None:
        ratios = self._cuda_group(params, grads, group) or [
            self._update(p, g, group) for p, g in zip(params, grads, strict=True)
        ]
        vars(self).setdefault("_ratios", {}).update(zip(params, ratios, strict=True))

    def _state_of(self, param: torch.Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[param]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(param)
            state["exp_avg_sq"] = torch.zeros_like(param)
        return state

    def _cuda_group(
        self, params: list[torch.Tensor], grads: list[torch.Tensor], group: dict[str, Any]
    ) -> list[torch.Tensor]:
        """The trust ratios of an update with the CUDA kernel; none, before anything is changed, where that does not
        fit.
        """
        states = [self._state_of(p) for p in params]
        steps, firsts, seconds = ([s[name] for s in states] for name in ("step", "exp_avg", "exp_avg_sq"))
        if (
            not params
            or not cuda.on_cuda(params[0])
            or not cuda.usable(FUSED_LAMB, itertools.chain(params, grads, firsts, seconds))
        ):
            return []
        number = int(steps[0]) + 1
        if any(int(step) + 1 != number for step in steps):  # a parameter that joined later counts for itself
            return []
        for step in steps:
            step.add_(1)
        settings = (
            "lr",
            "betas",
            "eps",
            "weight_decay",
            "min_coeff",
            "max_coeff",
            "eps_inside_sqrt",
            "bias_correction",
        )
        numbers, outs = {name: group[name] for name in settings}, self._outputs_of(params)
        return cuda.lamb_step(params, grads, firsts, seconds, step=number, **numbers, outs=outs)

    def _update(self, param: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        state = self._state_of(param)
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
        return ratio
