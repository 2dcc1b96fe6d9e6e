"""Adam and AdamW with the settings of the DeepSpeed interface: native kernels in host memory and on CUDA, torch's
elsewhere.
"""

import itertools
from typing import Any

import torch
from torch.optim.adam import adam as torch_adam

from deepspeed.native.ops import CPU_ADAM, FUSED_ADAM
from deepspeed.optim import cuda, host
from deepspeed.optim.base import GroupStep, new_moment

FUSED_DEVICES = frozenset({"cpu", "cuda", "xpu", "mps"})
"""Device types on which torch's fused Adam exists in every supported torch release."""


def can_fuse(tensors: list[torch.Tensor]) -> bool:
    """Whether torch's fused Adam accepts all ``tensors`` (floating point, on a device that has the kernel)."""
    return bool(tensors) and all(t.is_floating_point() and t.device.type in FUSED_DEVICES for t in tensors)


@torch.no_grad()
def adam_update_(param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    """One Adam step in the dtype of the moments, also for what torch's kernels lack (no bias correction, fp32 moments
    of a bf16 parameter).

    Args:
        param: any shape, updated in place.
        grad: same shape, any floating dtype; not changed.
        state: holds ``step`` (0-dim fp32), ``exp_avg`` and ``exp_avg_sq`` (shape of ``param``); updated in place.
        group: ``lr, betas, eps, weight_decay, bias_correction, decoupled_weight_decay``.

    Source: Kingma and Ba 2015 (Adam); Loshchilov and Hutter 2019 (decoupled decay).
    """
    beta1, beta2 = group["betas"]
    exp_avg, exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
    decay = group["weight_decay"]
    state["step"] += 1
    steps = float(state["step"])
    correct1, correct2 = (1 - beta1**steps, 1 - beta2**steps) if group["bias_correction"] else (1.0, 1.0)
    value, grad = param.to(exp_avg.dtype), grad.to(exp_avg.dtype)
    if decay and not group["decoupled_weight_decay"]:
        grad = grad.add(value, alpha=decay)
    exp_avg.lerp_(grad, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    update = exp_avg / correct1 / ((exp_avg_sq / correct2).sqrt_().add_(group["eps"]))
    if decay and group["decoupled_weight_decay"]:
        update.add_(value, alpha=decay)
    param.copy_(value.sub(update, alpha=group["lr"]))


class AdamBase(GroupStep, torch.optim.Adam):
    """Adam whose groups also know ``bias_correction``; native and torch's fused kernels do the work wherever they can.

    Raises:
        RuntimeError: ``amsgrad`` is asked for, by argument or by a parameter group.
    """

    elementwise = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        decoupled: bool = True,
        fp32_states: bool = False,
    ) -> None:
        self._settings = {"bias_correction": bias_correction, "fp32_states": fp32_states}
        if amsgrad:
            raise RuntimeError(
                f"{type(self).__name__} does not support amsgrad; use torch.optim.AdamW(amsgrad=True) or drop the flag"
            )
        beta1, beta2 = betas
        super().__init__(
            params, lr, (float(beta1), float(beta2)), eps, float(weight_decay), decoupled_weight_decay=decoupled
        )
        self.defaults.update(self._settings)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group (torch's own rules) and settle whether it runs on the fused kernel."""
        # torch's constructor adds the groups before it returns, so these two cannot be in ``defaults`` yet
        for key, value in vars(self).get("_settings", {}).items():
            param_group.setdefault(key, value)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if group["amsgrad"]:
            raise RuntimeError(
                f"{type(self).__name__} does not support amsgrad, and parameter group "
                f"{len(self.param_groups) - 1} asks for it"
            )
        if (
            group["fused"] is None
            and not group["foreach"]
            and not group["differentiable"]
            and can_fuse(group["params"])
        ):
            # foreach must be unset, not False, for torch to accept fused
            group["fused"], group["foreach"] = True, None

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore from a pickle or a state dict, also one that torch's own Adam wrote."""
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("bias_correction", True)
            group.setdefault("fp32_states", False)

    def _state_of(self, param: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        state: dict[str, Any] = self.state[param]
        if not state:
            on_device = bool(group["fused"] or group["capturable"])
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device if on_device else "cpu")
            state["exp_avg"], state["exp_avg_sq"] = new_moment(param, group), new_moment(param, group)
        return state

    def _update_group(self, params: list[torch.Tensor], grads: list[torch.Tensor], group: dict[str, Any]) -> None:
        if self._cuda_group(params, grads, group):
            return
        left = []
        for param, grad in zip(params, grads, strict=True):
            if not self._host_update(param, grad, group):
                left.append((param, grad))
        if left:
            self._torch_group([p for p, _ in left], [g for _, g in left], group)

    def _cuda_group(self, params: list[torch.Tensor], grads: list[torch.Tensor], group: dict[str, Any]) -> bool:
        """Update all tensors with the CUDA kernel; False, before anything is changed, where that does not fit."""
        if (
            not params
            or not cuda.on_cuda(params[0])
            or group["maximize"]
            or group["differentiable"]
            or group["foreach"]
        ):
            return False
        states = [self._state_of(p, group) for p in params]
        steps, firsts, seconds = ([s[name] for s in states] for name in ("step", "exp_avg", "exp_avg_sq"))
        alike = all(
            s.device == p.device and m.dtype == v.dtype
            for p, s, m, v in zip(params, steps, firsts, seconds, strict=True)
        )
        if not alike or not cuda.usable(FUSED_ADAM, itertools.chain(params, grads, firsts, seconds)):
            return False
        # GradScaler hands these over: what it multiplied the loss by, and whether a gradient overflowed
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        torch._foreach_add_(steps, 1)
        if found_inf is not None:
            torch._foreach_sub_(steps, [found_inf.to(s.device) for s in steps])
        cuda.adam_step(
            params,
            grads,
            firsts,
            seconds,
            step=steps,
            lr=group["lr"],
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            decoupled=group["decoupled_weight_decay"],
            bias_correction=group["bias_correction"],
            grad_scale=1.0 if scale is None else scale.reciprocal(),
            found_inf=found_inf,
            # where the device finds an overflow the kernel writes nothing at all
            outs=self._outputs_of(params) if found_inf is None else None,
        )
        return True

    def _host_update(self, param: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> bool:
        """Update one tensor in host memory with the native kernel; False where that does not fit."""
        asked_for_torch = group["maximize"] or group["differentiable"] or group["capturable"] or group["foreach"]
        if asked_for_torch or param.device.type != "cpu":
            return False
        state = self._state_of(param, group)
        moments = state["exp_avg"], state["exp_avg_sq"]
        if moments[0].dtype != moments[1].dtype or not host.usable(CPU_ADAM, param, grad, *moments):
            return False
        state["step"] += 1
        host.adam_step(
            param,
            grad,
            *moments,
            step=int(state["step"]),
            lr=float(group["lr"]),
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            decoupled=group["decoupled_weight_decay"],
            bias_correction=group["bias_correction"],
            out=self._output_of(param),
        )
        return True

    def _torch_group(self, params: list[torch.Tensor], grads: list[torch.Tensor], group: dict[str, Any]) -> None:
        states = [self._state_of(p, group) for p in params]
        if group["bias_correction"] and all(p.dtype == s["exp_avg"].dtype for p, s in zip(params, states, strict=True)):
            self._torch_update(group, params, grads, states)
            return
        for param, grad, state in zip(params, grads, states, strict=True):
            adam_update_(param, grad, state, group)

    def _torch_update(
        self, group: dict[str, Any], params: list[torch.Tensor], grads: list[torch.Tensor], states: list[dict[str, Any]]
    ) -> None:
        beta1, beta2 = group["betas"]
        torch_adam(
            params,
            grads,
            [s["exp_avg"] for s in states],
            [s["exp_avg_sq"] for s in states],
            [],
            [s["step"] for s in states],
            foreach=group["foreach"],
            capturable=group["capturable"],
            differentiable=group["differentiable"],
            fused=group["fused"],
            grad_scale=getattr(self, "grad_scale", None),
            found_inf=getattr(self, "found_inf", None),
            decoupled_weight_decay=group["decoupled_weight_decay"],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )
