"""The update: norm, overflow, clip, step, publish.

The global norm is the L2 norm over each rank's owned ranges, each weighted by one over its replication on the axes that
are summed; one all-reduce carries the norm and the overflow flag.
"""

import contextlib
import math
from typing import NamedTuple

import torch

from deepspeed.comm import collectives
from deepspeed.errors import UsageError
from deepspeed.observe.log import logger
from deepspeed.zero.failures import error_of
from deepspeed.zero.optim_view import OptimView, run_step
from deepspeed.zero.plan import StateKind
from deepspeed.zero.runtime import Runtime
from deepspeed.zero.unit import Unit


class StepResult(NamedTuple):
    """``norm``: unscaled, before clipping, inf on overflow, None if not computed. ``overflow``: nothing was updated."""

    norm: float | None
    overflow: bool


def take_step(
    runtime: Runtime, views: list[OptimView], *, clip: float, need_norm: bool, skip_nonfinite: bool, loss_scale: float
) -> StepResult:
    """One optimizer update over all units. Collective. Gradients are consumed.

    ``clip``: maximum global norm, 0 for none. Without ``need_norm`` there is neither norm nor look for overflow.
    """
    units, failure = runtime.gather_gradients()
    runtime.steps += 1
    factor = 1.0 / loss_scale
    norm: float | None = None
    if need_norm:
        norm = global_norm(runtime, units, failure) * factor
        if not math.isfinite(norm) and skip_nonfinite:
            report_nonfinite(runtime, units)
            runtime.gradients.clear(collected=True)
            return StepResult(math.inf, overflow=True)
    if clip > 0 and norm is not None:
        factor /= max(1.0, (norm + 1e-6) / clip)
    ranges: dict[Unit, list[tuple[int, int]]] = {}
    for view in _update(runtime, views, units, factor, failure):
        ranges.setdefault(view.unit, []).append((view.start, view.stop))
    runtime.publish(units, ranges)
    runtime.gradients.clear(collected=True)
    return StepResult(norm, overflow=False)


def _update(
    runtime: Runtime, views: list[OptimView], units: list[Unit], factor: float, failure: Exception | None
) -> list[OptimView]:
    """The optimizer's rule over everything: once over what is in memory, then tile by tile over what is on a drive.

    Returns the views in memory whose PARAM at rest the optimizer has written in the same pass. Where it fails, or with
    a ``failure`` from before, the other ranks get what they wait for: a publication, or with ``tiles`` the bad news.
    """
    optimizer, tiles = runtime.optimizer, runtime.tiles
    assert optimizer is not None
    if tiles is None:
        try:
            if failure is not None:
                raise failure
            return run_step(optimizer, views, optimizer.step, factor)
        except Exception:  # the others know nothing of it; and each may have written its part of PARAM
            runtime.half_updated = True
            with contextlib.suppress(Exception):
                runtime.publish(units)
            raise
    written: list[OptimView] = []
    try:
        written = tiles.step(views, factor) if failure is None else []
    except Exception as error:
        failure = error
    failed = collectives.failures(failure, runtime.mesh.job)
    runtime.known = failure
    if failure is not None:
        raise failure
    for rank, text in failed.items():
        tiles.torn = True
        where = runtime.mesh.title(rank)
        runtime.known = UsageError(f"the update failed half way on {where}: {text}. Start again from a checkpoint")
        raise runtime.known
    return written


def global_norm(runtime: Runtime, units: list[Unit], failure: Exception | None = None) -> float:
    """L2 norm of the mean gradients over all ranks, before the loss scale is divided out.

    A ``failure`` on the way to the step travels with it, and is raised: RankFailedError on the others.
    """
    total = torch.zeros((), dtype=torch.float64, device=runtime.device)
    try:
        for unit in units if failure is None else ():
            total += unit.gradient_square().to(runtime.device)
    except Exception as error:
        failure = error
    failed = torch.full_like(total, failure is not None)
    sums = collectives.sum_scalars(torch.stack([total, (~torch.isfinite(total)).double(), failed]), runtime.mesh.job)
    whole, bad, failed_ranks = sums.tolist()
    if failed_ranks:
        states = runtime.share(failure, f"step {runtime.steps}", in_forward=False, group=runtime.mesh.job)
        runtime.known = failure or error_of(states, runtime.mesh)
        raise runtime.known
    return math.inf if bad else math.sqrt(whole)


def report_nonfinite(runtime: Runtime, units: list[Unit]) -> None:
    """Log the first parameter with a non-finite gradient and the ranks whose backward produced it. Collective."""
    first = (len(runtime.units), 0, "", "")
    for unit in units:
        with unit.values(StateKind.GRAD) as grad:
            parts = ((s, unit.part(StateKind.GRAD, s, grad)) for s in unit.layout.segments)
            bad = next((s for s, part in parts if not torch.isfinite(part).all().item()), None)
        if bad is not None:
            first = (unit.index, bad.offset, bad.name, unit.name)
            break
    everyone = collectives.gather_objects((first, runtime.gradients.bad_units()), runtime.mesh.job)
    _, _, name, where = min(seen for seen, _ in everyone)
    ranks = zip(runtime.mesh.job.ranks, everyone, strict=True)
    culprits = [runtime.mesh.title(rank).removeprefix("rank ") for rank, (_, names) in ranks if where in names]
    if runtime.mesh.first:
        logger.warning(
            "step %d skipped: the gradient of %s is not finite; it came from the backward of rank %s",
            runtime.steps,
            name or "an unknown parameter",
            ", ".join(culprits) or "none alone (the sum over ranks overflowed)",
        )
