"""Calls of ``generate``: how long they are, and how several ranks' become one, or follow each other.

Ranks that share layers generate the same. What each of them was given is generated in turn, just as it would alone;
in one batch where the result is known to be the same: by the ``generate`` of Transformers, for a decoder, with
arguments that say no more than how many tokens, and how they are drawn. Shorter prompts are filled up on the left.
"""

import inspect
import pickle
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from deepspeed.device import map_tensors
from deepspeed.errors import UsageError

_PROMPTS = ("input_ids", "inputs_embeds", "inputs")  # as generate() of Transformers calls them
_LENGTHS = ("max_new_tokens", "max_length", "eos_token_id", "pad_token_id", "num_return_sequences")
_DRAWING = ("do_sample", "temperature", "top_k", "top_p", "min_p")
_BATCHED = frozenset((*_LENGTHS, *_DRAWING, "use_cache", "synced_gpus", "generation_config"))
_WITHOUT_EFFECT = frozenset(("bos_token_id", "transformers_version", "_from_model_config", "_commit_hash"))


class GenerateCall(NamedTuple):
    """Arguments of one call of ``generate``."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def packed(self) -> bytes:
        """For other ranks. Raises UsageError for an argument that cannot be sent."""
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
        """What another rank has packed, its tensors on this ``device`` where they were on that one's."""
        call, on_device = pickle.loads(data)
        flags = iter(on_device)
        return cls(*map_tensors(call, lambda tensor: tensor.to(device) if next(flags) else tensor))


def innermost(module: Any, generate: Callable[..., Any]) -> Callable[..., Any]:
    """The method that generates in the end: PEFT's passes everything on to that of the model inside."""
    inner = module.get_base_model() if hasattr(module, "peft_config") and hasattr(module, "get_base_model") else module
    return generate if inner is module else getattr(inner, "generate", generate)


def _named(inner: Callable[..., Any], call: GenerateCall) -> dict[str, Any] | None:
    """The arguments by name; None where the call itself will raise."""
    try:
        bound = inspect.signature(inner).bind_partial(*call.args, **call.kwargs)
    except TypeError:
        return None
    bound.apply_defaults()
    return {**bound.arguments, **bound.arguments.get("kwargs", {})}


def _asked(named: dict[str, Any], settings: Sequence[Any], name: str) -> Any:
    """What an argument says, else the first of ``settings`` that does."""
    values = (named.get(name), *(getattr(one, name, None) for one in settings))
    return next((value for value in values if value is not None), None)


def lengths(module: nn.Module, generate: Callable[..., Any], call: GenerateCall) -> tuple[int, int]:
    """Tokens of the prompt that a call of ``generate`` is given, and most tokens with what it makes; as far as the
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


class OneBatch(NamedTuple):
    """``call``: the prompts of all ranks, filled up on the left to ``width`` tokens; ``rows``: of the first rank, the
    second and so on; ``tokens``: of each rank's prompts. ``ends``, ``fill``: tokens that end a row, and follow that.
    """

    call: GenerateCall
    rows: tuple[int, ...]
    tokens: tuple[int, ...]
    width: int
    ends: tuple[int, ...]
    fill: int | None

    def part(self, output: torch.Tensor, index: int) -> torch.Tensor:
        """What rank ``index`` of the group would have got alone, of all that came out."""
        each = len(output) // sum(self.rows)  # sequences for a prompt
        stops = [0, *accumulate(self.rows)]
        mine = output[stops[index] * each : stops[index + 1] * each, self.width - self.tokens[index] :]
        return self._ended(mine, self.tokens[index]).contiguous()

    def _ended(self, mine: torch.Tensor, tokens: int) -> torch.Tensor:
        """Up to where the last row has ended: the others of the batch went on."""
        made = mine[:, tokens:]
        ended = torch.isin(made, torch.tensor(self.ends, device=made.device, dtype=made.dtype))
        if not self.ends or not bool(ended.any(1).all()):
            return mine
        stop = int(ended.int().argmax(1).max()) + 1
        fills = torch.full_like(made[:, stop:], -1 if self.fill is None else self.fill)
        return mine[:, : tokens + stop] if torch.equal(made[:, stop:], fills) else mine


def one_batch(module: nn.Module, generate: Callable[..., Any], calls: Sequence[GenerateCall]) -> OneBatch | None:
    """All ``calls`` in one, where each gets what it would alone; None: let them follow each other."""
    inner = innermost(module, generate)
    model = getattr(inner, "__self__", module)
    decodes = not getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    if getattr(inner, "__qualname__", "") != "GenerationMixin.generate" or not decodes:
        return None
    prompts, others = list[_Prompts](), list[dict[str, Any]]()
    for call in calls:
        named = _named(inner, call) or {}
        named = {n: v for n, v in named.items() if n not in ("kwargs", "self") and v is not None}
        ids = [named.pop(n) for n in _PROMPTS if n in named]
        mask = named.pop("attention_mask", None)
        if len(ids) != 1 or not _fit(ids[0], mask) or not named.keys() <= _BATCHED:
            return None
        prompts.append(_Prompts(ids[0], mask))
        others.append({n: _comparable(v) for n, v in named.items()} | {"dtype": str(ids[0].dtype)})
        if others[-1] != others[0] or None in others[-1].values():
            return None
    given = named.get("generation_config")
    settings = (given, getattr(model, "generation_config", None))
    if not all(_different(one) <= _BATCHED | _WITHOUT_EFFECT for one in settings):
        return None

    asked = partial(_asked, named, settings)
    end, fill = asked("eos_token_id"), asked("pad_token_id")
    ends = tuple(end) if isinstance(end, list | tuple) else () if end is None else (end,)
    fill = ends[0] if fill is None and ends else fill
    widths = [one.ids.shape[1] for one in prompts]
    if len(set(widths)) > 1 and (fill is None or asked("max_new_tokens") is None):
        return None
    whole = [_filled(one, max(widths), fill, ends) for one in prompts]
    tensors = {"input_ids": torch.cat([ids for ids, _ in whole]), "attention_mask": torch.cat([m for _, m in whole])}
    rows = tuple(len(ids) for ids, _ in whole)
    return OneBatch(GenerateCall((), {**tensors, **named}), rows, tuple(widths), max(widths), ends, fill)


class _Prompts(NamedTuple):
    ids: torch.Tensor
    mask: torch.Tensor | None


def _fit(ids: Any, mask: Any) -> bool:
    tokens = isinstance(ids, torch.Tensor) and ids.dim() == 2 and not ids.is_floating_point() and ids.numel() > 0
    return tokens and (mask is None or (isinstance(mask, torch.Tensor) and mask.shape == ids.shape))


def _comparable(value: Any) -> Any:
    """What is equal where two arguments say the same; None: that cannot be known."""
    if hasattr(value, "to_dict"):
        return repr(sorted(value.to_dict().items(), key=lambda item: item[0]))
    numbers = value if isinstance(value, list | tuple) else (value,)
    return repr(value) if all(isinstance(each, int | float | str) for each in numbers) else None


def _different(settings: Any) -> frozenset[str]:
    """The keys that a ``generation_config`` switches on, or sets."""
    changes: dict[str, Any] = getattr(settings, "to_diff_dict", dict)()
    return frozenset(name for name, value in changes.items() if value not in (None, False))


def settings_of(module: nn.Module, generate: Callable[..., Any]) -> str:
    """What the model itself says of how it generates, for ``check_alike``."""
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


def _filled(prompts: _Prompts, width: int, fill: int | None, ends: tuple[int, ...]) -> list[torch.Tensor]:
    """Token ids and mask, ``width`` wide. Without a mask tokens that only fill up count as Transformers has it."""
    ids, mask = prompts
    if mask is None:
        mask = torch.ones_like(ids) if fill is None or fill in ends else (ids != fill).to(ids)
    more = width - ids.shape[1]
    return [functional.pad(ids, (more, 0), value=fill or 0), functional.pad(mask.to(ids), (more, 0))]
