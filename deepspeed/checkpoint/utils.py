"""Preparing state for ``torch.save``."""

from typing import Any

import torch

from deepspeed.accelerator.device import map_tensors


def clone_tensors_for_torch_save(item: Any, device: str | torch.device = torch.device("cpu")) -> Any:
    """Copy the nested ``item``; its tensors are detached, on ``device``, and own exactly their elements.

    ``torch.save`` writes whole storages: a view of a large flat buffer would drag the buffer into the file.
    """
    return map_tensors(item, lambda tensor: tensor.detach().to(device, copy=True))
