"""Questions about mixture-of-experts parameters; nothing is an expert parameter in this release."""

from collections.abc import Iterable
from typing import Any

import torch

from deepspeed.errors import raise_not_yet


def is_moe_param(param: torch.Tensor) -> bool:
    """True for parameters that are not reduced over all data-parallel ranks."""
    return not getattr(param, "allreduce", True)


def has_moe_layers(model: torch.nn.Module) -> tuple[bool, int]:
    """(any expert-parallel layer, number of experts)."""
    return False, 0


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | Iterable[dict[str, Any]], max_group_size: float = 178956971
) -> list[dict[str, Any]]:
    """The groups as they are, in a list, since no parameter belongs to experts of some ranks only. NotYetError where
    one does (``is_moe_param``). ``max_group_size`` counts elements of a group of experts.
    """
    groups = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    if any(is_moe_param(param) for group in groups for param in group["params"]):
        raise_not_yet("an optimizer group of experts (a parameter has allreduce = False)")
    return groups
