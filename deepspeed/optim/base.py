"""What the optimizers of this package share: one ``step`` over groups and the check that host optimizers see host tensors."""

from collections.abc import Callable
from typing import Any

import torch

from deepspeed.errors import OptimizerConfigError


class GroupStep:
    """Mixin in front of a torch optimizer: ``step`` calls ``_update_group`` with the parameters that have a gradient."""

    host_only = False
    """Whether ``step`` refuses parameters that are not in host memory."""

    param_groups: list[dict[str, Any]]

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
        for group in self.param_groups:
            pairs = [(p, p.grad) for p in group["params"] if p.grad is not None]
            for param, grad in pairs:
                self._check(param, grad)
            self._update_group([p for p, _ in pairs], [g for _, g in pairs], group)
        return loss

    def _check(self, param: torch.Tensor, grad: torch.Tensor) -> None:
        name = type(self).__name__
        if grad.is_sparse:
            raise OptimizerConfigError(f"{name} got a sparse gradient of shape {tuple(param.shape)}; build the embedding with sparse=False")
        if self.host_only and param.device.type != "cpu":
            raise AssertionError(
                f"{name} updates tensors in host memory, but a parameter of shape {tuple(param.shape)} is on {param.device}; "
                "offload the optimizer state or use the Fused class of the same name"
            )


def moment_dtype(param: torch.Tensor, group: dict[str, Any]) -> torch.dtype:
    """Dtype of the optimizer state of ``param``: its own, or fp32 for half-precision parameters when the group says ``fp32_states``."""
    low = param.dtype in (torch.bfloat16, torch.float16)
    return torch.float32 if low and group["fp32_states"] else param.dtype


def check_ranges(name: str, *, betas: tuple[float, float] | None, **at_least_zero: float) -> None:
    """Raise ``OptimizerConfigError`` unless every keyword is >= 0 and both ``betas``, if given, lie in [0, 1)."""
    for key, value in at_least_zero.items():
        if not value >= 0:
            raise OptimizerConfigError(f"{name}: {key} is {value}, it must be a number >= 0")
    if betas is not None and (len(betas) != 2 or not all(0 <= beta < 1 for beta in betas)):
        raise OptimizerConfigError(f"{name}: betas is {betas}, it must be two numbers in [0, 1)")


_SLOTS = {"SGD": 1, "Adagrad": 1, "Lion": 1, "Adafactor": 0, "RMSprop": 1, "Muon": 1, "Rprop": 2}


def slot_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes that ``optimizer`` will keep for each fp32 element beside the weight: known for common classes, else two fp32 numbers."""
    if isinstance(optimizer, torch.optim.SGD):
        return 4 if any(group.get("momentum") for group in optimizer.param_groups) else 0
    names = [cls.__name__ for cls in type(optimizer).__mro__]
    return 4 * next((count for name, count in _SLOTS.items() if name in names), 2)
