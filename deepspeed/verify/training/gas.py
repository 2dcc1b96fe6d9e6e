"""The accumulation gate: however a global batch is split over ranks, micro-batches and accumulation, the gradient and
the reported loss are those of the whole batch in one process.

Ragged rows have micro-batches of unequal size; there the caller weighs each by its count and says
``scale_wrt_gas=False``, so that nothing divides a second time. In rows of tokens every sample has a count of its own,
one micro-batch of the last split none at all, and ``"normalize": "tokens"`` weighs them: there the norm and the
parameters after the update are compared, as the gradient is divided with it.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from deepspeed.precision.token_weights import IGNORED
from deepspeed.verify.common import Printout
from deepspeed.verify.grads import Cell, full_gradients, full_parameters, scaled_error, start_engine
from deepspeed.verify.models import IN_FEATURES, OUT_FEATURES, SEQUENCE, VOCABULARY, Case, Tied, case_named, seeded
from deepspeed.verify.ranks import RankPool
from deepspeed.verify.reference import train_reference, trainable

BATCH = 8
SPLITS = ((1, 8, 1), (2, 2, 2), (4, 1, 2), (1, 1, 8))  # ranks, samples of a micro-batch, accumulation
RAGGED = (3, 1, 2, 2)  # samples of the micro-batches of 2 ranks, in order
LABELS = (4, 1, 3, 0, 2, 4, 1, 3)  # of each sample


class Labelled(Tied):
    """Returns the mean loss of the labels that count; without one, as torch does, not a number."""

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        assert labels is not None
        return F.cross_entropy(super().forward(tokens).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def _regression() -> tuple[Case, Callable[[Any, slice], Tensor]]:
    """The whole batch as a case, and the loss of some rows of it."""
    generator = torch.Generator().manual_seed(7)
    x, y = (torch.randn(BATCH, width, generator=generator) for width in (IN_FEATURES, OUT_FEATURES))
    return case_named("plain", batch=lambda place: (x, y)), lambda model, rows: F.mse_loss(model(x[rows]), y[rows])


def token_batch() -> tuple[Case, Callable[[Any, slice], Tensor]]:
    """The same of labels of which most samples lack some."""
    generator = torch.Generator().manual_seed(7)
    tokens, labels = torch.randint(VOCABULARY, (2, BATCH, SEQUENCE), generator=generator)
    for row, count in enumerate(LABELS):
        labels[row, count:] = IGNORED

    def loss(model: Any, rows: slice) -> Tensor:
        value: Tensor = model(tokens[rows], labels=labels[rows])
        return value

    build = seeded(Labelled)
    return Case("tokens", build, lambda _: slice(None), lambda model, rows, _: [loss(model, rows)]), loss


def run_split(stage: int, micro: int, steps: int, kind: str) -> tuple[float, float]:
    """Errors of the mean loss and of the update on the ranks of this process group. Collective."""
    whole, loss_of = token_batch() if kind == "tokens" else _regression()
    (record,) = train_reference(whole, world=1, steps=1)
    world, rank = dist.get_world_size(), dist.get_rank()
    settings = Cell("plain", stage=stage, bucket="tiny").settings(replace(whole, accumulation=steps))
    settings |= {
        "train_micro_batch_size_per_gpu": micro,
        "normalize": "tokens" if kind == "tokens" else "micro_batches",
    }
    engine: Any = start_engine(whole, settings)
    ends = [0, *accumulate(RAGGED if kind == "ragged" else [micro] * world * steps)]
    total, grads = torch.zeros(()), dict[str, Tensor]()
    for index in range(steps):
        rows = slice(*ends[index * world + rank :][:2])
        weights = LABELS if kind == "tokens" else (1,) * BATCH
        loss, share = loss_of(engine, rows), sum(weights[rows]) / sum(weights)
        total += share * loss.detach() if share else 0.0
        if kind == "ragged":
            engine.backward(loss * share * world, scale_wrt_gas=False)
        else:
            engine.backward(loss)
        if index == steps - 1 and kind != "tokens":
            grads = full_gradients(trainable(engine.module))
        engine.step()
    errors = [scaled_error(grad, record.grads[name]) for name, grad in grads.items()]
    errors += [scaled_error(value, record.params[name]) for name, value in full_parameters(engine.module).items()]
    errors += [abs(engine.get_global_grad_norm() - record.grad_norm) / max(1.0, record.grad_norm)]
    engine.destroy()
    dist.all_reduce(total)
    return abs(float(total - record.losses[0, 0][0])), max(errors)


def run(options: argparse.Namespace, report: Printout) -> int:
    for ranks, micro, steps in SPLITS:
        with RankPool(ranks, time_limit=options.time_limit) as pool:

            def check(*given: Any, pool: RankPool = pool) -> tuple[str, str]:
                loss, update = map(max, zip(*pool.run(run_split, *given), strict=True))
                errors = f"error of the loss {loss:.1e}, of the gradients {update:.1e}"
                return f"{errors}  ok", "" if max(loss, update) <= options.tolerance else errors

            kinds = ["samples", "tokens", *(["ragged"] if len(RAGGED) == ranks * steps else [])]
            for kind in kinds:
                for stage in range(4):
                    text = f"{ranks} ranks x {micro} {kind:<7} x accumulation {steps}  stage {stage}"
                    report.row(text, check, stage, micro, steps, kind)
    return report.end(f"a batch of {BATCH} in {len(SPLITS)} splits", "all equal to the whole batch")
