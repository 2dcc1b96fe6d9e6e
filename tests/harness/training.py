"""Shared pieces of the multi-rank tests: configurations, engines and the comparison of parameters."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepspeed
from deepspeed.tools.verify.grads import full_parameters, scaled_error
from deepspeed.tools.verify.models import SAMPLES, Case, MicroBatch
from deepspeed.tools.verify.reference import GATE_ADAM

STAGES = (0, 1, 2, 3)
ADAMW = {"type": "AdamW", "params": {**GATE_ADAM, "betas": list(GATE_ADAM["betas"])}}


def make_config(stage: int, **changes: Any) -> dict[str, Any]:
    """A small fp32 configuration without clipping; ``changes`` replace or add top-level keys (None removes one).

    The persistence threshold lies between biases and weights of the small models, so stage 3 has both kinds.
    """
    zero = {"stage": stage, "param_persistence_threshold": 20, "reduce_bucket_size": 200, **changes.pop("zero", {})}
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        "optimizer": ADAMW,
        **changes,
    }
    return {key: value for key, value in config.items() if value is not None}


def start(model: nn.Module, config: dict[str, Any], **kwargs: Any) -> Any:
    """``deepspeed.initialize`` and the engine alone."""
    return deepspeed.initialize(model=model, config=config, **kwargs)[0]


def here(step: int, micro: int = 0) -> MicroBatch:
    """The place of this rank."""
    return MicroBatch(step, micro, dist.get_rank(), dist.get_world_size())


def train_step(engine: Any, case: Case, step: int) -> list[float]:
    """One optimizer step of ``case`` with ``engine.backward``; the losses of this rank."""
    values = []
    for micro in range(case.accumulation):
        losses = case.seeded_loss(engine, here(step, micro))
        for loss in losses:
            engine.backward(loss)
            values.append(float(loss.detach()))
        case.after_backward(engine.module, here(step, micro))
        engine.step()
    return values


def plain_train(
    case: Case, optimizer_of: Callable[[nn.Module], Any], *, steps: int, world: int | None = None
) -> dict[str, Tensor]:
    """The parameters after ``steps`` plain steps over the data of every rank (no clipping).

    ``optimizer_of(model)`` returns an object with ``step()`` and ``zero_grad()``; learning-rate schedules go into
    ``step``.
    """
    world = dist.get_world_size() if world is None else world
    model = case.build().train()
    optimizer = optimizer_of(model)
    for step in range(steps):
        for rank in range(world):
            for micro in range(case.accumulation):
                losses = case.seeded_loss(model, MicroBatch(step, micro, rank, world))
                case.backward([loss * (1.0 / (world * case.accumulation)) for loss in losses], Tensor.backward)
        for param in model.parameters():
            if param.requires_grad and param.grad is None:
                param.grad = torch.zeros_like(param)
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def parameter_error(model: nn.Module, expected: dict[str, Tensor]) -> tuple[float, str]:
    """The largest scaled error over all parameters of a (sharded) model, and the name it belongs to. Collective."""
    errors = {
        name: scaled_error(value.float(), expected[name].float()) for name, value in full_parameters(model).items()
    }
    worst = max(errors, key=lambda name: errors[name])
    return errors[worst], worst


def outcome(function: Callable[[], Any]) -> str:
    """The class name and text of what ``function`` raises, or "" when it returns."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__mro__}: {error}"
    return ""
