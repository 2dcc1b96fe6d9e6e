"""Checkpoint helpers. ``diff_live`` brings most of the package with it, so it is imported when it is first used."""

from typing import TYPE_CHECKING, Any

from deepspeed.checkpoint.format.names import (
    get_layer_ckpt_name_for_rank,
    get_model_ckpt_name_for_rank,
    get_zero_ckpt_name_for_rank,
)
from deepspeed.checkpoint.utils import clone_tensors_for_torch_save

if TYPE_CHECKING:
    from deepspeed.checkpoint.load.compare import diff_live

__all__ = [
    "clone_tensors_for_torch_save",
    "diff_live",
    "get_layer_ckpt_name_for_rank",
    "get_model_ckpt_name_for_rank",
    "get_zero_ckpt_name_for_rank",
]


def __getattr__(name: str) -> Any:
    if name != "diff_live":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    from deepspeed.checkpoint.load.compare import diff_live  # noqa: PLC0415 - lower layers import modules of this package

    return diff_live
