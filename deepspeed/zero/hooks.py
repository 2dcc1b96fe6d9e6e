"""Wiring between a module tree and a runtime. A hook body is one call to a verb.

Forward: a block's root enters and leaves the units of all modules inside; so does, with its own, every module outside
blocks that holds parameters directly. Those of a module inside a block act where it is called without the root; while
that runs they mark the output, through which a backward may enter what is inside. None are there once something is
compiled: see [Note: compiled blocks].
Backward: each output tensor gets one hook, which fetches the units again before autograd reads them; each parameter's
AccumulateGrad hook hands its gradient over; a hook on the inputs of a unit's root tells that its backward is through.
Private torch names used here: ``torch._C._current_graph_task_id`` (are we inside a backward?) and
``torch.autograd.Variable._execution_engine.queue_callback`` (end of backward), ``Module._call_impl`` (its frames).

[Note: compiled blocks] Dynamo cannot trace the hooks. Where a module's ``forward`` is compiled they are outside of it;
where the client has compiled more than that, they end a graph (``torch.compiler.disable``), which splits no block as
nothing inside one has hooks: hooks that do nothing while they are traced would still make a graph of their own for each
of several equal blocks. A module inside a block that is called without the root then finds released parameters, which
are fetched on demand inside a forward, and refused outside. A compiled forward is one node of the graph, so a hook on
that node, not on each output, also sees gradients that come through tensors which it has stored elsewhere.
"""

import contextlib
import dataclasses
import functools
import sys
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from types import MethodType
from typing import Any

import torch
from torch import nn

from deepspeed.client.attrs import replace_attribute
from deepspeed.errors import UsageError
from deepspeed.monitor.log import logger
from deepspeed.zero.module.attributes import pickle_as_before, pickle_plainly
from deepspeed.zero.module.tree import ModuleTree
from deepspeed.zero.plan import StateKind
from deepspeed.zero.runtime import Runtime
from deepspeed.zero.unit import Unit

_Hook = Callable[[nn.Module, Any, Any], None]


def inside_backward() -> bool:
    """Tell whether this thread executes a backward (so that a forward here is a recomputation)."""
    return bool(torch._C._current_graph_task_id() != -1)


def tensors_in(value: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    """Yield every tensor in nested containers, dataclasses and plain objects, without pytree registration."""
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


def _are_compiled(modules: Iterable[nn.Module]) -> bool:
    """Tell whether the client has compiled one of the modules: a copy of it, its call, or its forward."""
    for module in modules:
        attributes = vars(module)
        if "_orig_mod" in module._modules or attributes.get("_compiled_call_impl") is not None:
            return True
        if "forward" in attributes and hasattr(attributes["forward"], "_torchdynamo_orig_callable"):
            return True
    return False


def _drop_gradient(param: nn.Parameter) -> None:
    param.grad = None


def _calls_under_way(module: nn.Module) -> int:
    """Count the calls of ``module`` on this thread's stack."""
    stack = traceback.walk_stack(None)
    return sum(f.f_code is nn.Module._call_impl.__code__ and f.f_locals.get("self") is module for f, _ in stack)


def _settling(units: list[Unit]) -> Callable[..., None]:
    def settle(*_: Any) -> None:  # a function: a client's copy of the model copies no units
        for unit in units:
            unit.wait(StateKind.PARAM)

    return settle


# What nn.Module itself keeps on every module.
_OWN_ATTRIBUTES = frozenset(vars(nn.Module()))


class _Graph:
    """Mark of one forward of the whole model, with the weights of update number ``steps``: autograd holds it, by its
    hooks, as long as a backward may come.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps


class ModuleHooks:
    """Hooks of one runtime on one module tree; ``remove()`` takes all away, ``install()`` puts them back."""

    def __init__(
        self, model: nn.Module, runtime: Runtime, *, touches: dict[nn.Module, list[int]], roots: set[nn.Module]
    ) -> None:
        self._model = model
        self._runtime, self.mesh = runtime, runtime.mesh
        self._touches = touches
        self._roots = roots
        # In the order of the model, the same on all ranks: a block may be inside another one, too.
        self._inside = {m: root for root in model.modules() if root in roots for m in root.modules() if m is not root}
        self._running: Counter[nn.Module | None] = Counter()  # roots whose forward is under way
        self._compiled, self._modules = False, [*model.modules()]
        self._warned: set[nn.Module] = set()
        self._checked_at = -1
        self._armed = False
        self._graphs = weakref.WeakSet[_Graph]()
        # Parameters that autograd works for although they are in no group of the optimizer.
        self._training = any(unit.trainable for unit in runtime.units)
        self._tree = ModuleTree(model, runtime)
        self.awaited: set[nn.Parameter] = set()  # frozen ones that are in a group of the optimizer
        frozen = [unit for unit in runtime.units if self._training and not unit.trainable]
        self._outside = {
            p: s.name for u in frozen for p, s in zip(u.params, u.layout.segments, strict=True) if p.requires_grad
        }
        inside = (zip(u.layout.segments, u.params, strict=True) for u in frozen)
        self._frozen = {s.name: p for pairs in inside for s, p in pairs if not p.requires_grad}
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

    def install(self, *, compiled: bool = False) -> None:
        """Register every hook (idempotent); ``compiled``: some forward is. After an error the old hooks stay."""
        previous = self._compiled
        old = self.forward_handles, self.backward_handles
        self.forward_handles, self.backward_handles = [], []
        self._compiled = previous or compiled or _are_compiled(self._modules)
        try:
            self._register()
        except BaseException:
            old, (self.forward_handles, self.backward_handles) = (self.forward_handles, self.backward_handles), old
            self._compiled = previous
            raise
        finally:
            for handle in (*old[0], *old[1]):
                handle.remove()

    def _register(self) -> None:
        units = self._runtime.units
        for module, indices in self._touches.items():
            movable = [units[i] for i in indices if units[i].movable]
            late = [units[i] for i in indices if self._late(units[i])]
            if late and not self._compiled:
                self.forward_handles.append(module.register_forward_pre_hook(_settling(late)))
                pickle_plainly(module, self)
            if module is self._model or (movable and not (self._compiled and module in self._inside)):
                self._hook_module(module, movable)
        if self._model not in self._touches:
            self._hook_module(self._model, [])
        for unit in units:
            for position, param in enumerate(unit.params if unit.trainable else ()):
                ready = functools.partial(self._gradient_ready, unit, position)
                self._hook_parameter(param, ready, shown=unit.plan.gradient_whole)
        for param in self._outside:
            self._hook_parameter(param, _drop_gradient)

    def _hook_parameter(self, param: nn.Parameter, ready: Callable[[Any], None], *, shown: bool = False) -> None:
        """Register ``ready`` for its gradient, which may be ``shown``; for a frozen one, too, which may train again."""
        trained, param.requires_grad = param.requires_grad, True  # without, torch takes no hooks
        try:
            self.backward_handles.append(param.register_post_accumulate_grad_hook(ready))
            if shown:  # before autograd, or who else asked for it, adds it to that
                self.backward_handles.append(param.register_hook(lambda _: self._runtime.gradients.withdraw()))
        finally:
            param.requires_grad = trained

    def take_edits(self, *, unseen: bool = False) -> None:
        """Update masters from in-place writes to whole parameters; ``unseen``: also those through ``data``."""
        self._tree.take_edits(unseen=unseen)

    def _late(self, unit: Unit) -> bool:
        """Tell whether the unit is never released and may be updated behind the program. Its module's hook, or the
        block's, then waits for the update, as readers past torch's functions (an extension) would not.
        """
        return not unit.movable and self._runtime.update.runs_late(unit)

    def remove(self) -> None:
        """Remove every hook."""
        for handle in [*self.forward_handles, *self.backward_handles]:
            handle.remove()
        self.forward_handles.clear()
        self.backward_handles.clear()
        pickle_as_before(self._modules)
        self._modules.clear()

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        """Remove all hooks inside the context; afterwards each has its place among the client's hooks again."""
        handles = [*self.forward_handles, *self.backward_handles]
        places = [(handle.id, handle.hooks_dict_ref() or {}) for handle in handles]
        before = [(hooks, {**hooks}) for hooks in {id(hooks): hooks for _, hooks in places}.values()]
        for number, hooks in places:
            hooks.pop(number, None)
        try:
            yield
        finally:
            ours = {handle.id for handle in [*self.forward_handles, *self.backward_handles]}
            for hooks, saved in before:
                now = {**hooks}
                hooks.clear()
                hooks.update({key: hook for key, hook in saved.items() if key in ours or key in now} | now)

    def compile(self, compiler: Callable[[Any], Any]) -> Callable[[], None]:
        """Pass every forward without hooks inside through ``compiler``; return a callable that undoes that."""
        movable = {m for m, indices in self._touches.items() if any(self._runtime.units[i].movable for i in indices)}
        back, compiled = contextlib.ExitStack(), list[nn.Module]()

        def visit(module: nn.Module) -> None:
            inner = [m for m in module.modules() if m is not module]
            cut = module not in self._roots and any(m in movable and m not in self._inside for m in inner)
            single = not inner and type(module).forward.__module__.startswith("torch.nn.")  # one kernel anyway
            if cut or type(module).forward is nn.Module.forward:
                for child in module.children():
                    visit(child)
            elif module in self._roots or not single:
                forward: Any = module.forward
                method = getattr(forward, "__self__", None) is module and isinstance(forward, MethodType)
                # A method: a copy of the module calls it for itself, not for this module.
                made = MethodType(compiler(forward.__func__), module) if method else compiler(forward)
                replace_attribute(module, "forward", made, back)
                compiled.append(module)

        self.install(compiled=True)  # first: where that fails nothing has changed
        visit(self._model)
        if not compiled and self._runtime.mesh.first:
            logger.warning(
                "nothing of %s is compiled: its parameters are sharded one module at a time, as it repeats no block in "
                "a ModuleList; mark larger modules by deepspeed.utils.set_z3_leaf_modules before deepspeed.initialize",
                type(self._model).__name__,
            )

        return back.close

    def _hook_module(self, module: nn.Module, units: list[Unit]) -> None:
        before, after = self._hooks_of(module, units)
        if (root := self._inside.get(module)) is not None:
            before, after = self._hooks_inside(root, units, before, after)
        # Else without, as it costs microseconds a call; that of the model sees when it is needed.
        elif self._compiled or (module is self._model and "torch._dynamo" in sys.modules):
            before, after = torch.compiler.disable(before), torch.compiler.disable(after)
        self.forward_handles.append(module.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
        self.forward_handles.append(module.register_forward_hook(after, always_call=True))
        pickle_plainly(module, self)

    def _hooks_inside(self, root: nn.Module, units: list[Unit], enter: _Hook, leave: _Hook) -> tuple[_Hook, _Hook]:
        """Return hooks that ``enter`` and ``leave`` where ``root`` is not running; else they mark the output."""
        running, watch = self._running, functools.partial(self._before_backward, units, inner=True)

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            if root not in running:
                enter(module, args, kwargs)

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if root not in running:
                leave(module, args, output)
            elif not isinstance(output, torch.Tensor) or output.is_leaf:
                self._watch_outputs(units, output, inner=True)
            elif torch.is_grad_enabled():
                output.grad_fn.register_prehook(watch)  # type: ignore[union-attr]

        return before, after

    def _hooks_of(self, module: nn.Module, units: list[Unit]) -> tuple[_Hook, _Hook]:
        runtime = self._runtime
        is_root = module in self._roots
        modules = [*module.modules()] if is_root else [module]

        def before(called: nn.Module, args: Any, kwargs: Any) -> None:
            if called is not module:  # a copy, which has the hooks of its origin and parameters of its own
                return
            recompute = inside_backward()
            if module is self._model and (self._compiled or not torch.is_grad_enabled()):
                _settling(runtime.units)()  # compiled code, and the fused modules of an evaluation, know no face
            if recompute:
                self._arm()
            elif module is self._model and self._checked_at != runtime.steps:
                self._check_parameters()
                self._checked_at = runtime.steps
            if runtime.depth and module is self._model and not recompute and _calls_under_way(module) < 2:
                # torch calls no hook after an interrupt, which is no Exception: the forward that it ended is not left
                self.disarm()
                runtime.reset(keep_gradients=True)
            if is_root:
                self._running[module] += 1
            runtime.enter(units, recompute=recompute)
            if is_root and torch.is_grad_enabled():
                self._watch_inputs(units, (args, kwargs))

        def after(called: nn.Module, _: Any, output: Any) -> None:
            if called is not module:
                return
            if is_root:
                self._running -= Counter([module])
            needed = [*units, *runtime.borrowed()]
            self._tree.take_writes(needed)
            if inside_backward():
                self._watch_outputs(units, output)
                return
            seen = self._watch_outputs(needed, output, whole=module is self._model)
            if needed and torch.is_grad_enabled():
                self._watch_stash(needed, modules)
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

        return before, after

    def _check_parameters(self) -> None:
        """Refuse, once a step, parameters that were replaced, moved, added or unfrozen after ``initialize``."""
        if not self._compiled and _are_compiled(self._modules):
            self.install()
        for unit in self._runtime.units:
            if unit.whole:
                unit.buffer.bring_back()
        if not self._training:
            return
        self._tree.check()
        for name, param in [pair for pair in self._frozen.items() if pair[1].requires_grad]:
            if param in self.awaited:
                raise UsageError(
                    f"parameter {name!r} was unfrozen after deepspeed.initialize, which keeps no gradient and no "
                    "optimizer state of frozen ones: let it require a gradient before (a group with lr 0 keeps it "
                    "as it is), or call engine.destroy() and initialize again"
                )
            logger.warning(
                "parameter %s was unfrozen after deepspeed.initialize and is not trained; let it require a gradient "
                "before, and put it into the optimizer",
                name,
            )
            del self._frozen[name]

    def _watch_outputs(self, units: list[Unit], output: Any, *, inner: bool = False, whole: bool = False) -> bool:
        """Hook outputs that need gradients (of a root if ``inner``, of the model if ``whole``); tell if any does."""
        if not torch.is_grad_enabled():
            return False
        tensors = [t for t in tensors_in(output) if t.requires_grad]
        graph = _Graph(self._runtime.steps)
        for origin in {t.grad_fn for t in tensors if t.grad_fn is not None}:  # a leaf's gradient needs no weight
            origin.register_prehook(functools.partial(self._before_backward, units, inner=inner))
            if whole:
                origin.register_prehook(lambda _: self._graphs.discard(graph))
                self._graphs.add(graph)
        return bool(tensors)

    def refuse(self, call: str, whose: str) -> UsageError | None:
        """Return an error for a ``call`` that changes weights, where a forward since the last update waits for its
        backward: it has left a graph through which none has come.
        """
        if all(graph.steps != self._runtime.steps for graph in self._graphs):
            return None
        return UsageError(
            f"{call} changes weights, and a forward of {whose} has had no backward yet, which would compute with other "
            "weights than the forward: make the call after it, or drop the outputs of that forward first (under "
            "torch.no_grad() there is none to wait for)"
        )

    def _watch_stash(self, units: list[Unit], modules: list[nn.Module]) -> None:
        """Hook tensors that a forward left on its modules (an auxiliary loss); a backward reaches them unreturned."""
        values = [v for m in modules for name, v in vars(m).items() if name not in _OWN_ATTRIBUTES]
        for tensor in tensors_in([v for v in values if isinstance(v, (torch.Tensor, list, tuple, dict))], 3):
            if tensor.requires_grad and not tensor.is_leaf and not hasattr(tensor, "_ds_watched"):
                tensor._ds_watched = True  # type: ignore[attr-defined]
                tensor.register_hook(functools.partial(self._before_backward, units))

    def _before_backward(self, units: list[Unit], _: Any, *, inner: bool = False) -> None:
        if not self._modules:
            return  # the engine has ended, and other ranks are elsewhere
        if inner and not torch.is_grad_enabled() and all(unit.whole for unit in units):
            return  # as after the root's own hook
        if not self._armed:
            self._arm()
        # Gradients that will be differentiated again (create_graph) leave a graph that reads the weights later.
        self._runtime.second_order = torch.is_grad_enabled()
        if units:
            self._runtime.need(units)

    def _arm(self) -> None:
        """Queue ``flush`` for the end of this backward, once per graph task (a reentrant checkpoint nests tasks)."""
        self._runtime.begin_backward()

        def end_of_backward() -> None:
            self._armed = False
            self._runtime.flush()

        if not self._armed:
            self._armed = True
            torch.autograd.Variable._execution_engine.queue_callback(end_of_backward)

    def disarm(self) -> None:
        """Forget an armed callback that an error in backward has lost, and the forwards that it has cut short."""
        self._armed = False
        self._running.clear()
        self._graphs.clear()

    def _gradient_ready(self, unit: Unit, position: int, _: nn.Parameter) -> None:
        if not self._armed:
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
            for handle in handles if missing == 0 else ():
                handle.remove()
            for unit in frozen if missing == 0 else ():
                self._runtime.backward_done(unit)

        handles = [tensor.register_hook(hook) for tensor in tensors]
