"""The optimizer object that ``initialize`` returns: the client's optimizer inside, the engine's update behind
``step``.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NoReturn, Protocol

import torch
from torch import nn

from deepspeed.errors import UsageError
from deepspeed.zero.hooks import ModuleHooks
from deepspeed.zero.optim_tiles import OptimTiles
from deepspeed.zero.optim_view import OptimView
from deepspeed.zero.runtime import Runtime


class Driver(Protocol):
    """What the wrapper needs from the engine."""

    runtime: Runtime
    tiles: OptimTiles | None

    def attached(
        self, view: OptimView, *, write: bool = False, publish: bool = False
    ) -> AbstractContextManager[None]: ...

    def whole_state(self) -> AbstractContextManager[None]: ...

    def update(self) -> None: ...

    def offload_states(
        self, include: Any = None, device: Any = "cpu", pin_memory: bool = True, non_blocking: bool = False
    ) -> None: ...

    def reload_states(self, non_blocking: bool = False) -> None: ...

    def backward(self, loss: torch.Tensor, *, retain_graph: bool = False) -> torch.Tensor: ...

    def current_loss_scale(self) -> float: ...

    def scaler_state(self) -> dict[str, Any]: ...

    def load_scaler_state(self, state: dict[str, Any]) -> None: ...


class DeepSpeedOptimizer:
    """Base of what clients get; ``.optimizer`` is their own object, kept alive with its ``param_groups`` list."""

    def __init__(self, optimizer: torch.optim.Optimizer, driver: Driver, views: list[OptimView]) -> None:
        self.optimizer = optimizer
        self._driver = driver
        self._views = views
        self.overflow = False

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def loss_scale(self) -> float:
        return self._driver.current_loss_scale()

    @property
    def cur_scale(self) -> float:
        return self._driver.current_loss_scale()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update with the gradients at hand (clients without the engine's ``step`` call this). Collective."""
        loss = closure() if closure is not None else None
        self._driver.update()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> NoReturn:
        """Raise: where each parameter's state lives is settled by ``initialize``."""
        raise UsageError(
            "add_param_group() after deepspeed.initialize is not possible: sharded state cannot grow. Put all "
            "parameters into it "
            "before (lr 0 keeps a group still), or destroy the engine and initialize again"
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients of the current accumulation window."""
        self._driver.runtime.gradients.clear()

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> torch.Tensor:
        return self._driver.backward(loss, retain_graph=retain_graph)

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: the base optimizer's over its master ranges, the masters, and the loss scaler."""
        with self._driver.whole_state():
            base = self.optimizer.state_dict()
        places = {id(p): i for i, p in enumerate(p for g in self.optimizer.param_groups for p in g["params"])}
        weights = []
        for view in self._views:
            with self._driver.attached(view):
                weights.append(view.param.detach().clone())
                if view.on_drive and view.param in self.optimizer.state:
                    held = self.optimizer.state[view.param]
                    copies = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in held.items()}
                    base["state"][places[id(view.param)]] = copies
        return {
            "base_optimizer_state": base,
            "fp32_flat": weights,
            "loss_scaler": self._driver.scaler_state(),
            "overflow": self.overflow,
        }

    def load_state_dict(self, state: dict[str, Any], *_: Any, **__: Any) -> None:
        """Restore what ``state_dict`` gave on the same rank under the same layout. Collective (parameters are
        published).
        """
        saved = state["fp32_flat"]
        if len(saved) != len(self._views) or any(
            a.shape != v.param.shape for a, v in zip(saved, self._views, strict=False)
        ):
            raise ValueError(
                "this optimizer state was saved under another layout (ranks, sharding or model); it does not fit here"
            )
        with self._driver.whole_state():
            self.optimizer.load_state_dict(state["base_optimizer_state"])
        if self._driver.tiles is not None:
            self._driver.tiles.adopt_state()
        with torch.no_grad():
            for view, value in zip(self._views, saved, strict=True):
                with self._driver.attached(view, write=True, publish=True):
                    view.param.copy_(value)
        self._driver.load_scaler_state(state["loss_scaler"])
        self.overflow = state["overflow"]
        self._driver.runtime.publish(self._driver.runtime.units)

    def offload_states(
        self, include: Any = None, device: Any = "cpu", pin_memory: bool = True, non_blocking: bool = False
    ) -> None:
        """``engine.offload_states``."""
        self._driver.offload_states(include, device, pin_memory, non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """``engine.reload_states``."""
        self._driver.reload_states(non_blocking)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"


class ZeROOptimizer(DeepSpeedOptimizer):
    """An optimizer whose state is sharded over ranks."""


class DeepSpeedZeroOptimizer(ZeROOptimizer):
    """Optimizer state sharded, parameters whole on every rank."""

    @property
    def single_partition_of_fp32_groups(self) -> list[torch.Tensor]:
        """This rank's fp32 master ranges."""
        return [v.param for v in self._views]


class ParamCoordinator:
    """Clients invalidate the fetch trace through this object; here traces heal themselves, so there is nothing to
    do.
    """

    def is_invalid_trace(self) -> bool:
        return False

    def _invalidate_trace(self) -> None:
        return None


def _no_external_parameters() -> tuple[()]:
    """What ``module.ds_external_parameters()`` answers: uses by other modules are found when they happen, so none is on
    record.
    """
    return ()


class DeepSpeedZeRoOffload:
    """The hooks of a sharded model as clients manage them: lists of removable handles and a way to put them back."""

    def __init__(self, module: nn.Module, hooks: ModuleHooks) -> None:
        self.module = module
        self._hooks = hooks
        self.param_coordinator = ParamCoordinator()
        for part in module.modules():
            part.ds_external_parameters = _no_external_parameters  # type: ignore[assignment]

    def forget(self) -> None:
        """Take back what was put on the modules."""
        for part in self.module.modules():
            part.__dict__.pop("ds_external_parameters", None)

    @property
    def forward_hooks(self) -> list[Any]:
        return self._hooks.forward_handles

    @forward_hooks.setter
    def forward_hooks(self, handles: list[Any]) -> None:
        self._hooks.forward_handles = handles

    @property
    def backward_hooks(self) -> list[Any]:
        return self._hooks.backward_handles

    @backward_hooks.setter
    def backward_hooks(self, handles: list[Any]) -> None:
        self._hooks.backward_handles = handles

    def suspend(self) -> None:
        """Take every hook off."""
        self._hooks.remove()

    def resume(self) -> None:
        """Put every hook back."""
        self._hooks.install()

    def get_param_coordinator(self) -> ParamCoordinator:
        return self.param_coordinator

    def _register_deepspeed_module(self, module: nn.Module, count: Any = None) -> None:
        self._hooks.install()


class DeepSpeedZeroOptimizer_Stage3(ZeROOptimizer):
    """Parameters, gradients and optimizer state sharded."""

    parameter_offload: DeepSpeedZeRoOffload

    @property
    def fp32_partitioned_groups_flat(self) -> list[torch.Tensor]:
        """This rank's fp32 master ranges."""
        return [v.param for v in self._views]


def wrap_optimizer(
    optimizer: torch.optim.Optimizer, driver: Driver, views: list[OptimView], *, offload: DeepSpeedZeRoOffload
) -> DeepSpeedOptimizer:
    """The wrapper class clients expect for this plan."""
    plan = driver.runtime.plan.regular
    if plan.param.sharded:
        wrapped = DeepSpeedZeroOptimizer_Stage3(optimizer, driver, views)
        wrapped.parameter_offload = offload
        return wrapped
    assert plan.optim is not None
    return (DeepSpeedZeroOptimizer if plan.optim.sharded else DeepSpeedOptimizer)(optimizer, driver, views)
