"""Whole 16-bit weights out of a sharded model, unit by unit, on the first rank."""

from typing import Any

import torch
from torch import nn

from deepspeed.zero.unit import Unit


def consolidated_state_dict(module: nn.Module, *, keep: bool, exclude_frozen: bool) -> dict[str, torch.Tensor] | None:
    """Parameters and persistent buffers by name as CPU tensors; tied names share one tensor. Collective over the units' ranks.

    Every rank takes part; only ranks with ``keep`` get the dict, the others None. One unit is gathered at a time.
    """
    copies: dict[int, torch.Tensor] = {}
    for unit in _units(module):
        unit.pin()
        if keep:
            for param in unit.params:
                copies[id(param)] = param.detach().to("cpu", copy=True)
        unit.unpin()
    if not keep:
        return None
    found: dict[str, torch.Tensor] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        if not (exclude_frozen and not param.requires_grad):
            found[name] = copies[id(param)] if id(param) in copies else param.detach().to("cpu", copy=True)
    for prefix, child in module.named_modules():
        for name, buffer in child._buffers.items():
            if buffer is not None and name not in child._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer.detach().to("cpu", copy=True)
    return found


def _units(module: nn.Module) -> list[Unit]:
    units: dict[int, Any] = {}
    for param in module.parameters():
        unit = getattr(param, "_ds_unit", None)
        if unit is not None:
            units[id(unit)] = unit
    return sorted(units.values(), key=lambda u: u.order)
