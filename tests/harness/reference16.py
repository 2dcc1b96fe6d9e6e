"""A plain one-process trainer with 16-bit weights and an fp32 master copy: the definition of mixed precision here.

Each micro-batch is back-propagated in the compute dtype with the loss multiplied by ``scale / accumulation``. The
16-bit gradients of the micro-batches are added in ``accumulate`` precision, the ranks' sums are added in fp32, and
the optimizer steps the fp32 master, whose rounding is the new weight.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from deepspeed.tools.verify.models import Case, MicroBatch
from deepspeed.tools.verify.reference import GATE_ADAM, clip_factor, global_norm


@dataclass(frozen=True)
class Run16:
    """Per step: losses by (rank, micro), averaged unscaled gradients, norm; and the final fp32 master weights and
    buffers.
    """

    losses: list[dict[tuple[int, int], float]]
    grads: list[dict[str, Tensor]]
    norms: list[float]
    masters: dict[str, Tensor]
    buffers: dict[str, Tensor]


def lowered(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """``model`` with its parameters in ``dtype``, buffers as they are, and batch norms, which want both in one, in
    fp32.
    """
    for module in model.modules():
        for param in module.parameters(recurse=False):
            param.data = param.data.to(torch.float32 if isinstance(module, nn.BatchNorm1d) else dtype)
    return model


def rounded(case: Case, dtype: torch.dtype) -> Case:
    """The case with initial weights that ``dtype`` can hold, so that master copies agree however they are made."""
    build = case.build

    def build_rounded() -> nn.Module:
        model = build()
        for param in model.parameters():
            param.data = param.data.to(dtype).float()
        return model

    return replace(case, build=build_rounded)


def train_16bit(
    case: Case,
    *,
    world: int,
    dtype: torch.dtype,
    steps: int = 3,
    scale: float = 1.0,
    accumulate: torch.dtype = torch.float32,
) -> Run16:
    """Train ``case`` (see :func:`rounded`) for ``steps`` optimizer steps as ``world`` ranks would."""
    model = case.build().train()
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    masters = {name: p.detach().clone().requires_grad_() for name, p in params.items()}
    lowered(model, dtype)
    optimizer = torch.optim.AdamW(masters.values(), **GATE_ADAM)
    run = Run16([], [], [], {}, dict(model.named_buffers()))
    for step in range(steps):
        total = {name: torch.zeros_like(master) for name, master in masters.items()}
        losses: dict[tuple[int, int], float] = {}
        for rank in range(world):
            local = {name: torch.zeros_like(m, dtype=accumulate) for name, m in masters.items()}
            for micro in range(case.accumulation):
                (loss,) = case.seeded_loss(model, MicroBatch(step, micro, rank, world))
                (loss * (scale / case.accumulation)).backward()
                losses[rank, micro] = float(loss.detach())
                for name, param in params.items():
                    if param.grad is not None:
                        local[name] += param.grad.to(accumulate)
                    param.grad = None
            for name, grad in local.items():
                total[name] += grad.float()
        grads = {name: grad / (world * scale) for name, grad in total.items()}
        norm = global_norm(grads)
        divisor = clip_factor(norm, case.clipping)
        for name, master in masters.items():
            master.grad = grads[name] / divisor
        optimizer.step()
        with torch.no_grad():
            for name, param in params.items():
                param.copy_(masters[name])
        run.losses.append(losses)
        run.grads.append(grads)
        run.norms.append(norm)
    run.masters.update({name: master.detach() for name, master in masters.items()})
    return run
