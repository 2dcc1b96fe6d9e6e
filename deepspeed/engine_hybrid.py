"""The hybrid engine: training and generation with one set of weights, as the actor of reinforcement learning."""

import contextlib
import inspect
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from deepspeed.checkpoint.weights.adapters import fused_adapters
from deepspeed.comm.collectives import failures
from deepspeed.config import DeepSpeedConfig
from deepspeed.device import get_accelerator
from deepspeed.engine import DeepSpeedEngine
from deepspeed.errors import DeepSpeedConfigError, RankFailedError, UsageError
from deepspeed.observe.log import log_dist_once
from deepspeed.pipe.module import PipelineModule

_PROMPTS = ("input_ids", "inputs_embeds", "inputs")  # as generate() of Transformers calls them


def check_generates(module: nn.Module, config: DeepSpeedConfig) -> None:
    """Raise UsageError or DeepSpeedConfigError, by name, where ``hybrid_engine`` cannot be what is asked for."""
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
    if not options.pin_parameters and config.zero.divergence == "assume_none":
        raise DeepSpeedConfigError(
            "hybrid_engine.pin_parameters false lets ranks that have ended generating serve the others, which "
            'zero_optimization.divergence "assume_none" forbids; use "tolerate", or leave pin_parameters true'
        )


class DeepSpeedHybridEngine(DeepSpeedEngine):
    """An engine whose ``generate`` is the module's own, with weights that are whole meanwhile; from ``initialize``
    where ``hybrid_engine.enabled``. ``engine.module.generate`` comes here, too. Training is that of every engine.
    """

    def __init__(self, module: nn.Module, config: DeepSpeedConfig, **parts: Any) -> None:
        super().__init__(module, config, **parts)
        options = config.hybrid_engine
        self._options, self._units_at_once = options, options.tp_gather_partition_size
        self._gathers_layers = not options.pin_parameters and any(unit.movable for unit in self.runtime.units)
        self._speaking = False  # inside the module's own generate
        self._own_generate: Callable[..., Any] = module.generate  # type: ignore[assignment]
        self._own_attribute = vars(module).get("generate")
        module.generate = _Routed(self, self._own_generate)  # type: ignore[assignment]

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """What the module's ``generate(*args, **kwargs)`` returns, under ``no_grad``. Collective at both ends.

        Ranks may generate different numbers of tokens. With ``hybrid_engine.pin_parameters`` every weight is whole
        until it returns, and in eval mode adapters are added to copies of the weights that they adapt; without, each
        layer is gathered when it computes, and ranks that have ended serve the others. An error on one rank is one on
        all: RankFailedError names it. Raises UsageError on all ranks for a prompt that with the new tokens exceeds
        ``hybrid_engine.max_out_tokens``, and inside a forward or backward.
        """
        self._check_alive(alone=False)
        fault = self._too_long(args, kwargs)
        if self._generating or self._speaking:  # in unsharded(), or by generate() itself: each rank as it likes
            if fault is not None:
                raise fault
            return self._speak(args, kwargs)
        self._check_between_passes("generate")
        self._settle_together()
        self._agree(fault)
        self.runtime.catch_up()
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
        """After each forward of the whole model tell ranks that have ended that this one goes on."""
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
        parameters = inspect.signature(_inner(self.module, self._own_generate)).parameters
        if "synced_gpus" in parameters or "synced_gpus" in kwargs:
            kwargs = {**kwargs, "synced_gpus": False}  # no rank waits for the length of another
        outer, self._speaking = self._speaking, True
        try:
            with torch.no_grad():
                return self._own_generate(*args, **kwargs)
        finally:
            self._speaking = outer

    def _agree(self, fault: Exception | None) -> None:
        """Raise on all ranks where one has a fault: its own there."""
        failed = failures(fault, self.mesh.talk)
        if fault is not None:
            raise fault
        for rank, text in failed.items():
            raise RankFailedError(
                f"{self.mesh.title(rank)} failed in generate(): {text}; no rank has generated anything"
            )

    def _too_long(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Exception | None:
        """What is wrong with the lengths asked for: returned, as the other ranks are to hear of it."""
        limit = self._options.max_out_tokens
        try:
            prompt, total = lengths(self.module, self._own_generate, args, kwargs)
            if total <= limit:
                return None
        except Exception as error:  # lengths that are no numbers
            return error
        return UsageError(
            f"generate(): a prompt of {prompt} tokens and up to {total - prompt} new ones are {total}, and "
            f"hybrid_engine.max_out_tokens is {limit}: set that higher, or ask for fewer (max_new_tokens)"
        )

    def destroy(self) -> None:
        """The end of the engine, as of every other; the module has its own ``generate`` again."""
        super().destroy()
        if isinstance(vars(self.module).get("generate"), _Routed):
            del self.module.generate
            if self._own_attribute is not None:
                self.module.generate = self._own_attribute


class _Routed:
    """``module.generate`` while the engine lives. A copy of the module has the module's own."""

    def __init__(self, engine: DeepSpeedHybridEngine, generate: Callable[..., Any]) -> None:
        self._engine, self._generate = weakref.ref(engine), generate

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        engine = self._engine()
        if engine is None or engine._destroyed:  # and a client has kept this, around which it has put its own
            return self._generate(*args, **kwargs)
        return engine.generate(*args, **kwargs)

    def __reduce_ex__(self, _: Any) -> Any:
        return _same, (self._generate,)


def _same(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _inner(module: Any, generate: Callable[..., Any]) -> Callable[..., Any]:
    """The method that generates in the end: PEFT's passes everything on to that of the model inside."""
    inner = module.get_base_model() if hasattr(module, "peft_config") and hasattr(module, "get_base_model") else module
    return generate if inner is module else getattr(inner, "generate", generate)


def lengths(
    module: nn.Module, generate: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[int, int]:
    """Tokens of the prompt that a call of ``generate`` is given, and most tokens with what it makes; as far as the
    arguments, or the ``generation_config`` that they or the model have, say.
    """
    inner = _inner(module, generate)
    try:
        bound = inspect.signature(inner).bind_partial(*args, **kwargs)
    except TypeError:  # which the call itself will raise
        return 0, 0
    bound.apply_defaults()
    named = {**bound.arguments, **bound.arguments.get("kwargs", {})}
    tensors = [
        value
        for value in (*map(named.get, _PROMPTS), *args, *kwargs.values())
        if isinstance(value, torch.Tensor) and value.dim()
    ]
    prompt = tensors[0].shape[min(1, tensors[0].dim() - 1)] if tensors else 0
    settings = named.get("generation_config") or getattr(getattr(inner, "__self__", module), "generation_config", None)

    def asked(name: str) -> int | None:
        value = named.get(name)
        return getattr(settings, name, None) if value is None else value

    new, most = asked("max_new_tokens"), asked("max_length")
    return prompt, prompt + new if new is not None else max(prompt, most or 0)
