"""Preparing state for ``torch.save``."""

from typing import Any

import torch

from deepspeed.data.move import map_tensors


def clone_tensors_for_torch_save(item: Any, device: str | torch.device = torch.device("cpu")) -> Any:
    """Copy of the nested ``item`` whose tensors are detached, on ``device``, and own exactly their elements.

    ``torch.save`` writes whole storages: a view of a large flat buffer would drag the buffer into the file.
    """
    return map_tensors(item, lambda tensor: _compact(tensor, torch.device(device)))


def _compact(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    moved = tensor.detach().to(device)
    shares_memory = moved.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    larger = moved.untyped_storage().nbytes() != moved.numel() * moved.element_size()
    return moved.clone() if shares_memory or larger else moved
