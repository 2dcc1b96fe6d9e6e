"""Questions about mixture-of-experts parameters; nothing is an expert parameter in this release."""

import torch

from deepspeed.errors import pending_function


def is_moe_param(param: torch.Tensor) -> bool:
    """True for parameters that are not reduced over all data-parallel ranks."""
    return not getattr(param, "allreduce", True)


def has_moe_layers(model: torch.nn.Module) -> tuple[bool, int]:
    """(any expert-parallel layer, number of experts)."""
    return False, 0


split_params_into_different_moe_groups_for_optimizer = pending_function(
    "deepspeed.moe.utils.split_params_into_different_moe_groups_for_optimizer"
)
