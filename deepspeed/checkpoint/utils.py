"""Preparing state for ``torch.save``."""

from typing import Any

import torch

from deepspeed.accelerator.device import map_tensors
from deepspeed.client.zero.gathered import GatheredParameters
from deepspeed.tensor.parts import divided_at


def clone_tensors_for_torch_save(item: Any, device: str | torch.device = torch.device("cpu")) -> Any:
    """Copy the nested ``item``; its tensors are detached, on ``device``, and own exactly their elements.

    ``torch.save`` writes whole storages: a view of a large flat buffer would drag the buffer into the file. Layers
    and stacked experts of which a rank has a part come back whole; the call is collective then.
    """

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        part = divided_at(tensor)
        if part is None:
            return tensor.detach().to(device, copy=True)
        with GatheredParameters([part]):
            return part.detach().to(device, copy=True)

    return map_tensors(item, copy)
