"""Norms and clipping of gradients that a client keeps himself, over tensor-parallel ranks where he has an mpu."""

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist


def get_global_norm(norm_list: Iterable[float]) -> float:
    """Return the L2 norm of a whole from the L2 norms of its parts."""
    return math.sqrt(sum(float(norm) ** 2 for norm in norm_list))


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2, mpu: Any = None
) -> torch.Tensor:
    """Multiply the gradients by ``max_norm / norm`` where their norm is larger; returns the norm before, fp32 [].

    With ``mpu`` over all its model-parallel ranks, which have to call alike: a parameter with ``model_parallel`` or
    ``tensor_model_parallel`` True is cut over them, every other one is whole on each, and counts once.
    """
    params = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    given = [(param, param.grad) for param in params if param.grad is not None]
    infinite = math.isinf(norm_type)
    group = None if mpu is None else mpu.get_model_parallel_group()
    first = group is None or dist.get_rank(group) == 0
    norms = [
        torch.linalg.vector_norm(grad.detach().float(), norm_type)
        for param, grad in given
        if first or getattr(param, "model_parallel", False) or getattr(param, "tensor_model_parallel", False)
    ]
    device = given[0][1].device if given else torch.device("cpu")
    stacked = torch.stack([norm.to(device) for norm in norms]) if norms else torch.zeros(1, device=device)
    total = stacked.max() if infinite else stacked.pow(norm_type).sum()
    if group is not None:
        dist.all_reduce(total, dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group=group)
    norm = total if infinite else total.pow(1 / norm_type)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for _, grad in given:
        grad.detach().mul_(factor.to(grad.device, grad.dtype))
    return norm
