"""Questions about mixture-of-experts parameters; nothing is an expert parameter in this release."""

from collections.abc import Iterable
from typing import Any

import torch

from deepspeed.errors import raise_not_yet


def is_moe_param(param: torch.Tensor) -> bool:
    """Tell whether ``param`` is an expert parameter, which is not reduced over all data-parallel ranks."""
    return not getattr(param, "allreduce", True)


def is_moe_param_group(param_group: dict[str, Any]) -> bool:
    """Tell whether an optimizer group holds expert parameters."""
    return bool(param_group.get("moe", False))


def split_params_into_shared_and_expert_params(
    params: Iterable[torch.Tensor],
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Split parameters into (shared by all ranks, expert parameters of some ranks)."""
    kinds: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
    for param in params:
        kinds[is_moe_param(param)].append(param)
    return kinds


def split_params_grads_into_shared_and_expert_params(
    group: Iterable[torch.Tensor],
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the gradients of ``group`` as (shared, expert); parameters without a gradient are left out."""
    shared, experts = split_params_into_shared_and_expert_params(p for p in group if p.grad is not None)
    return [p.grad for p in shared if p.grad is not None], [p.grad for p in experts if p.grad is not None]


def configure_moe_param_groups(model_parameters: Iterable[Any]) -> list[dict[str, Any]]:
    """Return ``model_parameters`` (parameters, or groups) as groups; NotYetError where there are expert parameters."""
    items = list(model_parameters)
    groups = items if items and isinstance(items[0], dict) else [{"params": items}]
    return split_params_into_different_moe_groups_for_optimizer(groups)


def has_moe_layers(model: torch.nn.Module) -> tuple[bool, int]:
    """Return (whether there is any expert-parallel layer, number of experts)."""
    return False, 0


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | Iterable[dict[str, Any]], max_group_size: float = 178956971
) -> list[dict[str, Any]]:
    """Return the groups unchanged, as a list; NotYetError for expert parameters (``is_moe_param``)."""
    groups = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    if any(is_moe_param(param) for group in groups for param in group["params"]):
        raise_not_yet("an optimizer group of experts (a parameter has allreduce = False)")
    return groups
