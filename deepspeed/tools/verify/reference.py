"""A plain one-process PyTorch trainer: the definition of the right answer.

It evaluates the micro-batches of every rank in one process, averages the gradients over ranks and accumulation,
and steps an ordinary ``torch.optim`` optimizer. No code is shared with the engine.

A parameter that received no gradient counts as having a gradient of zero, exactly as in a plain loop that uses
``optimizer.zero_grad(set_to_none=False)``: weight decay and momentum still act on it. (With ``set_to_none=True`` torch
skips such a parameter, and whether it is skipped would depend on which rank happened to use it.)
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.tools.verify.models import Case, Losses, MicroBatch


@dataclass(frozen=True)
class StepRecord:
    """Expected result of an optimizer step: gradients averaged and unclipped, parameters from after the step."""

    losses: dict[tuple[int, int], Losses]  # (rank, micro) -> the losses there
    grads: dict[str, Tensor]
    grad_norm: float
    params: dict[str, Tensor]


# [Note: the gate's Adam settings]
# Adam's first step is g / (|g| + eps): with the usual eps of 1e-8 it is the sign of the gradient, and a rounding
# difference of 1e-9 in a gradient near zero moves the parameter by a whole learning rate. Then a parameter
# comparison measures rounding, not correctness. The slope of the update is at most lr / eps; with both equal to
# 1e-2 it is 1, so an error of the parameters after n steps is at most about n times an error of the gradients.
# The weight decay is not zero so that unused parameters take part.
GATE_ADAM: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-2, "weight_decay": 0.1}


def gate_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Make AdamW over every trainable parameter with the settings of [Note: the gate's Adam settings]."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **GATE_ADAM)


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return name -> trainable parameter; a tied parameter appears once, under its first name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def global_norm(grads: dict[str, Tensor]) -> float:
    """Return the L2 norm over all gradients, in fp64."""
    return float(sum(float(g.double().square().sum()) for g in grads.values()) ** 0.5)


def clip_factor(norm: float, limit: float) -> float:
    """Return the divisor of gradients: (norm + 1e-6) / limit when above 1, else 1; a limit of 0 disables."""
    return max(1.0, (norm + 1e-6) / limit) if limit > 0 else 1.0


def train_reference(case: Case, *, world: int, steps: int = 3) -> list[StepRecord]:
    """Train ``case`` for ``steps`` optimizer steps as ``world`` ranks would, in this process, in fp32."""
    model = case.build().train()
    optimizer = (case.optimizer or gate_optimizer)(model)
    params = trainable(model)
    records = []
    for step in range(steps):
        losses: dict[tuple[int, int], Losses] = {}
        for rank in range(world):
            for micro in range(case.accumulation):
                place = MicroBatch(step, micro, rank, world)
                values = case.seeded_loss(model, place)
                case.backward([value * (1.0 / (world * case.accumulation)) for value in values], Tensor.backward)
                case.after_backward(model, place, share=1.0 / world)
                losses[rank, micro] = [value.detach().clone() for value in values]
        grads = {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in params.items()}
        norm = global_norm(grads)
        for name, param in params.items():
            param.grad = grads[name] / clip_factor(norm, case.clipping)
        optimizer.step()
        optimizer.zero_grad()
        after = {name: p.detach().clone() for name, p in model.named_parameters()}
        records.append(StepRecord(losses=losses, grads=grads, grad_norm=norm, params=after))
    return records
