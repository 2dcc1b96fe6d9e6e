"""Wiring between a module tree and a runtime. A hook body is one call to a verb.

Forward: every module that holds parameters directly, and every unit's root block, enters and leaves its units.
Backward: each output tensor gets one hook, which fetches the units again before autograd reads them; each parameter's
AccumulateGrad hook hands its gradient over; a hook on the inputs of a unit's root tells that its backward is through.
Private torch names used here: ``torch._C._current_graph_task_id`` (are we inside a backward?) and
``torch.autograd.Variable._execution_engine.queue_callback`` (end of backward).
"""

import dataclasses
import functools
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from deepspeed.errors import UsageError
from deepspeed.observe.log import logger
from deepspeed.observe.process_settings import Borrowed
from deepspeed.zero.runtime import Runtime
from deepspeed.zero.unit import Unit


def inside_backward() -> bool:
    """True on a thread that is executing a backward (so a forward here is a recomputation)."""
    return bool(torch._C._current_graph_task_id() != -1)


def tensors_in(value: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    """Every tensor in nested containers, dataclasses and plain objects, without needing pytree registration."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth == 0 or value is None or isinstance(value, (str, bytes, int, float, nn.Module)):
        return
    elif isinstance(value, (dict, list, tuple, set)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item, depth - 1)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for f in dataclasses.fields(value):
            yield from tensors_in(getattr(value, f.name, None), depth - 1)
    else:
        if hasattr(value, "__dict__"):
            yield from tensors_in(vars(value), depth - 1)
        for cls in type(value).__mro__:
            slots = cls.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                yield from tensors_in(getattr(value, name, None), depth - 1)


def _drop_gradient(param: nn.Parameter) -> None:
    param.grad = None


def hold_clipping() -> Borrowed:
    """While it lasts, ``torch.nn.utils.clip_grad_norm_`` says what to use where it sees no gradients: on shards."""
    clip = torch.nn.utils.clip_grad_norm_

    @functools.wraps(clip)
    def telling(parameters: torch.Tensor | Iterable[torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        units = {unit for p in parameters if (unit := getattr(p, "_ds_unit", None)) is not None and p.grad is None}
        for runtime in {u.keeper for u in units if u.trainable and not u.plan.gradient_whole}:
            if isinstance(runtime, Runtime) and not runtime.warned_clipping:
                runtime.warned_clipping = True
                logger.warning(
                    "torch.nn.utils.clip_grad_norm_ finds no gradients on these parameters and clips nothing: they "
                    "are sharded over the ranks. Set gradient_clipping in the configuration; "
                    "engine.get_global_grad_norm() is the norm after step()"
                )
        return clip(parameters, *args, **kwargs)

    def put(function: Any) -> None:
        torch.nn.utils.clip_grad_norm_ = torch.nn.utils.clip_grad.clip_grad_norm_ = function

    return Borrowed("clipping", value=telling, read=lambda: clip, write=put)


# What nn.Module itself keeps on every module.
_OWN_ATTRIBUTES = frozenset(vars(nn.Module()))


class ModuleHooks:
    """All hooks of one runtime on one module tree; ``remove()`` takes every one away, ``install()`` puts them back."""

    def __init__(
        self, model: nn.Module, runtime: Runtime, *, touches: dict[nn.Module, list[int]], roots: set[nn.Module]
    ) -> None:
        self._model = model
        self._runtime = runtime
        self._touches = touches
        self._roots = roots
        self._warned: set[nn.Module] = set()
        self._checked_at = -1
        self._armed = False
        # Parameters that autograd works for although they are in no group of the optimizer.
        training = any(unit.trainable for unit in runtime.units)
        frozen = [unit for unit in runtime.units if training and not unit.trainable]
        self._outside = {
            p: s.name for u in frozen for p, s in zip(u.params, u.layout.segments, strict=True) if p.requires_grad
        }
        if self._outside and runtime.mesh.first:
            logger.warning(
                "%d parameters require a gradient and are in no group of the optimizer (%s): they are not trained, "
                "count in no norm, and their gradients are dropped. Put them into the optimizer, or let them require "
                "none, which saves computing it",
                len(self._outside),
                ", ".join([*self._outside.values()][:8]) + (", ..." if len(self._outside) > 8 else ""),
            )
        self.forward_handles: list[Any] = []
        self.backward_handles: list[Any] = []
        self.install()

    def install(self) -> None:
        """Register every hook (idempotent)."""
        self.remove()
        units = self._runtime.units
        for module, indices in self._touches.items():
            movable = [units[i] for i in indices if units[i].movable]
            if movable or module is self._model:
                self._hook_module(module, movable, is_root=module in self._roots)
        if self._model not in self._touches:
            self._hook_module(self._model, [], is_root=False)
        hold = self.backward_handles.append
        for unit in units:
            for position, param in enumerate(unit.params if unit.trainable else ()):
                ready = functools.partial(self._gradient_ready, unit, position)
                hold(param.register_post_accumulate_grad_hook(ready))
                if unit.plan.gradient_whole:  # before autograd, or who else asked for it, adds it to what is shown
                    hold(param.register_hook(lambda _: self._runtime.gradients.withdraw()))
        for param in self._outside:
            hold(param.register_post_accumulate_grad_hook(_drop_gradient))

    def remove(self) -> None:
        """Take every hook away."""
        for handle in [*self.forward_handles, *self.backward_handles]:
            handle.remove()
        self.forward_handles.clear()
        self.backward_handles.clear()

    def _hook_module(self, module: nn.Module, units: list[Unit], *, is_root: bool) -> None:
        runtime = self._runtime

        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            recompute = inside_backward()
            if recompute:
                self._arm()
            elif module is self._model and self._checked_at != runtime.steps:
                self._check_parameters()
                self._checked_at = runtime.steps
            runtime.enter(units, recompute=recompute)
            if is_root and torch.is_grad_enabled():
                self._watch_inputs(units, (args, kwargs))

        def after(_: nn.Module, __: Any, output: Any) -> None:
            if inside_backward():
                self._watch_outputs(units, output)
                return
            needed = [*units, *runtime.borrowed()]
            seen = self._watch_outputs(needed, output)
            if needed and torch.is_grad_enabled():
                self._watch_stash(needed, module)
            # Trained parameters, and nothing to tell when they are needed again.
            keep = torch.is_grad_enabled() and not seen and any(u.trainable for u in units) and output is not None
            if keep and module not in self._warned:
                self._warned.add(module)
                text = "%s returned no tensor that needs a gradient, so its parameters stay gathered until the backward"
                logger.info(text, type(module).__name__)
            runtime.leave(units, keep=keep)
            # An exception on its way out must not wait for other ranks.
            if module is self._model and sys.exc_info()[0] is None:
                runtime.meet(passing=True)

        self.forward_handles.append(module.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
        self.forward_handles.append(module.register_forward_hook(after, always_call=True))

    def _check_parameters(self) -> None:
        """Once a step: refuse parameters replaced or moved after ``initialize``; say once which train in vain."""
        for unit in self._runtime.units:
            unit.check_views()
        for module in self._touches if any(unit.trainable for unit in self._runtime.units) else ():
            for name, param in module._parameters.items():
                if param is None or not param.requires_grad:
                    continue
                home = getattr(param, "_ds_unit", None)
                if home is None:
                    raise UsageError(
                        f"parameter {name!r} of a {type(module).__name__} was replaced by another object after "
                        "deepspeed.initialize (load_state_dict(assign=True)?); the engine's optimizer would never "
                        "update it. Copy the values in place instead"
                    )
                if not home.trainable and param not in self._outside and module not in self._warned:
                    self._warned.add(module)
                    logger.warning(
                        "parameter %s was unfrozen after deepspeed.initialize and is not trained; let it require a "
                        "gradient before, and put it into the optimizer",
                        param._ds_name,  # type: ignore[attr-defined]
                    )

    def _watch_outputs(self, units: list[Unit], output: Any) -> bool:
        """Hook every output that will carry a gradient; True when there was one."""
        tensors = [t for t in tensors_in(output) if t.requires_grad] if torch.is_grad_enabled() else []
        for tensor in tensors:
            tensor.register_hook(functools.partial(self._before_backward, units))
        return bool(tensors)

    def _watch_stash(self, units: list[Unit], module: nn.Module) -> None:
        """Hook what a forward has left on the module itself (an auxiliary loss): it reaches a backward unreturned."""
        values = [value for name, value in vars(module).items() if name not in _OWN_ATTRIBUTES]
        for tensor in tensors_in([v for v in values if isinstance(v, (torch.Tensor, list, tuple, dict))], 3):
            if tensor.requires_grad and not tensor.is_leaf and not hasattr(tensor, "_ds_watched"):
                tensor._ds_watched = True  # type: ignore[attr-defined]
                tensor.register_hook(functools.partial(self._before_backward, units))

    def _before_backward(self, units: list[Unit], _: torch.Tensor) -> None:
        self._arm()
        # Gradients that will be differentiated again (create_graph) leave a graph that reads the weights later.
        self._runtime.second_order = torch.is_grad_enabled()
        if units:
            self._runtime.need(units)

    def _arm(self) -> None:
        """Have the end of this backward call ``flush``; once per graph task (a reentrant checkpoint nests tasks)."""
        self._runtime.begin_backward()

        def end_of_backward() -> None:
            self._armed = False
            self._runtime.flush()

        if not self._armed:
            self._armed = True
            torch.autograd.Variable._execution_engine.queue_callback(end_of_backward)

    def disarm(self) -> None:
        """Forget an armed callback that an error in backward has lost."""
        self._armed = False

    def _gradient_ready(self, unit: Unit, position: int, _: nn.Parameter) -> None:
        self._arm()
        self._runtime.gradient_ready(unit, position, task=torch._C._current_graph_task_id())

    def _watch_inputs(self, units: list[Unit], inputs: Any) -> None:
        """Release units with nothing left to train once the gradients of the block's inputs are known."""
        frozen = [u for u in units if not u.trainable]
        tensors = [t for t in tensors_in(inputs) if t.requires_grad] if frozen else []
        missing = len(tensors)

        def hook(_: torch.Tensor) -> None:
            nonlocal missing
            missing -= 1
            for unit in frozen if missing == 0 else ():
                self._runtime.backward_done(unit)

        for tensor in tensors:
            tensor.register_hook(hook)
