"""The loop gate: any legal PyTorch loop gives the numbers that it gives without sharding.

Each row is one shape of a loop at one ZeRO stage, compared as ``ds_verify grads`` does: losses, averaged gradients, the
norm and the parameters after each step, against the same loop in plain one-process PyTorch.
"""

import argparse
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepspeed.verify.common import Printout
from deepspeed.verify.grads import Cell, Errors, run_cell
from deepspeed.verify.models import Case, Losses, MicroBatch, Stack, fields_of, regression_batch, squared_error
from deepspeed.verify.training.table import run_table

Backward = Callable[[Losses, Callable[..., Any]], None]


@dataclass(frozen=True)
class Loop(Case):
    """A case whose losses are back-propagated by ``by``."""

    by: Backward | None = None

    def backward(self, losses: Losses, call: Callable[..., Any]) -> None:
        (self.by or super().backward)(losses, call)


def _error(model: nn.Module, place: MicroBatch, part: int = 0) -> Tensor:
    x, y = regression_batch(place._replace(micro=part))
    return F.mse_loss(model(x), y)


def _inner(model: Any) -> Any:
    return getattr(model, "module", model)


def _varying(model: nn.Module, batch: Any, place: MicroBatch) -> Losses:
    count = 3 - place.step % 3
    return [_error(model, place, part) / count for part in range(count)]


def _two_losses(model: nn.Module, batch: Any, place: MicroBatch) -> Losses:
    out = model(batch[0])
    return [F.mse_loss(out, batch[1]), out.abs().mean()]


def _submodule(model: nn.Module, batch: Any, place: MicroBatch) -> Losses:
    inner = _inner(model)
    return [inner.head(inner.layers[1](inner.inp(batch[0]))).square().mean() + F.mse_loss(model(batch[0]), batch[1])]


def _discarded(model: nn.Module, batch: Any, place: MicroBatch) -> Losses:
    _error(model, place, 1)
    loss = _error(model, place)
    with torch.no_grad():
        _error(model, place, 2)
    return [loss]


def _penalty(model: nn.Module, batch: Any, place: MicroBatch) -> Losses:
    x = batch[0].requires_grad_()
    loss = F.mse_loss(model(x), batch[1])
    return [loss + torch.autograd.grad(loss, x, create_graph=True)[0].square().sum()]


def _truncated(model: nn.Module, batch: Any, place: MicroBatch) -> Losses:
    inner = _inner(model)
    first = inner.layers[0](inner.inp(batch[0]))
    return [first.square().mean(), F.mse_loss(inner.head(inner.layers[2](first.detach())), batch[1])]


def _plain(losses: Losses, call: Callable[..., Any]) -> None:
    for loss in losses:
        loss.backward()


def _not_synchronized(losses: Losses, call: Callable[..., Any]) -> None:
    owner = getattr(call, "__self__", None)  # the engine; a plain backward has none
    with owner.no_sync() if owner is not None else contextlib.nullcontext():
        for loss in losses[:-1]:
            call(loss)
    call(losses[-1])


def _twice(losses: Losses, call: Callable[..., Any]) -> None:
    call(losses[0], retain_graph=True)
    call(losses[0])


# name: the losses of a micro-batch, and how they are back-propagated where not each by the engine
LOOPS: dict[str, tuple[Callable[..., Losses], Backward | None]] = {
    "engine.backward": (squared_error, None),
    "loss.backward": (squared_error, _plain),
    "accumulation of varying length": (_varying, _plain),
    "no_sync": (_varying, _not_synchronized),
    "backwards in reverse": (_varying, lambda losses, call: _plain(losses[::-1], call)),
    "sum of two forwards": (lambda m, b, place: [_error(m, place) + _error(m, place, 1)], None),
    "retain_graph": (squared_error, _twice),
    "two losses, one graph": (_two_losses, None),
    "two losses, one call": (_two_losses, lambda losses, call: torch.autograd.backward(losses)),
    "non-scalar backward": (
        lambda m, b, p: [m(b[0])],
        lambda losses, call: losses[0].backward(torch.ones_like(losses[0])),
    ),
    "submodule outside forward": (_submodule, None),
    "forward thrown away": (_discarded, None),
    "gradient penalty": (_penalty, None),
    "truncated graph": (_truncated, None),
}


def run_loop(name: str, stage: int, steps: int) -> Errors:
    """Train in the loop of this ``name`` on the ranks of this process group; this rank's errors. Collective."""
    loss, by = LOOPS[name]
    case = Loop(**fields_of(name, Stack, {"loss": loss, "by": by}))
    return run_cell(Cell(name, stage=stage, bucket="tiny"), steps=steps, case=case)


def run(options: argparse.Namespace, report: Printout) -> int:
    return run_table(options, report, run_loop, product(LOOPS, range(4)))
