"""The hybrid engine: training and generation with one set of weights, as the actor of reinforcement learning."""

import contextlib
import inspect
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from deepspeed.accelerator.device import get_accelerator
from deepspeed.client.mpu import Ways
from deepspeed.comm.collectives import describe, failures, gather_objects, is_of_backend
from deepspeed.config import DeepSpeedConfig
from deepspeed.engine import DeepSpeedEngine
from deepspeed.errors import DeepSpeedConfigError, NotYetError, RankFailedError, UsageError
from deepspeed.monitor.log import log_dist_once
from deepspeed.pipe.module import PipelineModule
from deepspeed.reallocate.adapters import adapted_layer, fused_adapters
from deepspeed.tensor.generation import KEY, PartsForGeneration, plan_parts
from deepspeed.tensor.layers import RandomStates
from deepspeed.tensor.prompts import GenerateCall, check_alike, innermost, lengths, settings_of


def check_generates(module: nn.Module, config: DeepSpeedConfig, *, ranks: int, axes: Ways) -> None:
    """Raise UsageError or DeepSpeedConfigError where ``hybrid_engine`` does not fit these ranks and this model."""
    options = config.hybrid_engine
    if not options.enabled:
        return
    if isinstance(module, PipelineModule):
        raise DeepSpeedConfigError("hybrid_engine.enabled: each rank of a pipeline has its stage only; set it to false")
    if not callable(getattr(module, "generate", None)):
        raise UsageError(
            f"hybrid_engine.enabled: {type(module).__name__} has no method generate(...) that the engine could call; "
            "give the model one, or set the key to false"
        )
    shares = options.inference_tp_size not in (1, axes.tp)
    if shares:
        _check_parts(module, config, ranks=ranks, axes=axes)
    elif not options.pin_parameters and config.zero.divergence == "assume_none":
        raise DeepSpeedConfigError(
            "hybrid_engine.pin_parameters false lets ranks that have ended generating serve the others, which "
            'zero_optimization.divergence "assume_none" forbids; use "tolerate", or leave pin_parameters true'
        )


def _check_parts(module: nn.Module, config: DeepSpeedConfig, *, ranks: int, axes: Ways) -> None:
    """Check ranks that share layers only while they generate. Raises DeepSpeedConfigError or NotYetError."""
    size = config.hybrid_engine.inference_tp_size
    if axes.tp > 1:
        raise DeepSpeedConfigError(
            f"{KEY} is {size}, but {axes.tp} ranks share each layer in training already (tensor_parallel.autotp_size); "
            f"set it to 1 or {axes.tp}: both let these generate together"
        )
    if axes.sp > 1:
        raise DeepSpeedConfigError(
            f"{KEY} is {size}, but {axes.sp} ranks share each sequence (mesh_param, or an mpu); set it to 1"
        )
    if ranks % size:
        raise DeepSpeedConfigError(f"{KEY} {size} does not divide the {ranks} ranks; use a divisor of {ranks}")
    if path := adapted_layer(module):
        raise NotYetError(
            f"{KEY} is {size}, but {path} has an adapter, and such layers are not dealt out in this release; set it to "
            "1, or merge the adapters before deepspeed.initialize"
        )
    plan_parts(module, config.tensor_parallel, size)


class DeepSpeedHybridEngine(DeepSpeedEngine):
    """Engine whose ``generate`` is the module's own, with weights that are whole, or split over ranks that generate
    together; from ``initialize`` where ``hybrid_engine.enabled``. ``engine.module.generate`` comes here, too.
    """

    def __init__(self, module: nn.Module, config: DeepSpeedConfig, **parts: Any) -> None:
        super().__init__(module, config, **parts)
        options = config.hybrid_engine
        self._options = options
        self._weights.units_at_once = options.tp_gather_partition_size
        self._gathers_layers = not options.pin_parameters and any(unit.movable for unit in self.runtime.units)
        self._speaking = False  # inside the module's own generate
        self._in_parts: PartsForGeneration | None = None
        if (tp_size := options.inference_tp_size) not in (1, self.mesh.tp.size):
            plan = plan_parts(module, config.tensor_parallel, tp_size, self.mesh.job.index % tp_size)
            self._in_parts = PartsForGeneration(module, plan, self.mesh, tp_size=tp_size, device=self.device)
        self._own_generate: Callable[..., Any] = module.generate  # type: ignore[assignment]
        self._own_attribute = vars(module).get("generate")
        module.generate = _Routed(self, self._own_generate)  # type: ignore[assignment]

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the module's ``generate(*args, **kwargs)``, under ``no_grad``. Collective at both ends.

        Ranks may generate different numbers of tokens. With ``hybrid_engine.pin_parameters`` every weight is whole
        until it returns, and in eval mode adapters are added to copies of the weights that they adapt; without, each
        layer is gathered when it computes, and ranks that have ended serve the others. With ``inference_tp_size`` above
        1 so many ranks share the layers and generate together, for the prompts of each in turn; each returns its own.
        An error on one rank is raised on all: RankFailedError names it. Raises UsageError on all ranks for more tokens
        than ``hybrid_engine.max_out_tokens``, and inside a forward or backward.
        """
        self._checks.alive(alone=False)
        fault = self._too_long(args, kwargs)
        if self._checks.generating or self._speaking:  # in unsharded(), or by generate() itself: each rank as it likes
            if fault is not None:
                raise fault
            return self._speak(args, kwargs)
        self._checks.between_passes("generate")
        self._checks.begin_collective()
        if self._in_parts is not None:
            call = GenerateCall(args, kwargs)
            try:
                output = self._in_turn(self._in_parts, call, self._prepared(self._in_parts, call, fault))
            finally:
                if not self._options.pin_parameters:
                    self._in_parts.drop()
        else:
            self._agree(fault)
            self.runtime.update.publish()
            output = self._layer_by_layer(args, kwargs) if self._gathers_layers else self._whole(args, kwargs)
        if self._options.release_inference_cache:
            get_accelerator().empty_cache()
        return output

    def _whole(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output, fault = None, None
        with self.unsharded():
            try:
                with self._fused():
                    output = self._speak(args, kwargs)
            except Exception as error:
                fault = error
            self._agree(fault)
        return output

    @torch.inference_mode(mode=False)  # what is made here lasts, and is written to again
    def _prepared(self, parts: PartsForGeneration, call: GenerateCall, fault: Exception | None) -> bytes:
        """Update the parts with the current weights, where any rank's are outdated; return ``call``, packed."""
        packed, marks = b"", None
        self.runtime.update.publish()
        try:
            parts.check(self.module)
            marks, packed = parts.marks(self.module), call.packed()
        except Exception as error:
            fault = fault or error
        if self._agree(fault, wants=not parts.holds(marks)):
            fault = None
            try:
                parts.fill()
            except Exception as error:  # there is no memory for it
                fault = error
            self._agree(fault)
            parts.open()
            parts.take(self, marks)
        return packed

    def _in_turn(self, parts: PartsForGeneration, call: GenerateCall, packed: bytes) -> Any:
        """Generate the calls of all ranks of the group, one after the other; return this rank's output."""
        output, fault, depth = None, None, 0
        random = RandomStates.now()
        compiled = torch.compiler.set_stance("force_eager") if self.is_compiled else contextlib.nullcontext()
        parts.open()
        with self._parts.hooks.away():
            self._checks.generating = True
            turn = -1
            try:
                settings = settings_of(self.module, self._own_generate)
                gathered = gather_objects((packed, random, settings), parts.group)
                check_alike([theirs for _, _, theirs in gathered], parts.ranks)
                calls = [GenerateCall.unpacked(theirs, self.device) for theirs, _, _ in gathered]
                calls[parts.group.index] = call
                with parts.shown(), compiled:
                    for turn, request in enumerate(calls):
                        gathered[turn][1].set()
                        made = self._speak(request.args, request.kwargs)
                        if turn == parts.group.index:
                            output, random = made, RandomStates.now()
            except Exception as error:
                parts.end_waits()
                local = turn in (-1, parts.group.index)
                fault, depth = error, 2 if is_of_backend(error) else int(not local)
            finally:
                self._checks.generating = False
                random.set()
        try:
            self._agree(fault, depth=depth)
        except Exception:
            parts.close_group()  # whose waits have been ended
            raise
        return output

    def _layer_by_layer(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        control = self.mesh.control
        try:
            with self._announced_forwards():
                output = self._speak(args, kwargs)
            if control is not None:  # of ranks that still generate: a forward, and that it was not the last
                failures(None, control, depth=lambda: self.runtime.meet() * 0)
        except BaseException as error:
            self._recover(error, in_forward=True)
            raise
        return output

    @contextlib.contextmanager
    def _announced_forwards(self) -> Iterator[None]:
        """Tell ranks that have ended, after each forward of the whole model, that this one goes on."""
        control, depth = self.mesh.control, 0

        def before(*_: Any) -> None:
            nonlocal depth
            depth += 1

        def after(module: nn.Module, *_: Any) -> None:
            nonlocal depth
            depth -= 1
            if depth == 0 and control is not None:
                if module is not self.module:  # whose hooks have met the others already
                    self.runtime.meet()
                failures(None, control, depth=lambda: 1)

        with contextlib.ExitStack() as hooks:
            # PEFT's generate calls the model inside the one that the engine has
            for module in {self.module, *(m for m in self.module.modules() if hasattr(type(m), "generate"))}:
                hooks.callback(module.register_forward_pre_hook(before).remove)
                hooks.callback(module.register_forward_hook(after).remove)
            yield

    @contextlib.contextmanager
    def _fused(self) -> Iterator[None]:
        if self.module.training or self.mesh.tp.size > 1:  # dropout is for the adapters alone; parts are no whole
            yield
            return
        with fused_adapters(self.module) as count:
            if count:
                log_dist_once(f"generate(): {count} layers have their adapters added to copies of their weights")
            yield

    def _speak(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        parameters = inspect.signature(innermost(self.module, self._own_generate)).parameters
        if "synced_gpus" in parameters or "synced_gpus" in kwargs:
            kwargs = {**kwargs, "synced_gpus": False}  # no rank waits for the length of another
        outer, self._speaking = self._speaking, True
        try:
            with torch.no_grad():
                return self._own_generate(*args, **kwargs)
        finally:
            self._speaking = outer

    def _agree(self, fault: Exception | None, *, depth: int = 0, wants: bool = False) -> bool:
        """Raise on all ranks the fault of least ``depth``, if any. Else return whether any rank ``wants`` something."""
        text = None if fault is None else describe(fault)
        answers = gather_objects((depth, text, wants), self.mesh.talk)
        least = min((theirs for theirs, cause, _ in answers if cause is not None), default=0)
        if fault is not None and depth == least:
            raise fault
        for rank, (theirs, cause, _) in zip(self.mesh.talk.ranks, answers, strict=True):
            if cause is not None and theirs == least:
                raise RankFailedError(
                    f"{self.mesh.title(rank)} failed in generate(): {cause}; no rank has generated anything"
                ) from fault
        return any(asked for _, _, asked in answers)

    def _too_long(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Exception | None:
        """Return the error about the requested lengths, or None; it is not raised, as other ranks must be told."""
        limit = self._options.max_out_tokens
        try:
            prompt, total = lengths(self.module, self._own_generate, GenerateCall(args, kwargs))
            if total <= limit:
                return None
        except Exception as error:  # lengths that are no numbers
            return error
        return UsageError(
            f"generate(): a prompt of {prompt} tokens and up to {total - prompt} new ones are {total}, and "
            f"hybrid_engine.max_out_tokens is {limit}: set that higher, or ask for fewer (max_new_tokens)"
        )

    def offload_states(
        self, include: Any = None, device: Any = "cpu", pin_memory: bool = True, non_blocking: bool = False
    ) -> None:
        """Offload as every engine does; with parameters, drop the parts of ranks that share layers, too."""
        super().offload_states(include, device, pin_memory, non_blocking)
        if self._checks.params_lent and self._in_parts is not None:
            self._in_parts.drop()

    def destroy(self) -> None:
        """End the engine, as every other does; restore the module's own ``generate``."""
        try:
            super().destroy()
        finally:
            if self._in_parts is not None and self._checks.destroyed:
                self._in_parts.drop()
                self._in_parts.close_group()
                self._in_parts = None
        if isinstance(vars(self.module).get("generate"), _Routed):
            del self.module.generate
            if self._own_attribute is not None:
                self.module.generate = self._own_attribute


class _Routed:
    """Route ``module.generate`` to the engine while it lives. A copy of the module has the module's own."""

    def __init__(self, engine: DeepSpeedHybridEngine, generate: Callable[..., Any]) -> None:
        self._engine, self._generate = weakref.ref(engine), generate

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        engine = self._engine()
        if engine is None or engine._checks.destroyed:  # and a client has kept this, around which it has put its own
            return self._generate(*args, **kwargs)
        return engine.generate(*args, **kwargs)

    def __reduce_ex__(self, _: Any) -> Any:
        return _same, (self._generate,)


def _same(function: Callable[..., Any]) -> Callable[..., Any]:
    return function
