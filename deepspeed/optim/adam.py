"""Adam and AdamW with the settings of the DeepSpeed interface: kernels in host memory and on CUDA, else torch's."""

from typing import Any

import torch
from torch.optim.adam import adam as torch_adam

from deepspeed.native.ops import CPU_ADAM, FUSED_ADAM
from deepspeed.optim import cuda, host
from deepspeed.optim.base import Group, GroupStep, Tensors

FUSED_DEVICES = frozenset({"cpu", "cuda", "xpu", "mps"})
"""Device types on which torch's fused Adam exists in every supported torch release."""


def can_fuse(tensors: Tensors) -> bool:
    """Whether torch's fused Adam accepts all ``tensors`` (floating point, on a device that has the kernel)."""
    return bool(tensors) and all(t.is_floating_point() and t.device.type in FUSED_DEVICES for t in tensors)


def moments_(grad: torch.Tensor, state: Group, group: Group) -> tuple[torch.Tensor, torch.Tensor]:
    """Count a step and take ``grad`` into both moments of ``state``; copies of them, corrected if the group says so.

    Source: Kingma and Ba 2015.
    """
    exp_avg, exp_avg_sq, (beta1, beta2) = state["exp_avg"], state["exp_avg_sq"], group["betas"]
    state["step"] += 1
    steps = float(state["step"])
    correct1, correct2 = (1 - beta1**steps, 1 - beta2**steps) if group["bias_correction"] else (1.0, 1.0)
    exp_avg.lerp_(grad, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    return exp_avg / correct1, exp_avg_sq / correct2


@torch.no_grad()
def adam_update_(param: torch.Tensor, grad: torch.Tensor, state: Group, group: Group) -> None:
    """One Adam step in the dtype of the moments, also for what torch's kernels lack (no bias correction, wide moments).

    ``param`` (any shape) and ``state`` are updated in place: ``step`` (0-dim fp32), ``exp_avg`` and ``exp_avg_sq``
    (shape of ``param``). ``grad`` has any floating dtype; ``group`` gives ``lr, betas, eps, weight_decay,
    bias_correction, decoupled_weight_decay``. Source: Loshchilov and Hutter 2019 (decoupled decay).
    """
    dtype, decay = state["exp_avg"].dtype, group["weight_decay"]
    value, grad = param.to(dtype), grad.to(dtype)
    if decay and not group["decoupled_weight_decay"]:
        grad = grad.add(value, alpha=decay)
    first, second = moments_(grad, state, group)
    update = first / second.sqrt_().add_(group["eps"])
    if decay and group["decoupled_weight_decay"]:
        update.add_(value, alpha=decay)
    param.copy_(value.sub(update, alpha=group["lr"]))


class AdamBase(GroupStep, torch.optim.Adam):
    """Adam whose groups also know ``bias_correction``; native and torch's fused kernels do the work wherever they can.

    Raises RuntimeError also for a parameter group that asks for ``amsgrad``.
    """

    elementwise = True
    fixed = {
        **GroupStep.fixed,
        **dict.fromkeys(("amsgrad", "maximize", "capturable", "differentiable"), False),
        **dict.fromkeys(("foreach", "fused")),
    }
    host_op, cuda_op = CPU_ADAM, FUSED_ADAM
    torch_keys = ("maximize", "differentiable", "foreach")

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
            **_numbers(group),
            grad_scale=1.0 if scale is None else scale.reciprocal(),
            found_inf=found_inf,
            # where the device finds an overflow the kernel writes nothing at all
            outs=[self._output_of(p) for p in params] if found_inf is None else None,
        )
        return True

    def _on_host(self, tensors: Tensors, state: Group, group: Group, out: torch.Tensor | None) -> None:
        host.adam_step(*tensors, step=int(state["step"]), **_numbers(group), out=out)

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


def _numbers(group: Group) -> Group:
    names = ("lr", "betas", "eps", "weight_decay", "bias_correction")
    return {name: group[name] for name in names} | {"decoupled": group["decoupled_weight_decay"]}
