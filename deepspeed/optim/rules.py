"""Adam, Adagrad, LAMB and Lion: which kernels there are, how they are called, and the same with torch; and, as one
table of signatures, the classes that clients import by name.
"""

from typing import Any, TypeVar

import torch
from torch.optim.adam import adam as torch_adam

from deepspeed.accelerator.native.spec import CPU_ADAGRAD, CPU_ADAM, CPU_LION, FUSED_ADAM, FUSED_LAMB, FUSED_LION
from deepspeed.errors import OptimizerConfigError
from deepspeed.optim import cuda, host
from deepspeed.optim.base import Group, GroupStep, Tensors


def can_fuse(tensors: Tensors) -> bool:
    """Return whether torch's fused Adam takes ``tensors``: floating point, on a device that has it in every torch."""
    device_types = ("cpu", "cuda", "xpu", "mps")
    return bool(tensors) and all(t.is_floating_point() and t.device.type in device_types for t in tensors)


def moments_(grad: torch.Tensor, state: Group, group: Group) -> tuple[torch.Tensor, torch.Tensor]:
    """Count a step, take ``grad`` into both moments; return copies, bias-corrected if asked (Kingma and Ba 2015)."""
    exp_avg, exp_avg_sq, (beta1, beta2) = state["exp_avg"], state["exp_avg_sq"], group["betas"]
    state["step"] += 1
    steps = float(state["step"])
    correct1, correct2 = (1 - beta1**steps, 1 - beta2**steps) if group["bias_correction"] else (1.0, 1.0)
    exp_avg.lerp_(grad, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    return exp_avg / correct1, exp_avg_sq / correct2


@torch.no_grad()
def adam_update_(param: torch.Tensor, grad: torch.Tensor, state: Group, group: Group) -> None:
    """Make an Adam step in the moments' dtype, also for what torch's kernels lack (no bias correction, wide moments).
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
    fixed = GroupStep.fixed | dict.fromkeys(("amsgrad", "maximize", "capturable", "differentiable"), False)
    fixed |= dict.fromkeys(("foreach", "fused"))
    host_op, cuda_op, heeds_skip = CPU_ADAM, FUSED_ADAM, True
    torch_keys = ("maximize", "differentiable", "foreach")
    _update = staticmethod(adam_update_)
    adam_w_mode = adamw_mode = property(lambda self: self.defaults["decoupled_weight_decay"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group (torch's own rules) and settle whether it runs on the fused kernel."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if group["amsgrad"]:
            number = len(self.param_groups) - 1
            raise RuntimeError(f"{type(self).__name__} has no amsgrad, and parameter group {number} asks for it")
        torch_way = group["fused"] is not None or group["foreach"] or group["differentiable"]
        if not torch_way and can_fuse(group["params"]):
            group["fused"], group["foreach"] = True, None  # not False: torch would refuse fused

    def _on_cuda(self, columns: list[Tensors], states: list[Group], group: Group) -> bool:
        params, _, firsts, seconds = columns
        steps = [state["step"] for state in states]
        rows = zip(params, steps, firsts, seconds, strict=True)
        if any(s.device != p.device or m.dtype != v.dtype for p, s, m, v in rows):
            return False
        # GradScaler hands these over: what it multiplied the loss by, and whether a gradient overflowed
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        skip = self._skip if found_inf is None else found_inf
        torch._foreach_add_(steps, 1)
        if skip is not None:
            torch._foreach_sub_(steps, [skip.to(s.device) for s in steps])
        cuda.adam_step(
            *columns,
            step=steps,
            **_numbers(group),
            grad_scale=self._scale_of(params[0]) if scale is None else scale.reciprocal(),
            found_inf=skip,
            # where GradScaler finds an overflow nobody knows what the outputs hold, and the kernel writes nothing
            outs=[self._output_of(p) for p in params] if found_inf is None else None,
        )
        return True

    def _on_host(self, tensors: Tensors, state: Group, group: Group, out: torch.Tensor | None) -> None:
        settings = _numbers(group) | {"grad_scale": self._scale_of(tensors[0]), "cores": self.host_cores}
        host.adam_step(*tensors, step=int(state["step"]), **settings, out=out)

    def update_beside(
        self, tensors: Tensors, state: Group, group: Group, *, scale: float, out: torch.Tensor | None, new: Tensors
    ) -> None:
        """Compute the host kernel's update of ``tensors``, weights and gradient (times ``scale``), into ``new``,
        weights and moments, and rounded into ``out``: all else, ``state`` too, stays as it is. All are fp32 but
        gradient and ``out``.
        """
        settings = _numbers(group) | {"grad_scale": scale, "cores": self.host_cores}
        moments = state["exp_avg"], state["exp_avg_sq"]
        host.adam_step(*tensors, *moments, step=int(state["step"]) + 1, **settings, out=out, beside=new)

    def _update_rest(self, rows: list[tuple[torch.Tensor, torch.Tensor, Group]], group: Group) -> None:
        if not group["bias_correction"] or any(p.dtype != state["exp_avg"].dtype for p, _, state in rows):
            return super()._update_rest(rows, group)
        beta1, beta2 = group["betas"]
        params, grads = [param for param, _, _ in rows], [grad for _, grad, _ in rows]
        firsts, seconds, steps = ([state[name] for _, _, state in rows] for name in ("exp_avg", "exp_avg_sq", "step"))
        passed = ("foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay", "maximize")
        settings = {name: group[name] for name in (*passed, "lr", "weight_decay", "eps")}
        settings |= {name: getattr(self, name, None) for name in ("grad_scale", "found_inf")}
        # torch's fused kernels take tensors as they lie in memory: on the CPU without a look at their strides
        alike = all(t.stride() == p.stride() for p, grad, state in rows for t in (grad, *self._moments(state)))
        settings["fused"] = group["fused"] and alike
        torch_adam(params, grads, firsts, seconds, [], steps, amsgrad=False, beta1=beta1, beta2=beta2, **settings)


def _numbers(group: Group) -> Group:
    names = ("lr", "betas", "eps", "weight_decay", "bias_correction")
    return {name: group[name] for name in names} | {"decoupled": group["decoupled_weight_decay"]}


class Adagrad(GroupStep):
    """``g <- g + wd*p; s <- s + g*g; p <- p - lr/(1 + (t-1)*lr_decay) * g / (sqrt(s) + eps)`` (Duchi et al. 2011).

    torch's class allocates a full accumulator for every parameter in its constructor, which a sharded model
    cannot afford; the state keys (``step``, ``sum``) and the arithmetic are the same.
    """

    keywords = {"lr": 1e-2, "lr_decay": 0.0, "weight_decay": 0.0, "initial_accumulator_value": 0.0, "eps": 1e-10}
    fixed = {**GroupStep.fixed, "lr_decay": 0.0, "initial_accumulator_value": 0.0}
    elementwise = True
    host_op = CPU_ADAGRAD
    sparse = True
    slots = ("step", "sum")

    def _rate(self, state: Group, group: Group) -> float:
        return float(group["lr"]) / (1 + (float(state["step"]) - 1) * float(group["lr_decay"]))

    def _on_host(self, tensors: Tensors, state: Group, group: Group, out: torch.Tensor | None) -> None:
        settings = {"rate": self._rate(state, group), "weight_decay": group["weight_decay"], "eps": group["eps"]}
        host.adagrad_step(*tensors, **settings, grad_scale=self._scale_of(tensors[0]), out=out)

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
    host_op, cuda_op, heeds_skip = CPU_LION, FUSED_LION, True
    slots = ("exp_avg",)

    def _on_cuda(self, columns: list[Tensors], states: list[Group], group: Group) -> bool:
        settings = {name: group[name] for name in Lion.keywords} | {"grad_scale": self._scale_of(columns[0][0])}
        cuda.lion_step(*columns, **settings, found_inf=self._skip, outs=[self._output_of(p) for p in columns[0]])
        return True

    def _on_host(self, tensors: Tensors, state: Group, group: Group, out: torch.Tensor | None) -> None:
        settings = {name: group[name] for name in Lion.keywords}
        host.lion_step(*tensors, **settings, grad_scale=self._scale_of(tensors[0]), out=out)

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

    keywords = {
        **{"lr": 1e-3, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-8, "eps_inside_sqrt": False},
        **{"weight_decay": 0.0, "max_coeff": 10.0, "min_coeff": 0.01},
    }
    fixed = {}
    elementwise = False
    cuda_op = FUSED_LAMB
    _ratios: dict[torch.Tensor, torch.Tensor]

    def _build(self, params: Any, settings: Group) -> None:
        name, low, high = type(self).__name__, settings["min_coeff"], settings["max_coeff"]
        if (norm := settings.pop("max_grad_norm", 0.0)) > 0:
            fault = f"max_grad_norm {norm} is not applied here"
            raise OptimizerConfigError(f"{name}: {fault}; set gradient_clipping in the config")
        if not low <= high:
            raise OptimizerConfigError(f"{name}: min_coeff {low} is above max_coeff {high}; exchange them")
        super()._build(params, settings)

    def get_lamb_coeffs(self) -> list[float]:
        """Return the last step's trust ratios, one per updated parameter in group order; empty before any step."""
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
        numbers = {name: group[name] for name in Lamb.keywords} | {"grad_scale": self._scale_of(columns[0][0])}
        outs = [self._output_of(p) for p in columns[0]]
        self._remember(columns[0], cuda.lamb_step(*columns, step=number, **numbers, outs=outs))
        return True

    def _update(self, param: torch.Tensor, grad: torch.Tensor, state: Group, group: Group) -> None:
        first, second = moments_(grad.to(state["exp_avg"].dtype), state, group)
        divisor = second.add_(group["eps"]).sqrt_() if group["eps_inside_sqrt"] else second.sqrt_().add_(group["eps"])
        update = first.div_(divisor).add_(param, alpha=group["weight_decay"])
        weight_norm, update_norm = torch.linalg.vector_norm(param), torch.linalg.vector_norm(update)
        # torch.where keeps the decision on the device; reading the norms here would stall it once per parameter
        clamped = (weight_norm / update_norm).clamp(group["min_coeff"], group["max_coeff"])
        ratio = torch.where((weight_norm > 0) & (update_norm > 0), clamped, 1.0)
        param.sub_(update.mul_(ratio), alpha=group["lr"])
        self._remember([param], [ratio])


_Kind = TypeVar("_Kind", bound=GroupStep)
_ADAM = {"lr": 1e-3, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-8}
_LION = {"lr": 1e-3, "betas": (0.9, 0.999)}
_HOST, _PLAIN = {"fp32_optimizer_states": True}, {"weight_decay": 0, "amsgrad": False}
_FUSED = {"adam_w_mode": True, "weight_decay": 0.0, "amsgrad": False, "set_grad_none": True}
_LAMB = {"eps_inside_sqrt": False, "weight_decay": 0.0, "max_grad_norm": 0.0, "max_coeff": 10.0, "min_coeff": 0.01}


def _client(name: str, base: type[_Kind], keywords: Group, *, unused: tuple[str, ...] = ()) -> type[_Kind]:
    """Make a class of the client interface; ``unused`` are keywords that clients pass and that mean nothing here."""
    on_host = name.startswith("DeepSpeedCPU")
    place = "on host tensors" if on_host else "for the device the parameters are on"
    text = f"{base.__name__.removesuffix('Base')} {place}, with the signature that clients know."
    members = {"__doc__": text, "__module__": __name__, "host_only": on_host, "keywords": keywords, "unused": unused}
    return type(name, (base,), members)


FusedAdam = _client("FusedAdam", AdamBase, _ADAM | _FUSED)
DeepSpeedCPUAdam = _client("DeepSpeedCPUAdam", AdamBase, _ADAM | _PLAIN | {"adamw_mode": True} | _HOST)
_ADAGRAD = {"lr": 1e-2, "eps": 1e-10} | _PLAIN | _HOST
DeepSpeedCPUAdagrad = _client("DeepSpeedCPUAdagrad", Adagrad, _ADAGRAD, unused=("adamw_mode",))
FusedLion = _client("FusedLion", Lion, _LION | {"weight_decay": 0.0, "set_grad_none": True})
DeepSpeedCPULion = _client("DeepSpeedCPULion", Lion, _LION | {"weight_decay": 0} | _HOST, unused=("adamw_mode",))
FusedLamb = _client("FusedLamb", Lamb, _ADAM | _LAMB | {"amsgrad": False})
