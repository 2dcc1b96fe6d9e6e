"""The optimizer object that ``initialize`` returns: the client's optimizer inside, the engine's update in ``step``."""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import nn

from deepspeed.client.attrs import answers, attribute_of
from deepspeed.errors import UsageError
from deepspeed.monitor.log import logger
from deepspeed.monitor.process_settings import Borrowed
from deepspeed.zero.hooks import ModuleHooks
from deepspeed.zero.optim_view import OptimView
from deepspeed.zero.runtime import Runtime


class DeepSpeedOptimizer:
    """Base of the optimizers clients get; ``.optimizer`` is their own object, and methods of ``engine`` do the work."""

    param_groups: list[dict[str, Any]] = attribute_of("optimizer", "param_groups")
    state: Any = attribute_of("optimizer", "state")
    overflow: bool = attribute_of("_engine", "overflowed")  # whether the last update was left out

    def __init__(self, optimizer: torch.optim.Optimizer, engine: Any, views: list[OptimView]) -> None:
        self.optimizer = optimizer
        self._engine = engine
        self._views = views

    loss_scale = cur_scale = property(lambda self: float(self._engine.current_loss_scale()))
    loss_scaler = property(lambda self: self._engine._scaler)
    dynamic_loss_scale = property(lambda self: self._engine.dynamic_loss_scale())

    def needs_scaler(self) -> bool:
        """Tell whether a loss has to go through ``engine.scale`` before a backward of the client's own."""
        return self.dynamic_loss_scale or self.loss_scale != 1.0

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update once with the gradients at hand (clients without the engine's ``step`` call this). Collective."""
        loss = closure() if closure is not None else None
        with self._engine._clock("step"):
            self._engine._update()
        self._engine._step_calls.optimizer_step(self._engine.lr_scheduler)
        self._engine._end_call(updated=True)
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> NoReturn:
        """Raise UsageError: the place of each parameter's state is settled by ``initialize``."""
        raise UsageError(
            "add_param_group() after deepspeed.initialize is not possible: sharded state cannot grow. Put all "
            "parameters into it before (lr 0 keeps a group still), or destroy the engine and initialize again"
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients of the current accumulation window."""
        self._engine.zero_grad()

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> Any:
        return self._engine.backward(loss, retain_graph=retain_graph)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state: the base optimizer's over its master ranges, the masters, and the loss scaler."""
        with self._engine.runtime.update.whole_state():
            base = self.optimizer.state_dict()
        places = {id(p): i for i, p in enumerate(p for g in self.optimizer.param_groups for p in g["params"])}
        weights = []
        for view in self._views:
            with self._engine.runtime.attached(view) as slots:
                weights.append(view.param.detach().clone())
                if view.on_drive and slots:
                    copies = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in slots.items()}
                    base["state"][places[id(view.param)]] = copies
        return {
            "base_optimizer_state": base,
            "fp32_flat": weights,
            "missed_updates": [dict(view.missed) for view in self._views],
            "loss_scaler": self._engine._scaler.state_dict(),
            "overflow": self.overflow,
        }

    def load_state_dict(self, state: dict[str, Any], *_: Any, **__: Any) -> None:
        """Restore the result of ``state_dict`` on this rank under this layout, else ValueError. Collective."""
        engine, saved = self._engine, state["fp32_flat"]
        if [tuple(a.shape) for a in saved] != [tuple(v.param.shape) for v in self._views]:
            raise ValueError("this optimizer state was saved under another layout (ranks, sharding or model)")
        engine.reload_states()
        engine.runtime.update.wait_together()
        engine.runtime.update.restart()
        with engine.runtime.update.whole_state():
            self.optimizer.load_state_dict(state["base_optimizer_state"])
        engine.runtime.update.adopt_state()
        missed = state.get("missed_updates") or [{}] * len(self._views)
        for view, counts in zip(self._views, missed, strict=True):
            view.missed = dict(counts)
        with torch.no_grad():
            for view, value in zip(self._views, saved, strict=True):
                with engine.runtime.attached(view, write=True, publish=True):
                    view.param.copy_(value)
        engine._scaler.load_state_dict(state["loss_scaler"])
        self.overflow = state["overflow"]
        engine.runtime.publish(engine.runtime.units)

    def refresh_fp32_params(self) -> None:
        """Update masters from 16-bit parameters that were written through ``.data`` after the first update: torch does
        not count such a write, and the next update would undo it. A master that rounds to the parameter's value keeps
        its bits. Call it after the edit, before ``step``; does nothing where parameters are sharded or fp32.
        Raises UsageError inside a forward or backward, and under ``delayed_update``.
        """
        self._engine._checkpoints.follow_data()

    def offload_states(
        self, include: Any = None, device: Any = "cpu", pin_memory: bool = True, non_blocking: bool = False
    ) -> None:
        self._engine.offload_states(include, device, pin_memory, non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        self._engine.reload_states(non_blocking)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"


class ZeROOptimizer(DeepSpeedOptimizer):
    """Optimizer whose state is sharded over ranks."""

    _masters = property(lambda self: [v.param for v in self._views])  # this rank's fp32 master ranges


class DeepSpeedZeroOptimizer(ZeROOptimizer):
    """Optimizer with sharded state; parameters are whole on every rank."""

    single_partition_of_fp32_groups = ZeROOptimizer._masters


class DeepSpeedZeRoOffload:
    """Hooks of a sharded model as clients manage them: lists of removable handles and a way to put them back.

    It is its own ``param_coordinator``, through which clients invalidate the fetch trace; here traces heal themselves.
    """

    forward_hooks: list[Any] = attribute_of("_hooks", "forward_handles")
    backward_hooks: list[Any] = attribute_of("_hooks", "backward_handles")
    param_coordinator = property(lambda self: self)

    def __init__(self, module: nn.Module, hooks: ModuleHooks) -> None:
        self.module = module
        self._hooks = hooks
        for part in module.modules():  # uses by other modules are found as they happen
            part.ds_external_parameters = tuple  # type: ignore[assignment]

    def forget(self) -> None:
        """Remove the attributes that were put on the modules."""
        for part in self.module.modules():
            part.__dict__.pop("ds_external_parameters", None)

    get_param_coordinator = answers(lambda self: self)
    is_invalid_trace = answers(lambda self: False)
    _invalidate_trace = answers(lambda self: None)

    def _register_deepspeed_module(self, module: nn.Module, count: Any = None) -> None:
        self._hooks.install()


class DeepSpeedZeroOptimizer_Stage3(ZeROOptimizer):
    """Optimizer with sharded parameters, gradients and state."""

    parameter_offload: DeepSpeedZeRoOffload
    fp32_partitioned_groups_flat = ZeROOptimizer._masters


def wrap_optimizer(
    optimizer: torch.optim.Optimizer, engine: Any, views: list[OptimView], *, offload: DeepSpeedZeRoOffload
) -> DeepSpeedOptimizer:
    """Wrap ``optimizer`` in the class that clients expect for this plan."""
    plan = engine.runtime.plan.regular
    if plan.param.sharded:
        wrapped = DeepSpeedZeroOptimizer_Stage3(optimizer, engine, views)
        wrapped.parameter_offload = offload
        return wrapped
    return (DeepSpeedZeroOptimizer if plan.optim.sharded else DeepSpeedOptimizer)(optimizer, engine, views)


def hold_clipping() -> Borrowed:
    """Make ``clip_grad_norm_`` warn, until the result is given back, of gradients in shards that it cannot see."""
    clip = torch.nn.utils.clip_grad_norm_

    @functools.wraps(clip)
    def telling(parameters: torch.Tensor | Iterable[torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        units = {unit for p in parameters if (unit := getattr(p, "_ds_unit", None)) is not None and p.grad is None}
        for runtime in {u.keeper for u in units if u.trainable and not u.plan.gradient_whole}:
            if isinstance(runtime, Runtime) and not runtime.gradients.clipped_by_client:
                runtime.gradients.clipped_by_client = True
                logger.warning(
                    "torch.nn.utils.clip_grad_norm_ finds no gradients on these parameters and clips nothing: they "
                    "are sharded over the ranks. Set gradient_clipping in the configuration; "
                    "engine.get_global_grad_norm() is the norm after step()"
                )
        return clip(parameters, *args, **kwargs)

    def put(function: Any) -> None:
        torch.nn.utils.clip_grad_norm_ = torch.nn.utils.clip_grad.clip_grad_norm_ = function

    return Borrowed("clipping", value=telling, read=lambda: clip, write=put)
