"""Adam and AdamW with the settings of the DeepSpeed interface: kernels in host memory and on CUDA, else torch's."""

from typing import Any

import torch
from torch.optim.adam import adam as torch_adam

from deepspeed.native.ops import CPU_ADAM, FUSED_ADAM
from deepspeed.optim import cuda, host
from deepspeed.optim.base import Group, GroupStep, Tensors, checked

FUSED_DEVICES = frozenset({"cpu", "cuda", "xpu", "mps"})
"""Device types on which torch's fused Adam exists in every supported torch release."""


def can_fuse(tensors: Tensors) -> bool:
    """Whether torch's fused Adam accepts all ``tensors`` (floating point, on a device that has the kernel)."""
    return bool(tensors) and all(t.is_floating_point() and t.device.type in FUSED_DEVICES for t in tensors)


@torch.no_grad()
def adam_update_(param: torch.Tensor, grad: torch.Tensor, state: Group, group: Group) -> None:
    """One Adam step in the dtype of the moments, also for what torch's kernels lack (no bias correction, wide moments).

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
        OptimizerConfigError: a setting out of range.
        RuntimeError: a parameter group asks for ``amsgrad``.
    """

    elementwise = True
    host_op, cuda_op = CPU_ADAM, FUSED_ADAM
    torch_keys = ("maximize", "differentiable", "foreach")

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decoupled: bool = True,
        fp32_states: bool = False,
    ) -> None:
        settings = checked(self, lr=lr, betas=betas, eps=eps, weight_decay=float(weight_decay))
        settings |= dict.fromkeys(("amsgrad", "maximize", "capturable", "differentiable"), False)
        settings |= {"foreach": None, "fused": None, "decoupled_weight_decay": bool(decoupled)}
        settings |= {"bias_correction": bias_correction, "fp32_states": fp32_states}
        torch.optim.Optimizer.__init__(self, params, settings)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group (torch's own rules) and settle whether it runs on the fused kernel."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if group["amsgrad"]:
            number = len(self.param_groups) - 1
            raise RuntimeError(f"{type(self).__name__} has no amsgrad, and parameter group {number} asks for it")
        torch_way = group["fused"] is not None or group["foreach"] or group["differentiable"]
        if not torch_way and can_fuse(group["params"]):
            # foreach must be unset, not False, for torch to accept fused
            group["fused"], group["foreach"] = True, None

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore from a pickle or a state dict, also one that torch's own Adam wrote."""
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("bias_correction", True)

    def _on_cuda(self, columns: list[Tensors], states: list[Group], group: Group) -> bool:
        params, _, firsts, seconds = columns
        steps = [state["step"] for state in states]
        rows = zip(params, steps, firsts, seconds, strict=True)
        if any(s.device != p.device or m.dtype != v.dtype for p, s, m, v in rows):
            return False
        # GradScaler hands these over: what it multiplied the loss by, and whether a gradient overflowed
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        torch._foreach_add_(steps, 1)
        if found_inf is not None:
            torch._foreach_sub_(steps, [found_inf.to(s.device) for s in steps])
        cuda.adam_step(
            *columns,
            step=steps,
            **{name: group[name] for name in ("lr", "betas", "eps", "weight_decay", "bias_correction")},
            decoupled=group["decoupled_weight_decay"],
            grad_scale=1.0 if scale is None else scale.reciprocal(),
            found_inf=found_inf,
            # where the device finds an overflow the kernel writes nothing at all
            outs=[self._output_of(p) for p in params] if found_inf is None else None,
        )
        return True

    def _on_host(self, tensors: Tensors, state: Group, group: Group, out: torch.Tensor | None) -> None:
        host.adam_step(
            *tensors,
            step=int(state["step"]),
            lr=float(group["lr"]),
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            decoupled=group["decoupled_weight_decay"],
            bias_correction=group["bias_correction"],
            out=out,
        )

    def _update_rest(self, rows: list[tuple[torch.Tensor, torch.Tensor, Group]], group: Group) -> None:
        if not group["bias_correction"] or any(p.dtype != state["exp_avg"].dtype for p, _, state in rows):
            for row in rows:
                adam_update_(*row, group)
            return
        beta1, beta2 = group["betas"]
        params, grads = [param for param, _, _ in rows], [grad for _, grad, _ in rows]
        firsts, seconds, steps = ([state[name] for _, _, state in rows] for name in ("exp_avg", "exp_avg_sq", "step"))
        passed = ("foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay", "maximize")
        settings = {name: group[name] for name in (*passed, "lr", "weight_decay", "eps")}
        settings |= {name: getattr(self, name, None) for name in ("grad_scale", "found_inf")}
        torch_adam(params, grads, firsts, seconds, [], steps, amsgrad=False, beta1=beta1, beta2=beta2, **settings)
