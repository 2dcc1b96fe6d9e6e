"""Turns a user's ``module:build`` into a verification case; ``ds_verify grads --help`` shows the contract."""

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.tools.verify.models import SAMPLES, SEQUENCE, Case, Losses, MicroBatch, case_named, seeded

BatchFunction = Callable[[int, int, int, int], Any]
LossFunction = Callable[[Any, Any], Tensor]
IMAGE_SIDE = 16


def resolve(reference: str) -> Any:
    """Import ``module:function``; the current folder counts as importable. Raises ValueError with a sentence."""
    name, _, attribute = reference.partition(":")
    if not name or not attribute:
        raise ValueError(
            f"{reference!r} does not name a function; write it as module:function, for example my_model:build"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"cannot import {name!r} (searched from {os.getcwd()}): {error}") from error
    if not hasattr(module, attribute):
        raise ValueError(f"module {name!r} ({module.__file__}) has no attribute {attribute!r}")
    function = getattr(module, attribute)
    if not callable(function):
        raise ValueError(f"{reference} is a {type(function).__name__}, not a function")
    return function


def default_loss(output: Any, batch: Any) -> Tensor:
    """Return the loss an output carries, or the mean of its squares. Raises ValueError without a tensor."""
    carried = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(carried, Tensor):
        return carried
    if isinstance(output, (tuple, list)) and output:
        output = output[0]
    if isinstance(output, dict) and output:
        output = next(iter(output.values()))
    if not isinstance(output, Tensor):
        raise ValueError(
            f"no loss can be derived from an output of type {type(output).__name__}; return a loss_fn from build()"
        )
    return output if output.ndim == 0 else output.float().square().mean()


def invented_batch(model: nn.Module) -> BatchFunction:
    """Invent batches for the first layer of ``model``. Raises ValueError when it says nothing about its input."""
    layer = next((m for m in model.modules() if isinstance(m, (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d))), None)
    if layer is None:
        raise ValueError(f"cannot invent inputs for {type(model).__name__}; let build() return (model, batch_fn)")

    def batch(step: int, micro: int, rank: int, world: int) -> Tensor:
        generator = MicroBatch(step, micro, rank, world).generator()
        if isinstance(layer, nn.Embedding):
            return torch.randint(layer.num_embeddings, (SAMPLES, SEQUENCE), generator=generator)
        if isinstance(layer, nn.Linear):
            return torch.randn(SAMPLES, layer.in_features, generator=generator)
        dims = 2 if isinstance(layer, nn.Conv2d) else 1
        return torch.randn(SAMPLES, layer.in_channels, *([IMAGE_SIDE] * dims), generator=generator)

    return batch


def parts_of(built: Any, reference: str) -> tuple[nn.Module, BatchFunction | None, LossFunction | None]:
    """Split the result of ``build()`` in three. Raises ValueError when it is something else."""
    parts = built if isinstance(built, tuple) else (built,)
    if not 1 <= len(parts) <= 3 or not isinstance(parts[0], nn.Module):
        kinds = ", ".join(type(part).__name__ for part in parts)
        raise ValueError(
            f"{reference} must return a module, (module, batch_fn) or (module, batch_fn, loss_fn), not ({kinds})"
        )
    model, batch, loss = (*parts, None, None)[:3]
    return model, batch, loss


def load_user_case(reference: str) -> Case:
    """Make the case of ``module:build``. Raises ValueError."""
    build = resolve(reference)
    built = seeded(lambda: parts_of(build(), reference))
    model, batch_fn, loss_fn = built()
    batch_of, loss_of = batch_fn or invented_batch(model), loss_fn or default_loss

    def loss(model: nn.Module, batch: Any, place: MicroBatch) -> Losses:
        if isinstance(batch, dict):
            return [loss_of(model(**batch), batch)]
        return [loss_of(model(*batch) if isinstance(batch, tuple) else model(batch), batch)]

    return Case(reference, lambda: built()[0].float(), lambda place: batch_of(*place), loss, clipping=1.0)


def case_of(model: str, config: dict[str, Any]) -> Case:
    """Return the case of a user or of ours with the loop that ``config`` states. Raises ValueError."""
    case = load_user_case(model) if ":" in model else case_named(model)
    accumulation, clipping = config.get("gradient_accumulation_steps"), config.get("gradient_clipping")
    return replace(
        case,
        accumulation=accumulation if isinstance(accumulation, int) else case.accumulation,
        clipping=float(clipping) if isinstance(clipping, (int, float)) else case.clipping,
    )
