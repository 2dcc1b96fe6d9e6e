"""Moving nested containers of tensors between devices."""

import copy
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch


def map_tensors(item: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """``item`` with ``function`` applied to every tensor in its dicts, lists and (named) tuples; anything else is kept.

    Mutable mappings (as tokenizers return) keep their type, other mappings become dicts.
    """
    if isinstance(item, torch.Tensor):
        return function(item)
    if isinstance(item, Mapping):
        mapped = {key: map_tensors(value, function) for key, value in item.items()}
        if type(item) is dict or not isinstance(item, MutableMapping):
            return mapped
        twin = copy.copy(item)  # keeps what a constructor would not take: a default factory, a tokenizer's encodings
        twin.update(mapped)
        return twin
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return type(item)(*(map_tensors(value, function) for value in item))
    if isinstance(item, list | tuple):
        return type(item)(map_tensors(value, function) for value in item)
    return item


def move_to_device(
    item: Any, device: str | torch.device, criterion_func: Callable[[torch.Tensor], bool] | None = None
) -> Any:
    """Copy of the nested ``item`` with its tensors on ``device``; ``criterion_func`` selects which (all by default)."""
    chosen = criterion_func or (lambda _tensor: True)
    return map_tensors(item, lambda tensor: tensor.to(device) if chosen(tensor) else tensor)
