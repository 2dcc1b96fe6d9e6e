"""One step of an optimizer in several turns, each over some of its tensors."""

import itertools
import re
from collections.abc import Sequence
from typing import Any

import torch

from deepspeed.errors import UsageError
from deepspeed.zero.optim_view import OptimView, copied
from deepspeed.zero.update.apply import by_group, step_over

_TORCHS = re.compile("params|state|defaults|param_groups|_optimizer.*")  # what torch keeps in groups and optimizers


class Turns:
    """Let an optimizer take one step in several turns, each over some of its tensors.

    Every turn begins with the numbers of the groups and of the optimizer itself (a step count, say) from before the
    step, and must leave the same: UsageError for an optimizer that gathers something over all parameters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._others: set[Any] = set()  # keys of the optimizer's state that are no tensors, among the first ``_seen``
        self._seen = 0
        self._before = {"its state": {}, **{name: _numbers(holder) for name, holder in self._holders().items()}}
        self._after: dict[str, dict[Any, Any]] = {}

    def take(self, views: Sequence[OptimView]) -> None:
        """Call ``step`` over the parameters of ``views`` only; it must leave the same numbers as earlier turns."""
        lists = by_group(views, len(self._optimizer.param_groups))
        self._restore(self._before)
        step_over(self._optimizer, lists)
        idle = {f"group {i}" for i in range(len(lists))} - {f"group {v.group}" for v in views}
        for name, holder in self._holders().items():
            if name in idle:
                continue
            now = _numbers(holder)
            before = self._after.setdefault(name, now)
            if changed := [str(k) for k in now if k not in before or not same(now[k], before[k])]:
                raise UsageError(
                    f"{type(self._optimizer).__name__} keeps {', '.join(changed)} of {name} over all parameters, so it "
                    "cannot update them piece by piece, and this update was cut short; use offload_optimizer.device "
                    '"cpu" on one rank, or another optimizer'
                )
            self._after[name] = now
        self._after.setdefault("its state", {})
        self._restore(self._after)

    def _holders(self) -> dict[str, dict[Any, Any]]:
        """Return dicts that may hold numbers: groups, the optimizer's attributes, state that is no parameter's."""
        groups = {f"group {i}": group for i, group in enumerate(self._optimizer.param_groups)}
        state = self._optimizer.state
        if len(state) < self._seen:
            self._seen = 0
        new = itertools.islice(reversed(state), len(state) - self._seen)  # not all of it for every tile
        self._others.update(key for key in new if not isinstance(key, torch.Tensor))
        self._seen = len(state)
        return {**groups, "the optimizer": vars(self._optimizer), **({"its state": state} if self._others else {})}

    def _restore(self, numbers: dict[str, dict[Any, Any]]) -> None:
        for name, holder in self._holders().items():
            if name in numbers:
                _put_back(holder, numbers[name])


def _numbers(holder: dict[Any, Any], *, depth: int = 1) -> dict[Any, Any]:
    """Copy the numbers (tensors, short lists) in ``holder`` and the dicts in it, but for single tensors' own."""
    copies: dict[Any, Any] = {}
    for key, value in holder.items():
        if isinstance(key, torch.Tensor) or _TORCHS.fullmatch(str(key)):
            continue
        if isinstance(value, dict) and depth and not any(isinstance(k, torch.Tensor) for k in value):
            copies[key] = _numbers(value, depth=depth - 1)
        few = value if isinstance(value, (list, tuple)) and 0 < len(value) <= 16 else [value]
        if all(isinstance(v, (int, float, torch.Tensor)) for v in few):
            copies[key] = copied(value)
    return copies


def _put_back(holder: dict[Any, Any], numbers: dict[Any, Any], *, depth: int = 1) -> None:
    """Set the numbers of ``holder``, as deep as ``_numbers`` copied them, to the old ones: in the same tensors."""
    for key in _numbers(holder, depth=depth).keys() - numbers.keys():
        del holder[key]
    for key, value in numbers.items():
        now = holder.get(key)
        if isinstance(value, dict) and isinstance(now, dict):
            _put_back(now, value, depth=depth - 1)
        elif isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor) and now.shape == value.shape:
            now.detach().copy_(value)
        else:
            holder[key] = copied(value)


def same(a: Any, b: Any) -> bool:
    """Tell whether the numbers are equal; NaN equals NaN."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return (a.shape, a.dtype) == (b.shape, b.dtype) and bool(((a == b) | ((a != a) & (b != b))).all())
    if isinstance(a, dict) and isinstance(b, dict):
        return all(key in b and same(value, b[key]) for key, value in a.items())
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return not any(isinstance(x, torch.Tensor) for x in (a, b)) and bool(a == b or (a != a and b != b))
