"""Whole 16-bit weights out of a sharded model, unit by unit, on the first rank."""

from collections.abc import Iterator

import torch
from torch import nn

from deepspeed.zero.unit import Unit


def consolidated_state_dict(module: nn.Module, *, keep: bool, exclude_frozen: bool) -> dict[str, torch.Tensor] | None:
    """Parameters and persistent buffers by name as CPU tensors, tied names sharing one; None without ``keep``.

    Collective over the units' ranks. One unit is gathered at a time.
    """
    tensors, aliases = state_names(module, exclude_frozen=exclude_frozen)
    kept: dict[str, torch.Tensor] = {}
    for name, values in whole_weights(module, tensors):
        if keep:
            kept[name] = values.detach().to("cpu", copy=True)
    return {**{n: kept[n] for n in tensors}, **{n: kept[real] for n, real in aliases.items()}} if keep else None


def state_names(module: nn.Module, *, exclude_frozen: bool) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Parameters and persistent buffers by name, each once, and the further names of tied ones."""
    tensors: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        if exclude_frozen and not param.requires_grad:
            continue
        if id(param) in first:
            aliases[name] = first[id(param)]
        else:
            first[id(param)], tensors[name] = name, param
    return tensors | persistent_buffers(module), aliases


def persistent_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that belong to a module's state, by their names there."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, child in module.named_modules()
        for name, buffer in child._buffers.items()
        if buffer is not None and name not in child._non_persistent_buffers_set
    }


def whole_weights(module: nn.Module, tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Each of ``tensors`` (of ``state_names``) with its whole values, valid until the next unit's. Collective."""
    names = {id(t): n for n, t in tensors.items()}
    units: dict[Unit, None] = dict.fromkeys(p._ds_unit for p in module.parameters() if hasattr(p, "_ds_unit"))
    for unit in sorted(units, key=lambda unit: unit.index):
        unit.pin()
        try:
            for param in unit.params:
                if id(param) in names:
                    yield names.pop(id(param)), param
        finally:
            unit.unpin()
    for name in names.values():
        yield name, tensors[name]
