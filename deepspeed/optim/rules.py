"""The update rules of Adagrad, LAMB and Lion: which kernels there are, how they are called, and the same with torch."""

from typing import Any

import torch

from deepspeed.errors import OptimizerConfigError
from deepspeed.native.ops import CPU_ADAGRAD, CPU_LION, FUSED_LAMB, FUSED_LION
from deepspeed.optim import cuda, host
from deepspeed.optim.adam import moments_
from deepspeed.optim.base import Group, GroupStep, Tensors


class Adagrad(GroupStep):
    """``g <- g + wd*p; s <- s + g*g; p <- p - lr/(1 + (t-1)*lr_decay) * g / (sqrt(s) + eps)`` (Duchi et al. 2011).

    torch's class allocates a full accumulator for every parameter in its constructor, which a sharded model
    cannot afford; the state keys (``step``, ``sum``) and the arithmetic are the same.
    """

    keywords = {"lr": 1e-2, "lr_decay": 0.0, "weight_decay": 0.0, "initial_accumulator_value": 0.0, "eps": 1e-10}
    fixed = {**GroupStep.fixed, "lr_decay": 0.0, "initial_accumulator_value": 0.0}
    elementwise = True
    host_op = CPU_ADAGRAD
    slots = ("step", "sum")

    def _rate(self, state: Group, group: Group) -> float:
        return float(group["lr"]) / (1 + (float(state["step"]) - 1) * float(group["lr_decay"]))

    def _on_host(self, tensors: Tensors, state: Group, group: Group, out: torch.Tensor | None) -> None:
        rate, decay = self._rate(state, group), group["weight_decay"]
        host.adagrad_step(*tensors, rate=rate, eps=group["eps"], weight_decay=decay, out=out)

    def _update(self, param: torch.Tensor, grad: torch.Tensor, state: Group, group: Group) -> None:
        state["step"] += 1
        total = state["sum"]
        value, grad = param.to(total.dtype), grad.to(total.dtype)
        if group["weight_decay"]:
            grad = grad.add(value, alpha=group["weight_decay"])
        total.addcmul_(grad, grad)
        param.copy_(value.addcdiv(grad, total.sqrt().add_(group["eps"]), value=-self._rate(state, group)))


class Lion(GroupStep):
    """``u = sign(b1*m + (1-b1)*g); p <- p - lr*(u + wd*p); m <- b2*m + (1-b2)*g``, one moment per element.

    Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms".
    """

    keywords = {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0}
    elementwise = True
    host_op, cuda_op = CPU_LION, FUSED_LION
    slots = ("exp_avg",)

    def _on_cuda(self, columns: list[Tensors], states: list[Group], group: Group) -> bool:
        settings = {name: group[name] for name in Lion.keywords}
        cuda.lion_step(*columns, **settings, outs=[self._output_of(p) for p in columns[0]])
        return True

    def _on_host(self, tensors: Tensors, state: Group, group: Group, out: torch.Tensor | None) -> None:
        host.lion_step(*tensors, **{name: group[name] for name in Lion.keywords}, out=out)

    def _update(self, param: torch.Tensor, grad: torch.Tensor, state: Group, group: Group) -> None:
        moment, (beta1, beta2), lr = state["exp_avg"], group["betas"], group["lr"]
        grad = grad.to(moment.dtype)
        blend = torch.lerp(moment, grad, 1 - beta1)
        update = torch.where(blend.isnan(), blend, blend.sign())  # torch's sign of not-a-number is 0
        param.copy_(param.to(moment.dtype).mul_(1 - lr * group["weight_decay"]).add_(update, alpha=-lr))
        moment.lerp_(grad, 1 - beta2)


class Lamb(GroupStep):
    """Adam's direction, scaled for each parameter tensor by a trust ratio.

    ``u = m_hat / (sqrt(v_hat) + eps) + wd*p``; ``r = clamp(||p|| / ||u||, min_coeff, max_coeff)``, 1 where a norm is 0;
    ``p <- p - lr*r*u``. With ``eps_inside_sqrt`` the divisor is ``sqrt(v_hat + eps)``.
    The norms are those of whole tensors, so this optimizer must see whole parameters.
    You et al. 2020, "Large Batch Optimization for Deep Learning". Raises OptimizerConfigError also for
    ``max_grad_norm`` (clipping belongs to ``gradient_clipping``).
    """

    _NUMBERS = {
        **{"lr": 1e-3, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-8, "eps_inside_sqrt": False},
        **{"weight_decay": 0.0, "max_coeff": 10.0, "min_coeff": 0.01},
    }
    keywords = _NUMBERS
    fixed = {}
    elementwise = False
    cuda_op = FUSED_LAMB
    _ratios: dict[torch.Tensor, torch.Tensor]

    def _build(self, params: Any, settings: Group) -> None:
        name, low, high = type(self).__name__, settings["min_coeff"], settings["max_coeff"]
        if (norm := settings.pop("max_grad_norm", 0.0)) > 0:
            raise OptimizerConfigError(
                f"{name}: max_grad_norm {norm} is not applied here; set gradient_clipping in the config"
            )
        if not low <= high:
            raise OptimizerConfigError(f"{name}: min_coeff {low} is above max_coeff {high}; exchange them")
        super()._build(params, settings)

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
        numbers, outs = {name: group[name] for name in self._NUMBERS}, [self._output_of(p) for p in columns[0]]
        self._remember(columns[0], cuda.lamb_step(*columns, step=number, **numbers, outs=outs))
        return True

    def _update(self, param: torch.Tensor, grad: torch.Tensor, state: Group, group: Group) -> None:
        first, second = moments_(grad.to(state["exp_avg"].dtype), state, group)
        divisor = second.add_(group["eps"]).sqrt_() if group["eps_inside_sqrt"] else second.sqrt_().add_(group["eps"])
        update = first.div_(divisor).add_(param, alpha=group["weight_decay"])
        weight_norm, update_norm = torch.linalg.vector_norm(param), torch.linalg.vector_norm(update)
        # torch.where keeps the decision on the device; reading the norms here would stall it once per parameter
        ratio = torch.where(
            (weight_norm > 0) & (update_norm > 0),
            (weight_norm / update_norm).clamp(group["min_coeff"], group["max_coeff"]),
            1.0,
        )
        param.sub_(update.mul_(ratio), alpha=group["lr"])
        self._remember([param], [ratio])
