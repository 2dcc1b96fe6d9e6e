"""What the optimizers of this package share: settings, state, and one ``step`` over the kernels that fit."""

import contextlib
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from inspect import Parameter, Signature
from typing import Any, ClassVar

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from deepspeed.accelerator.native.spec import OpSpec
from deepspeed.errors import OptimizerConfigError
from deepspeed.monitor.hostmem import prefer_huge_pages
from deepspeed.optim import cuda, host
from deepspeed.optim.host import Scalar

Group = dict[str, Any]
Tensors = list[torch.Tensor]
_Row = tuple[torch.Tensor, torch.Tensor, Group]  # parameter, gradient, state

_OUR_NAMES = dict.fromkeys(("adam_w_mode", "adamw_mode"), "decoupled_weight_decay")
_OUR_NAMES["fp32_optimizer_states"] = "fp32_states"


def constructor(
    first: str, settings: Group, build: Callable[[Any, Any, Group], None], *, unused: tuple[str, ...] = ()
) -> Callable[..., None]:
    """Make an ``__init__`` that takes ``first`` and the keys of ``settings``, by place or name, for ``build``. The
    values of ``settings`` are the defaults; ``...``: there is none. ``unused`` keywords mean nothing.
    """
    kind, empty = Parameter.POSITIONAL_OR_KEYWORD, Parameter.empty
    options = [Parameter(key, kind, default=empty if value is ... else value) for key, value in settings.items()]
    ignored = [Parameter(key, Parameter.KEYWORD_ONLY, default=None) for key in unused]
    signature = Signature([Parameter("self", kind), Parameter(first, kind), *options, *ignored])

    def initialize(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        build(args[0], given.arguments[first], {key: given.arguments[key] for key in settings})

    initialize.__signature__ = signature  # type: ignore[attr-defined]
    return initialize


class GroupStep(torch.optim.Optimizer):
    """Update a group by the kernels of the device it is on, where they fit, else by ``_update_rest``, with torch. A
    subclass names its ``keywords`` with their defaults, its state (``slots``) and its kernels, and says how to call
    them: ``_on_cuda`` (False, and nothing changed, where its kernel does not fit after all), ``_on_host`` and
    ``_update``. Raise OptimizerConfigError for a setting out of range, RuntimeError for ``amsgrad``.
    """

    keywords: ClassVar[Group]
    unused: ClassVar[tuple[str, ...]] = ()  # keywords that clients pass and that mean nothing
    fixed: ClassVar[Group] = {"fp32_states": False}  # settings of a group that no keyword gives
    host_only = False  # whether ``step`` refuses parameters that are not in host memory
    host_op: ClassVar[OpSpec | None] = None
    cuda_op: ClassVar[OpSpec | None] = None
    sparse = False  # whether zeros for the rows that a sparse gradient leaves out change nothing
    slots: tuple[str, ...] = ("step", "exp_avg", "exp_avg_sq")
    torch_keys: tuple[str, ...] = ()  # settings of a group that only torch's own code follows
    _on_cuda: Callable[[list[Tensors], list[Group], Group], bool]
    _on_host: Callable[[Tensors, Group, Group, torch.Tensor | None], None]
    _update: Callable[[torch.Tensor, torch.Tensor, Group, Group], None]
    host_cores = 1.0  # the share of torch's threads that host kernels take
    heeds_skip = False  # whether ``_on_cuda`` leaves everything as it is where ``self._skip`` is not 0
    # where the rounded parameters of one step go, those that went there, and what gradients are to be multiplied by
    _outputs: tuple[Mapping[torch.Tensor, torch.Tensor], set[torch.Tensor], Mapping[torch.Tensor, Scalar]] | None = None
    before_looking: Callable[[], None] | None = None  # an engine's: until the state of an update under way is there
    _skip: torch.Tensor | None = None  # a number on the device: where it is not 0 the step changes nothing

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "keywords" in vars(cls):
            first = "model_params" if cls.host_only else "params"
            cls.__init__ = constructor(first, cls.keywords, cls._build, unused=cls.unused)  # type: ignore[method-assign]

    def _settled(self) -> Group:
        if self.before_looking is not None:
            self.before_looking()
        return vars(self)

    state: Any = property(lambda self: self._settled()["state"], lambda self, new: self._settled().update(state=new))

    def _build(self, params: Any, settings: Group) -> None:
        name = type(self).__name__
        if settings.pop("amsgrad", False):
            raise RuntimeError(f"{name} does not support amsgrad; use torch.optim.AdamW(amsgrad=True) or drop the flag")
        set_grad_none = settings.pop("set_grad_none", None)
        numbers = {key: value for key, value in settings.items() if type(self.keywords[key]) in (int, float)}
        settings |= checked(self, betas=settings.get("betas"), **numbers)
        ours = {_OUR_NAMES.get(key, key): value for key, value in settings.items()}
        torch.optim.Optimizer.__init__(self, params, self.fixed | ours)
        if set_grad_none is not None:
            self.defaults["set_grad_none"] = set_grad_none

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; return the result of ``closure``, or None without one. Raise
        OptimizerConfigError for a sparse gradient that would move other rows, AssertionError on a wrong device.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.update(self.param_groups)
        return loss

    @torch.no_grad()
    def update(self, groups: list[Group]) -> None:
        """Update ``groups`` as ``step`` updates the optimizer's own groups."""
        # everything is checked before anything changes
        for group, kinds in [(g, self._checked_params(g)) for g in groups if g["params"]]:
            for params in kinds:
                grads = [p.grad.to_dense() if p.grad.is_sparse else p.grad for p in params if p.grad is not None]
                self._update_group(params, grads, group)

    def load_kernels(self) -> None:
        """Build and load the kernels of the devices that parameters are on, which else the first ``step`` does."""
        params = [p for group in self.param_groups for p in group["params"]]
        if self.host_op is not None and any(p.device.type == "cpu" for p in params):
            host.usable(self.host_op)
        if self.cuda_op is not None and any(cuda.on_cuda(p) for p in params):
            cuda.usable(self.cuda_op, ())

    def add_param_group(self, param_group: Group) -> None:
        """Add a group without torch's guard against tracing, which imports a compiler: 90 MiB and seconds of a rank."""
        inspect.unwrap(torch.optim.Optimizer.add_param_group)(self, param_group)

    def __setstate__(self, state: Group) -> None:
        """Restore from a pickle or a state dict; settings that its groups (torch's, say) lack stay as they are."""
        for group, before in zip(state["param_groups"], vars(self).get("param_groups", ()), strict=False):
            group.update(before | group)
        super().__setstate__(state)

    def load_state_dict(self, state_dict: Group) -> None:
        """Load as torch does, but moments in fp32 where a group says ``fp32_states``: torch rounds them."""
        super().load_state_dict(state_dict)
        for ours, theirs in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for param, number in zip(ours["params"], theirs["params"], strict=True):
                if param.itemsize == 2 and ours.get("fp32_states"):
                    saved = state_dict["state"].get(number, {})
                    for key in saved.keys() & set(self.slots) - {"step"}:
                        self.state[param][key] = saved[key].to(param.device, torch.float32, copy=True)

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002
        """Drop the gradients, or zero them where ``set_grad_none=False`` was given."""
        super().zero_grad(set_to_none=set_to_none and self.defaults.get("set_grad_none", True))

    def _checked_params(self, group: Group) -> list[Tensors]:
        """Group parameters with gradients by kind of device and scale of gradients: a kernel takes one of each."""
        name, kinds = type(self).__name__, dict[tuple[str, int], Tensors]()
        for param in (p for p in group["params"] if p.grad is not None):
            if param.grad.is_sparse and not (self.sparse and group["eps"] and not group["weight_decay"]):
                fault = f"a sparse gradient of shape {tuple(param.shape)}"
                hint = "build the embedding with sparse=False, or use Adagrad without weight_decay"
                raise OptimizerConfigError(f"{name} got {fault}; {hint}")
            if self.host_only and param.device.type != "cpu":
                fault = f"a parameter of shape {tuple(param.shape)} is on {param.device}"
                hint = "offload the optimizer state or use the Fused class of the same name"
                raise AssertionError(f"{name} updates tensors in host memory, but {fault}; {hint}")
            kinds.setdefault((param.device.type, id(self._scale_of(param))), []).append(param)
        return list(kinds.values())

    def _update_group(self, params: Tensors, grads: Tensors, group: Group) -> None:
        states = [self._state_of(p, group) for p in params]
        rest = list(zip(params, grads, states, strict=True))
        ours = not any(group.get(key) for key in self.torch_keys)
        if ours and self.cuda_op is not None and cuda.on_cuda(params[0]):
            columns = [params, grads, *map(list, zip(*map(self._moments, states), strict=True))]
            if cuda.usable(self.cuda_op, columns) and self._on_cuda(columns, states, group):
                return
        if self._skip is not None and self._skip.item():  # read where no kernel heeds it
            return
        if ours:
            rest = [row for row in rest if not self._host_update(*row, group)]
        if rest:
            self._update_rest([(p, self._scaled(p, grad), state) for p, grad, state in rest], group)

    def _update_rest(self, rows: list[_Row], group: Group) -> None:
        for row in rows:
            self._update(*row, group)

    def _slots(self, group: Group) -> tuple[str, ...]:
        return self.slots

    def _state_of(self, param: torch.Tensor, group: Group) -> Group:
        state: Group = vars(self)["state"][param]  # not by its door, at which an update waits for itself
        if not state:
            where = param.device if group.get("fused") or group.get("capturable") else "cpu"
            for name in self._slots(group):
                # the number in fp32, as torch's: in bf16, a client's default, it would stick at 256
                new = torch.zeros((), dtype=torch.float32, device=where) if name == "step" else _moment(param, group)
                state[name] = new
        return state

    def _moments(self, state: Group) -> Tensors:
        return [state[name] for name in self.slots if name != "step"]

    def _host_update(self, param: torch.Tensor, grad: torch.Tensor, state: Group, group: Group) -> bool:
        """Update one tensor in host memory with the native kernel; False where that does not fit."""
        if self.host_op is None or param.device.type != "cpu":
            return False
        tensors = [param, grad, *self._moments(state)]
        if tensors[2].dtype != tensors[-1].dtype or not host.usable(self.host_op, *tensors):
            return False
        if "step" in state:
            state["step"] += 1
        self._on_host(tensors, state, group, self._output_of(param))
        return True

    def _scale_of(self, param: torch.Tensor) -> Any:
        """Return the factor by which the gradient of ``param`` is still to be multiplied."""
        return 1.0 if self._outputs is None else self._outputs[2].get(param, 1.0)

    def _scaled(self, param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        if self._outputs is None or param not in self._outputs[2]:
            return grad
        grad = grad.to(param.dtype)
        scale = self._scale_of(param)
        return grad if isinstance(scale, float) and scale == 1.0 else grad.mul_(scale)

    def undisturbed(self) -> bool:
        """Return whether no code of the user's runs in a step, or can tell one call from several."""
        hooks = vars(self).get("_optimizer_step_pre_hooks") or _global_optimizer_pre_hooks
        return not hooks and self._ends_with_the_kernels()

    def scales_on_host(self) -> bool:
        """Return whether host kernels multiply gradients of any of their dtypes by ``writing_outputs``'s ``scales``."""
        return self.host_op is not None and host.usable(self.host_op) and self.undisturbed()

    def skips_alone(self) -> bool:
        """Return whether the device can skip a step (``skip`` of ``writing_outputs``) without anybody's notice."""
        return self.heeds_skip and self._ends_with_the_kernels()

    @contextlib.contextmanager
    def writing_outputs(
        self,
        outputs: Mapping[torch.Tensor, torch.Tensor],
        *,
        skip: torch.Tensor | None = None,
        scales: Mapping[torch.Tensor, Scalar] | None = None,
        undisturbed: bool = False,
    ) -> Iterator[Collection[torch.Tensor]]:
        """Let ``step`` inside also round parameters into their ``outputs``, in the pass of the update by a kernel. An
        output counts if it is contiguous, on its parameter's device and of as many elements, in fp32, bf16 or fp16.
        Yield the parameters whose output has the new value after the step: none where the user's code may run behind
        the kernels. ``skip``, one fp32 number on the device: where it is not 0 the step changes nothing, and
        outputs, which must have held the old values, still do. ``scales``: factors of the gradients of some parameters,
        which may be of 16 bits then: a number, or for all parameters on a device the same tensor there.
        ``undisturbed``: nothing of the user's runs, as the caller knows.
        """
        written: set[torch.Tensor] = set()
        pairs = outputs.items() if undisturbed or (outputs and self._ends_with_the_kernels()) else ()
        alike = {p: o for p, o in pairs if o.numel() == p.numel() and o.device == p.device and host.fits(o)}
        self._outputs = (alike, written, scales or {})  # no dict: tiled steps copy what dicts among attributes hold
        self._skip = skip
        try:
            yield written
        finally:
            del self._outputs, self._skip

    @contextlib.contextmanager
    def behind_kernels(self, call: Callable[[], None]) -> Iterator[None]:
        """Let ``step`` inside make that ``call`` behind its kernels, before the hooks of others."""
        handle = self.register_step_post_hook(lambda *_: call())
        vars(self)["_optimizer_step_post_hooks"].move_to_end(handle.id, last=False)
        try:
            yield
        finally:
            handle.remove()

    def _ends_with_the_kernels(self) -> bool:
        """Return whether no subclass, patch or hook of the user's can change a parameter after its kernel in a step."""
        cls, hooks = type(self), vars(self).get("_optimizer_step_post_hooks") or _global_optimizer_post_hooks
        patched = any(name != "step" and callable(getattr(cls, name, None)) for name in vars(self))
        if hooks or patched or not cls.__module__.startswith(f"{__package__}."):
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
        """Return the output for the rounded ``param`` of the next kernel call, from here on counted as written."""
        wanted, written, _ = self._outputs or ({}, set(), {})
        if (out := wanted.get(param)) is not None:
            written.add(param)
        return out


def _moment(param: torch.Tensor, group: Group) -> torch.Tensor:
    """Make state like ``param``, in fp32 for half-precision parameters when the group says ``fp32_states``."""
    low = param.dtype in (torch.bfloat16, torch.float16)
    moment = torch.empty_like(param, dtype=torch.float32 if low and group.get("fp32_states") else param.dtype)
    if type(moment) is torch.Tensor and moment.device.type == "cpu":  # a subclass may have no memory of its own
        prefer_huge_pages(moment.data_ptr(), moment.nbytes)  # the update reads every page at every step
    return moment.fill_(group.get("initial_accumulator_value", 0.0))


def checked(
    optimizer: torch.optim.Optimizer, *, betas: tuple[float, float] | None = None, **at_least_zero: float
) -> Group:
    """Return the settings as group defaults; raise OptimizerConfigError unless all are >= 0 and ``betas`` in [0, 1)."""
    name = type(optimizer).__name__
    for key, value in at_least_zero.items():
        if not value >= 0:
            raise OptimizerConfigError(f"{name}: {key} is {value}, it must be a number >= 0")
    settings = {key: float(value) if type(value) is int else value for key, value in at_least_zero.items()}
    if betas is None:
        return settings
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise OptimizerConfigError(f"{name}: betas is {betas}, it must be two numbers in [0, 1)")
    return settings | {"betas": (float(betas[0]), float(betas[1]))}


_SLOTS = {"SGD": 1, "Adagrad": 1, "Lion": 1, "Adafactor": 0, "RMSprop": 1, "Muon": 1, "Rprop": 2}


def slot_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return bytes of state per fp32 element beside the weight: known for common classes, else two fp32 numbers."""
    if isinstance(optimizer, torch.optim.SGD):
        return 4 if any(group.get("momentum") for group in optimizer.param_groups) else 0
    names = [cls.__name__ for cls in type(optimizer).__mro__]
    return 4 * next((count for name, count in _SLOTS.items() if name in names), 2)
