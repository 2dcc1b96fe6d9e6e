"""Calls of ``generate``: how long they are, and how they reach the other ranks that share layers.

Ranks that share layers generate together, for each of them in turn, just as it would alone.
"""

import inspect
import pickle
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from deepspeed.accelerator.device import map_tensors
from deepspeed.errors import UsageError

_PROMPTS = ("input_ids", "inputs_embeds", "inputs")  # as generate() of Transformers calls them


class GenerateCall(NamedTuple):
    """Arguments of one call of ``generate``."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def packed(self) -> bytes:
        """Return the call as bytes for other ranks. Raises UsageError for an argument that cannot be sent."""
        on_device: list[bool] = []

        def add(tensor: torch.Tensor) -> torch.Tensor:
            on_device.append(tensor.device.type != "cpu")
            return tensor.detach().cpu().clone()  # a view would bring its whole storage

        try:
            return pickle.dumps((map_tensors(tuple(self), add), on_device))
        except Exception as error:
            raise UsageError(
                "hybrid_engine.inference_tp_size: ranks that share layers generate for each other, and an argument of "
                f"generate() cannot be sent to them ({type(error).__name__}: {error}); leave it out, or set that to 1"
            ) from error

    @classmethod
    def unpacked(cls, data: bytes, device: torch.device) -> "GenerateCall":
        """Restore another rank's packed call, with tensors on ``device`` where they were on that rank's device."""
        call, on_device = pickle.loads(data)
        flags = iter(on_device)
        return cls(*map_tensors(call, lambda tensor: tensor.to(device) if next(flags) else tensor))


def innermost(module: Any, generate: Callable[..., Any]) -> Callable[..., Any]:
    """Return the ``generate`` that runs in the end: PEFT's passes everything on to that of the model inside."""
    inner = module.get_base_model() if hasattr(module, "peft_config") and hasattr(module, "get_base_model") else module
    return generate if inner is module else getattr(inner, "generate", generate)


def _named(inner: Callable[..., Any], call: GenerateCall) -> dict[str, Any] | None:
    """Return the arguments by name; None where the call itself will raise."""
    try:
        bound = inspect.signature(inner).bind_partial(*call.args, **call.kwargs)
    except TypeError:
        return None
    bound.apply_defaults()
    return {**bound.arguments, **bound.arguments.get("kwargs", {})}


def _asked(named: dict[str, Any], settings: Sequence[Any], name: str) -> Any:
    """Return the value of an argument, else that of the first of ``settings`` that has one."""
    values = (named.get(name), *(getattr(one, name, None) for one in settings))
    return next((value for value in values if value is not None), None)


def lengths(module: nn.Module, generate: Callable[..., Any], call: GenerateCall) -> tuple[int, int]:
    """Return the tokens of the prompt of a call of ``generate``, and the most tokens with new ones; as far as the
    arguments, or the ``generation_config`` that they or the model have, say; else transformers' 20 new ones.
    """
    inner = innermost(module, generate)
    if (named := _named(inner, call)) is None:
        return 0, 0
    tensors = [
        value
        for value in (*map(named.get, _PROMPTS), *call.args, *call.kwargs.values())
        if isinstance(value, torch.Tensor) and value.dim()
    ]
    prompt = tensors[0].shape[min(1, tensors[0].dim() - 1)] if tensors else 0
    receiver: Any = getattr(inner, "__self__", module)
    defaults: Any = getattr(receiver, "generation_config", None)
    asked = partial(_asked, named, (named.get("generation_config"), defaults))
    new, most = asked("max_new_tokens"), asked("max_length")
    if new is None and most is None and hasattr(defaults, "_get_default_generation_params"):
        # transformers' limit where nobody gives one; called max_length, it is of new tokens
        new = defaults._get_default_generation_params().get("max_length")
        places = getattr(getattr(receiver, "config", None), "max_position_embeddings", None)
        new = new if new is None or places is None else max(0, min(new, places - prompt))
    return prompt, prompt + new if new is not None else max(prompt, most or 0)


def _comparable(value: Any) -> Any:
    """Return a text that is equal where two arguments say the same; None where that cannot be known."""
    if hasattr(value, "to_dict"):
        return repr(sorted(value.to_dict().items(), key=lambda item: item[0]))
    numbers = value if isinstance(value, list | tuple) else (value,)
    return repr(value) if all(isinstance(number, int | float | str) for number in numbers) else None


def settings_of(module: nn.Module, generate: Callable[..., Any]) -> str:
    """Return the model's own settings of how it generates, as text for ``check_alike``."""
    model = getattr(innermost(module, generate), "__self__", module)
    return f"{_comparable(getattr(model, 'generation_config', None))}, training {module.training}"


def check_alike(settings: Sequence[str], ranks: Sequence[int]) -> None:
    """Raise UsageError where ``settings_of`` ranks that share layers differ: they would not do the same."""
    other = next((rank for rank, theirs in zip(ranks, settings, strict=True) if theirs != settings[0]), None)
    if other is not None:
        raise UsageError(
            f"ranks {ranks[0]} and {other} share every layer while they generate (hybrid_engine.inference_tp_size), "
            "and their models have other generation_configs, or one is in train mode; make them equal, or pass what "
            "differs as arguments of generate()"
        )
