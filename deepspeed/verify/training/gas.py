"""The accumulation gate: however a global batch is split over ranks, micro-batches and accumulation, the gradient and
the reported loss are those of the whole batch in one process.

Ragged rows have micro-batches of unequal size; there the caller weighs each by its count and says
``scale_wrt_gas=False``, so that nothing divides a second time.
"""

import argparse
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from deepspeed.observe.program import CommandLine
from deepspeed.verify.common import Printout
from deepspeed.verify.grads import TOLERANCE, Cell, full_gradients, scaled_error, start_engine
from deepspeed.verify.models import IN_FEATURES, OUT_FEATURES, case_named
from deepspeed.verify.ranks import RankPool
from deepspeed.verify.reference import train_reference, trainable

BATCH = 8
SPLITS = ((1, 8, 1), (2, 2, 2), (4, 1, 2), (1, 1, 8))  # ranks, samples of a micro-batch, accumulation
RAGGED = (3, 1, 2, 2)  # samples of the micro-batches of 2 ranks, in order


def run_split(stage: int, micro: int, steps: int, ragged: bool) -> tuple[float, float]:
    """Errors of the mean loss and of the gradients on the ranks of this process group. Collective."""
    generator = torch.Generator().manual_seed(7)
    x, y = (torch.randn(BATCH, width, generator=generator) for width in (IN_FEATURES, OUT_FEATURES))
    whole = case_named("plain", batch=lambda place: (x, y))
    (record,) = train_reference(whole, world=1, steps=1)
    world, rank = dist.get_world_size(), dist.get_rank()
    settings = Cell("plain", stage=stage, bucket="tiny").settings(replace(whole, accumulation=steps))
    engine: Any = start_engine(whole, {**settings, "train_micro_batch_size_per_gpu": micro})
    ends = [0, *accumulate(RAGGED if ragged else [micro] * world * steps)]
    total = torch.zeros(())
    for index in range(steps):
        piece = index * world + rank
        rows = slice(ends[piece], ends[piece + 1])
        loss, share = F.mse_loss(engine(x[rows]), y[rows]), (rows.stop - rows.start) * world / BATCH
        total += share * loss.detach() / world
        if ragged:
            engine.backward(loss * share, scale_wrt_gas=False)
        else:
            engine.backward(loss)
        if index < steps - 1:
            engine.step()
    grads = full_gradients(trainable(engine.module))
    engine.step()
    engine.destroy()
    dist.all_reduce(total)
    return abs(float(total - record.losses[0, 0][0])), max(scaled_error(g, record.grads[n]) for n, g in grads.items())


def add_options(parser: CommandLine) -> None:
    """Options of ``ds_verify gas``."""
    parser.option("--time-limit", float, 120.0, "N", "seconds one run may take")
    parser.option("--tolerance", float, TOLERANCE, "N", "largest error allowed")


def run(options: argparse.Namespace, report: Printout) -> int:
    """Run ``ds_verify gas``."""
    for ranks, micro, steps, ragged in (*((*split, False) for split in SPLITS), (2, 2, 2, True)):
        with RankPool(ranks, time_limit=options.time_limit) as pool:

            def check(*given: Any, pool: RankPool = pool) -> tuple[str, str]:
                loss, grad = map(max, zip(*pool.run(run_split, *given), strict=True))
                errors = f"error of the loss {loss:.1e}, of the gradients {grad:.1e}"
                return f"{errors}  ok", "" if max(loss, grad) <= options.tolerance else errors

            for stage in range(4):
                name = "ragged" if ragged else f"{micro} samples"
                text = f"{ranks} ranks x {name:<9} x accumulation {steps}  stage {stage}"
                report.row(text, check, stage, micro, steps, ragged)
    return report.end(f"a batch of {BATCH} in {len(SPLITS) + 1} splits", "all equal to the whole batch")
