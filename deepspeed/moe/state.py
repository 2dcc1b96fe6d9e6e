"""Experts out of a checkpoint, without an engine, for clients that put a state dict together themselves."""

import os
from typing import Any

import torch
from torch import nn

from deepspeed.client.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from deepspeed.errors import CheckpointError
from deepspeed.moe.utils import is_moe_param

_OF_A_LAYER = ".deepspeed_experts."


def load_moe_state_dict(
    checkpoint_path: str | os.PathLike[str],
    tag: str | None,
    state_dict: dict[str, Any],
    old_moe_load: bool = False,  # noqa: FBT001, FBT002 - the order that clients know
    model: nn.Module | None = None,
    mpu: Any = None,
    num_experts: int | list[int] = 1,
    checkpoint_engine: Any = None,
) -> None:
    """Put the experts of a checkpoint into ``state_dict``, whole and by name, on the CPU. Not collective.

    Args:
        checkpoint_path: Folder with tags; ``tag`` is one of them, or None for the one that ``latest`` names.
        state_dict: Gets the experts, and keeps the rest.
        model: Experts are those that this rank holds of it, in its dtype; None: those of all ``MoE`` layers in fp32.
        old_moe_load: Has no effect, as ``mpu``, ``num_experts`` and ``checkpoint_engine``: files say what they hold.
    """
    saved = get_fp32_state_dict_from_zero_checkpoint(checkpoint_path, tag, lazy_mode=True)
    dtypes: dict[str, torch.dtype | None] = {name: None for name in saved if _OF_A_LAYER in name}
    if model is not None:
        dtypes = {name: p.dtype for name, p in model.named_parameters() if is_moe_param(p) or _OF_A_LAYER in name}
    missing = sorted(dtypes.keys() - saved.keys())
    if missing or not dtypes:
        what = f"lacks {', '.join(missing[:3])} ({len(missing)} in all)" if missing else "has no experts of MoE layers"
        raise CheckpointError(f"load_moe_state_dict: the checkpoint in {checkpoint_path} {what}")
    state_dict.update({name: saved[name].contiguous().to(dtype) for name, dtype in dtypes.items()})
