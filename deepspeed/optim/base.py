"""What the optimizers of this package share: settings, state, and one ``step`` over the kernels that fit."""

import contextlib
import inspect
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks

from deepspeed.errors import OptimizerConfigError
from deepspeed.native.spec import OpSpec
from deepspeed.observe.hostmem import prefer_huge_pages
from deepspeed.optim import cuda, host

Group = dict[str, Any]
Tensors = list[torch.Tensor]


@dataclass
class _Outputs:
    """Where the rounded parameters of one step go; no dict, for tiled steps copy what dicts among attributes hold."""

    wanted: Mapping[torch.Tensor, torch.Tensor]
    written: set[torch.Tensor] = field(default_factory=set)


class GroupStep(torch.optim.Optimizer):
    """Updates a group by the kernels of the device it is on, where they fit, else by ``_update_rest``, with torch.

    A subclass names its state (``slots``) and its kernels, and says how to call them: ``_on_cuda`` (False where its
    kernel does not fit after all), ``_on_host`` and ``_update``.
    """

    host_only = False
    """Whether ``step`` refuses parameters that are not in host memory."""
    host_op: ClassVar[OpSpec | None] = None
    cuda_op: ClassVar[OpSpec | None] = None
    slots: tuple[str, ...] = ("step", "exp_avg", "exp_avg_sq")
    torch_keys: tuple[str, ...] = ()
    """Settings of a group that only torch's own code follows."""
    _outputs: _Outputs | None = None

    def _on_cuda(self, columns: list[Tensors], states: list[Group], group: Group) -> bool:
        raise NotImplementedError

    def _on_host(self, tensors: Tensors, state: Group, group: Group, out: torch.Tensor | None) -> None:
        raise NotImplementedError

    def _update(self, param: torch.Tensor, grad: torch.Tensor, state: Group, group: Group) -> None:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; what ``closure`` returned, or None without one.

        Raises:
            OptimizerConfigError: a sparse gradient.
            AssertionError: a host optimizer met a parameter on a device.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # everything is checked before anything changes
        for group, kinds in [(g, self._checked_params(g)) for g in self.param_groups]:
            for params in kinds:
                self._update_group(params, [p.grad for p in params if p.grad is not None], group)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002
        """Drop the gradients, or zero them where ``set_grad_none=False`` was given."""
        super().zero_grad(set_to_none=set_to_none and self.defaults.get("set_grad_none", True))

    def _checked_params(self, group: Group) -> list[Tensors]:
        """Parameters with gradients, a list for each kind of device: half of a group may rest in host memory."""
        kinds: dict[str, Tensors] = {}
        for param in group["params"]:
            if param.grad is not None:
                self._check(param, param.grad)
                kinds.setdefault(param.device.type, []).append(param)
        return list(kinds.values())

    def _check(self, param: torch.Tensor, grad: torch.Tensor) -> None:
        name, shape = type(self).__name__, tuple(param.shape)
        if grad.is_sparse:
            raise OptimizerConfigError(
                f"{name} got a sparse gradient of shape {shape}; build the embedding with sparse=False"
            )
        if self.host_only and param.device.type != "cpu":
            raise AssertionError(
                f"{name} updates tensors in host memory, but a parameter of shape {shape} is on {param.device}; "
                "offload the optimizer state or use the Fused class of the same name"
            )

    def _update_group(self, params: Tensors, grads: Tensors, group: Group) -> None:
        states = [self._state_of(p, group) for p in params]
        if not self._cuda_update(params, grads, states, group):
            rest = [row for row in zip(params, grads, states, strict=True) if not self._host_update(*row, group)]
            if rest:
                self._update_rest(rest, group)

    def _update_rest(self, rows: list[tuple[torch.Tensor, torch.Tensor, Group]], group: Group) -> None:
        for row in rows:
            self._update(*row, group)

    def _slots(self, group: Group) -> tuple[str, ...]:
        return self.slots

    def _state_of(self, param: torch.Tensor, group: Group) -> Group:
        state: Group = self.state[param]
        if not state:
            where = param.device if group.get("fused") or group.get("capturable") else "cpu"
            for name in self._slots(group):
                number = name == "step"  # in fp32, as torch's: in bf16, a client's default, it would stick at 256
                state[name] = (
                    torch.zeros((), dtype=torch.float32, device=where) if number else _new_moment(param, group)
                )
        return state

    def _wants_torch(self, group: Group) -> bool:
        return any(group.get(key) for key in self.torch_keys)

    def _moments(self, state: Group) -> Tensors:
        return [state[name] for name in self.slots if name != "step"]

    def _cuda_update(self, params: Tensors, grads: Tensors, states: list[Group], group: Group) -> bool:
        """Update all tensors with the CUDA kernel; False, before anything is changed, where that does not fit."""
        if self.cuda_op is None or not params or not cuda.on_cuda(params[0]) or self._wants_torch(group):
            return False
        columns = [params, grads, *map(list, zip(*map(self._moments, states), strict=True))]
        return cuda.usable(self.cuda_op, itertools.chain(*columns)) and self._on_cuda(columns, states, group)

    def _host_update(self, param: torch.Tensor, grad: torch.Tensor, state: Group, group: Group) -> bool:
        """Update one tensor in host memory with the native kernel; False where that does not fit."""
        if self.host_op is None or param.device.type != "cpu" or self._wants_torch(group):
            return False
        tensors = [param, grad, *self._moments(state)]
        if tensors[2].dtype != tensors[-1].dtype or not host.usable(self.host_op, *tensors):
            return False
        if "step" in state:
            state["step"] += 1
        self._on_host(tensors, state, group, self._output_of(param))
        return True

    @contextlib.contextmanager
    def writing_outputs(self, outputs: Mapping[torch.Tensor, torch.Tensor]) -> Iterator[Collection[torch.Tensor]]:
        """Inside, ``step`` may also round parameters into their ``outputs``, in the pass of the update by a kernel.

        An output counts if it is contiguous, on its parameter's device and of as many elements, in fp32, bf16 or fp16.
        Gives the parameters whose output has the new value, to be read after the step. There are none where code of the
        user's may run behind the kernels.
        """
        fits = {p: out for p, out in outputs.items() if _can_take(out, p)} if self._ends_with_the_kernels() else {}
        self._outputs = current = _Outputs(fits)
        try:
            yield current.written
        finally:
            del self._outputs

    def _ends_with_the_kernels(self) -> bool:
        """Whether no subclass, patch or hook of the user's can change a parameter between its kernel and the end."""
        hooks = vars(self).get("_optimizer_step_post_hooks") or _global_optimizer_post_hooks
        cls = type(self)
        if hooks or not cls.__module__.startswith(f"{__package__}."):
            return False
        if any(name != "step" and callable(getattr(cls, name, None)) for name in vars(self)):
            return False
        # torch wraps the method, its schedulers wrap it again on the object; every layer must be torch's
        layer: Any = getattr(self.step, "__func__", self.step)
        ours = inspect.unwrap(GroupStep.step)
        while layer is not ours:
            module = getattr(layer, "__globals__", {}).get("__name__", "")
            if not module.startswith("torch.") or not hasattr(layer, "__wrapped__"):
                return False
            layer = layer.__wrapped__
        return True

    def _output_of(self, param: torch.Tensor) -> torch.Tensor | None:
        """Where the kernel that is called next puts the rounded ``param``, which counts as written from here on."""
        out = None if self._outputs is None else self._outputs.wanted.get(param)
        if out is not None and self._outputs is not None:
            self._outputs.written.add(param)
        return out


def _can_take(out: torch.Tensor, param: torch.Tensor) -> bool:
    """Whether the kernels can write ``param``, rounded, to ``out``."""
    alike = out.numel() == param.numel() and out.device == param.device and out.is_contiguous()
    return alike and out.dtype in host.CODES


def _new_moment(param: torch.Tensor, group: Group) -> torch.Tensor:
    """State like ``param``, in fp32 for half-precision parameters when the group says ``fp32_states``."""
    low = param.dtype in (torch.bfloat16, torch.float16)
    moment = torch.empty_like(param, dtype=torch.float32 if low and group.get("fp32_states") else param.dtype)
    if type(moment) is torch.Tensor and moment.device.type == "cpu":  # a subclass may have no memory of its own
        prefer_huge_pages(moment.data_ptr(), moment.nbytes)  # the update reads every page at every step
    return moment.fill_(group.get("initial_accumulator_value", 0.0))


def checked(
    optimizer: torch.optim.Optimizer, *, betas: tuple[float, float] | None = None, **at_least_zero: float
) -> Group:
    """The settings as group defaults; OptimizerConfigError unless numbers are >= 0 and both ``betas`` lie in [0, 1)."""
    name = type(optimizer).__name__
    for key, value in at_least_zero.items():
        if not value >= 0:
            raise OptimizerConfigError(f"{name}: {key} is {value}, it must be a number >= 0")
    if betas is None:
        return at_least_zero
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise OptimizerConfigError(f"{name}: betas is {betas}, it must be two numbers in [0, 1)")
    return at_least_zero | {"betas": (float(betas[0]), float(betas[1]))}


_SLOTS = {"SGD": 1, "Adagrad": 1, "Lion": 1, "Adafactor": 0, "RMSprop": 1, "Muon": 1, "Rprop": 2}


def slot_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of state for each fp32 element beside the weight: known for common classes, else two fp32 numbers."""
    if isinstance(optimizer, torch.optim.SGD):
        return 4 if any(group.get("momentum") for group in optimizer.param_groups) else 0
    names = [cls.__name__ for cls in type(optimizer).__mro__]
    return 4 * next((count for name, count in _SLOTS.items() if name in names), 2)
