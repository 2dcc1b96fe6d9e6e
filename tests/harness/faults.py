"""Fault injection: raise in a named module, poison a gradient, delay a rank, each at one step on one rank."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


@contextlib.contextmanager
def modules_replaced(stand_ins: Mapping[str, Any]) -> Iterator[None]:
    """Imports of these names find ``stand_ins``; None is a package that is not there.

    Only these names are put back: ``mock.patch.dict(sys.modules)`` also forgets what was first imported meanwhile, and
    whoever imports that again gets a second copy of the module.
    """
    before = {name: sys.modules[name] for name in stand_ins if name in sys.modules}
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name in stand_ins:
            sys.modules.pop(name, None)
        sys.modules.update(before)


@contextlib.contextmanager
def no_room(count: int) -> Iterator[None]:
    """The ``count``-th full buffer finds no memory, as on a device that has no more."""
    real, left = torch.UntypedStorage.resize_, [count]

    def resize(self: torch.UntypedStorage, size: int) -> Any:
        left[0] -= size > 0
        if left[0] == 0 and size:
            raise torch.OutOfMemoryError("injected: out of memory")
        return real(self, size)

    with patch.object(torch.UntypedStorage, "resize_", resize):
        yield


def raise_planted(*_: object, **__: object) -> None:
    """Raise, as a hook or in place of a function."""
    raise ZeroDivisionError("planted")


class InjectedFault(RuntimeError):
    """The error that :meth:`Faults.raise_in` raises; no library code raises it."""


class Faults:
    """The faults armed on one model; the test sets :attr:`step` and leaves the context to disarm everything."""

    def __init__(self, model: nn.Module, *, rank: int) -> None:
        self.model = model
        self.rank = rank
        self.step = 0
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> "Faults":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def raise_in(self, module_name: str, *, phase: str, step: int, rank: int) -> None:
        """Raise in the ``phase`` ("forward" or "backward") of the module of that name."""
        module = self.model.get_submodule(module_name)
        message = f"injected fault in the {phase} of {module_name!r}, rank {rank}, step {step}"

        def fail(_: object = None) -> None:
            if self._here(step, rank):
                raise InjectedFault(message)

        if phase == "forward":
            self._handles.append(module.register_forward_pre_hook(lambda _module, _args: fail()))
        else:
            self._handles.append(module.register_forward_hook(self._on_output_gradient(fail)))

    def nan_gradient(self, parameter_name: str, *, step: int, rank: int, value: float = float("nan")) -> None:
        """Replace the gradient of the named parameter by ``value`` before it is accumulated."""
        parameter = self.model.get_parameter(parameter_name)

        def poison(grad: Tensor) -> Tensor:
            return torch.full_like(grad, value) if self._here(step, rank) else grad

        self._handles.append(parameter.register_hook(poison))

    def delay(self, module_name: str, *, seconds: float, rank: int, step: int | None = None) -> None:
        """Sleep before the forward of the named module, in one step or (``step=None``) in all of them."""

        def sleep(_module: nn.Module, _args: object) -> None:
            if self._here(self.step if step is None else step, rank):
                time.sleep(seconds)

        self._handles.append(self.model.get_submodule(module_name).register_forward_pre_hook(sleep))

    def _here(self, step: int, rank: int) -> bool:
        return step == self.step and rank == self.rank

    @staticmethod
    def _on_output_gradient(act: Callable[[object], None]) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: object, output: Any) -> None:
            tensors = output if isinstance(output, (tuple, list)) else [output]
            for tensor in tensors:
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(act)

        return hook
