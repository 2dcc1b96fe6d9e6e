"""Questions about parameters of experts, and optimizer groups of them."""

from collections.abc import Iterable
from typing import Any

import torch

GROUP_NAME = "ep_size_{}"
"""Name of the experts, in ``parameter.group_name``, that so many ranks divide among themselves."""


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
    """Return ``model_parameters`` (parameters, or groups of them) as groups, those of experts apart."""
    items = list(model_parameters)
    groups = items if items and isinstance(items[0], dict) else [{"params": items}]
    return split_params_into_different_moe_groups_for_optimizer(groups)


def stacked_experts(module: torch.nn.Module) -> int:
    """Return how many experts ``module`` stacks in each of its own parameters (experts first); 0 where it does not."""
    number = getattr(module, "num_experts", 0)
    shapes = [tuple(param.shape) for param in module.parameters(recurse=False)]
    stacked = isinstance(number, int) and all(shape and shape[0] == number for shape in shapes)
    return int(number) if stacked and max(map(len, shapes), default=0) >= 3 else 0  # a router has a row for each


def has_moe_layers(model: torch.nn.Module) -> tuple[bool, int]:
    """Return (whether there is a layer of experts, number of experts of the last one)."""
    numbers = [m.num_experts for m in model.modules() if getattr(m, "is_mixture_of_experts", False)]
    return bool(numbers), int(numbers[-1]) if numbers else 0  # type: ignore[arg-type]


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | Iterable[dict[str, Any]], max_group_size: float = 178956971
) -> list[dict[str, Any]]:
    """Return ``param_groups`` with the parameters of experts in groups of their own, after the others.

    Such a group has the options of the one that it was in, ``"moe": True``, as ``"name"`` the parameters'
    ``group_name``, and at most ``max_group_size`` elements (None: any number), but one parameter at least.
    """
    groups = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    shared, split = [], []
    for group in groups:
        dense, experts = split_params_into_shared_and_expert_params(group["params"])
        shared.append({**group, "params": dense})
        by_name: dict[str, list[torch.Tensor]] = {}
        for param in experts:
            by_name.setdefault(getattr(param, "group_name", GROUP_NAME.format(1)), []).append(param)
        for name, params in by_name.items():
            split += [{**group, "params": some, "name": name, "moe": True} for some in _pieces(params, max_group_size)]
    return shared + split


def _pieces(params: list[torch.Tensor], most: float | None) -> list[list[torch.Tensor]]:
    """Cut ``params`` into lists of at most ``most`` elements."""
    pieces: list[list[torch.Tensor]] = [[]]
    numel = 0
    for param in params:
        if most is not None and pieces[-1] and numel + param.numel() > most:
            pieces.append([])
            numel = 0
        pieces[-1].append(param)
        numel += param.numel()
    return pieces
