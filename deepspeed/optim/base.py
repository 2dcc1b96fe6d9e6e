"""What the optimizers of this package share: one ``step`` over groups and the check that host optimizers see host
tensors.
"""

import contextlib
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks

from deepspeed.errors import OptimizerConfigError
from deepspeed.observe.hostmem import prefer_huge_pages


def _can_take(out: torch.Tensor, param: torch.Tensor) -> bool:
    """Whether the kernels can write ``param``, rounded, to ``out``."""
    alike = out.numel() == param.numel() and out.device == param.device and out.is_contiguous()
    return alike and out.dtype in (torch.float32, torch.bfloat16, torch.float16)


class _Outputs:
    """Tensors that take the rounded parameters of one step.

    An object of its own, because what lets an optimizer step in turns (zero/optim_tiles.py) looks into the dicts among
    its attributes.
    """

    def __init__(self, wanted: Mapping[torch.Tensor, torch.Tensor]) -> None:
        self.wanted = wanted
        self.written: set[torch.Tensor] = set()


class GroupStep:
    """Mixin in front of a torch optimizer: ``step`` calls ``_update_group`` with the parameters that have a
    gradient.
    """

    host_only = False
    """Whether ``step`` refuses parameters that are not in host memory."""

    param_groups: list[dict[str, Any]]
    _outputs: _Outputs | None = None

    def _update_group(self, params: list[torch.Tensor], grads: list[torch.Tensor], group: dict[str, Any]) -> None:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        Returns what ``closure`` returned, or None without one.

        Raises:
            OptimizerConfigError: a sparse gradient.
            AssertionError: a host optimizer met a parameter on a device.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # everything is checked before anything changes
        for group, kinds in [(g, self._checked_pairs(g)) for g in self.param_groups]:
            for pairs in kinds:
                self._update_group([p for p, _ in pairs], [g for _, g in pairs], group)
        return loss

    def _checked_pairs(self, group: dict[str, Any]) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
        """Parameters with their gradients, one list for each kind of device: half of a group may rest in host memory,
        for other kernels.
        """
        kinds: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for param in group["params"]:
            if param.grad is not None:
                self._check(param, param.grad)
                kinds.setdefault(param.device.type, []).append((param, param.grad))
        return list(kinds.values())

    @contextlib.contextmanager
    def writing_outputs(self, outputs: Mapping[torch.Tensor, torch.Tensor]) -> Iterator[Collection[torch.Tensor]]:
        """Inside, ``step`` may also round parameters into their ``outputs``: in the pass of the update, where a native
        kernel does that.

        An output counts if it is contiguous, on its parameter's device and of as many elements, in fp32, bf16 or fp16.
        Gives the parameters whose output has the new value, to be read after the step. There are none where code of the
        user's may run behind the kernels.
        """
        fits = {p: out for p, out in outputs.items() if _can_take(out, p)} if self._ends_with_the_kernels() else {}
        held = _Outputs(fits)
        self._outputs = held
        try:
            yield held.written
        finally:
            del self._outputs

    def _ends_with_the_kernels(self) -> bool:
        """Whether nothing can change a parameter between its kernel and the end of ``step``: no subclass, patch or hook
        of the user's.
        """
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
            if not getattr(layer, "__globals__", {}).get("__name__", "").startswith("torch.") or not hasattr(
                layer, "__wrapped__"
            ):
                return False
            layer = layer.__wrapped__
        return True

    def _output_of(self, param: torch.Tensor) -> torch.Tensor | None:
        """Where the kernel that is called next, and is known to fit, puts the rounded ``param``; it counts as written
        from here on.
        """
        out = None if self._outputs is None else self._outputs.wanted.get(param)
        if out is not None and self._outputs is not None:
            self._outputs.written.add(param)
        return out

    def _outputs_of(self, params: Sequence[torch.Tensor]) -> list[torch.Tensor | None] | None:
        """:meth:`_output_of` for each of ``params``; None where no output is wanted at all."""
        return None if self._outputs is None else [self._output_of(p) for p in params]

    def _check(self, param: torch.Tensor, grad: torch.Tensor) -> None:
        name = type(self).__name__
        if grad.is_sparse:
            raise OptimizerConfigError(
                f"{name} got a sparse gradient of shape {tuple(param.shape)}; build the embedding with sparse=False"
            )
        if self.host_only and param.device.type != "cpu":
            raise AssertionError(
                f"{name} updates tensors in host memory, but a parameter of shape {tuple(param.shape)} is on "
                f"{param.device}; "
                "offload the optimizer state or use the Fused class of the same name"
            )


def new_moment(param: torch.Tensor, group: dict[str, Any], fill: float = 0.0) -> torch.Tensor:
    """State like ``param``, all ``fill``: in its dtype, or in fp32 for half-precision parameters when the group says
    ``fp32_states``.
    """
    low = param.dtype in (torch.bfloat16, torch.float16)
    moment = torch.empty_like(param, dtype=torch.float32 if low and group["fp32_states"] else param.dtype)
    if type(moment) is torch.Tensor and moment.device.type == "cpu":  # a subclass may have no memory of its own
        prefer_huge_pages(moment.data_ptr(), moment.nbytes)  # the update reads every page at every step
    return moment.fill_(fill)


def check_ranges(name: str, *, betas: tuple[float, float] | None, **at_least_zero: float) -> None:
    """Raise ``OptimizerConfigError`` unless every keyword is >= 0 and both ``betas``, if given, lie in [0, 1)."""
    for key, value in at_least_zero.items():
        if not value >= 0:
            raise OptimizerConfigError(f"{name}: {key} is {value}, it must be a number >= 0")
    if betas is not None and (len(betas) != 2 or not all(0 <= beta < 1 for beta in betas)):
        raise OptimizerConfigError(f"{name}: betas is {betas}, it must be two numbers in [0, 1)")


_SLOTS = {"SGD": 1, "Adagrad": 1, "Lion": 1, "Adafactor": 0, "RMSprop": 1, "Muon": 1, "Rprop": 2}


def slot_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes that ``optimizer`` will keep for each fp32 element beside the weight: known for common classes, else two
    fp32 numbers.
    """
    if isinstance(optimizer, torch.optim.SGD):
        return 4 if any(group.get("momentum") for group in optimizer.param_groups) else 0
    names = [cls.__name__ for cls in type(optimizer).__mro__]
    return 4 * next((count for name, count in _SLOTS.items() if name in names), 2)
