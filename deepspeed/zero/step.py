"""The update: norm, overflow, clip, hand over to the policy.

The global norm is the L2 norm over each rank's owned ranges, each weighted by one over its replication on the axes that
are summed; one all-reduce carries the norm and the overflow flag. The program waits for it only where its next decision
depends on it: else the norm follows behind (``LateResult``), and the optimizer's kernels leave out an update whose
gradients are not finite by themselves.
"""

import math
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from deepspeed.comm import collectives
from deepspeed.monitor.events import GRADIENTS, UPDATE
from deepspeed.zero.optim_view import OptimView
from deepspeed.zero.runtime import Runtime
from deepspeed.zero.sync.failures import error_of
from deepspeed.zero.update import result as step_result
from deepspeed.zero.update.policy import Step
from deepspeed.zero.update.result import LateResult, StepResult, late_report, report_nonfinite


@dataclass(frozen=True)
class StepOptions:
    """Options of one step. ``clip``: maximum global norm, 0 for none. Without ``need_norm`` the step computes no norm
    and checks no overflow. ``skip_nonfinite``: leave out an update whose gradients are not finite. ``at_once``: the
    caller acts on an overflow before the next update. ``loss_scale``: the factor that gradients are divided by.
    """

    clip: float
    need_norm: bool
    skip_nonfinite: bool
    at_once: bool
    loss_scale: float


def take_step(
    runtime: Runtime, views: list[OptimView], options: StepOptions, *, weight: torch.Tensor | None = None
) -> StepResult:
    """Take one optimizer step over all units and return its result; the gradients are consumed. Collective.

    ``weight``: weight of this rank's micro-batches, by which their gradients were multiplied; the mean gradient over
    all ranks is then divided by the mean weight.
    """
    units, failure = runtime.gather_gradients()
    if runtime.events:
        runtime.events.begin(GRADIENTS, units)
    runtime.steps += 1
    step = Step(views, units, 1.0 / options.loss_scale, failure)
    result = StepResult()
    if options.need_norm or weight is not None:
        result = _clip(runtime, step, options, weight)
    if result.left_out:
        runtime.update.left_out()
        result.culprit = report_nonfinite(runtime, units)
    else:
        runtime.before_update()
        try:
            with runtime.events.span(UPDATE) if runtime.events else nullcontext():
                runtime.update.apply(step)
        except Exception as error:
            runtime.failures.note_half_updated(error)
            raise
    runtime.gradients.clear(collected=True)
    return result


def _clip(runtime: Runtime, step: Step, options: StepOptions, weight: torch.Tensor | None) -> StepResult:
    """Compute the norm, now or behind the update, and set the factor of ``step`` that clips by it. Collective."""
    factor = 1.0 / options.loss_scale
    sums = summed_squares(runtime, step, weight)
    waits = (options.clip > 0 or options.skip_nonfinite) and not runtime.update.launches_ahead()
    if waits or weight is not None or (options.skip_nonfinite and options.at_once):
        norm, of_all = global_norm(runtime, sums, step.failure)
        factor *= runtime.mesh.job.size / of_all if of_all > 0 else 1.0
        norm *= factor
        if not math.isfinite(norm) and options.skip_nonfinite:
            return StepResult(math.inf, overflow=True, weight=of_all)
        step.factor = factor / max(1.0, (norm + 1e-6) / options.clip) if options.clip > 0 else factor
        return StepResult(norm, weight=of_all)
    try:
        late = LateResult(sums, factor, skips=options.skip_nonfinite, report=late_report(runtime))
        late.skip = step.skip = (~torch.isfinite(sums[0])).float() if options.skip_nonfinite else None
        step.factor = _clipped(sums, factor, options.clip) if options.clip > 0 else factor
        return late
    except Exception as error:  # no page-locked memory, say; the others go on
        step.failure = step.failure or error
        return StepResult()


def _clipped(sums: torch.Tensor, factor: float, clip: float) -> torch.Tensor:
    """Return ``factor`` with the clipping applied, on the device; bit-identical to the computation on the host."""
    norm = torch.where(sums[1] > 0, math.inf, sums[0].sqrt()) * factor
    return torch.full_like(norm, factor).div_(((norm + 1e-6) / clip).clamp_(min=1.0))


def summed_squares(runtime: Runtime, step: Step, weight: torch.Tensor | None = None) -> torch.Tensor:
    """Return, on the device, sums over all ranks: the squared norm of the mean gradients before the loss scale is
    divided out; the number of ranks where it is not finite; the number of ranks that have failed before this call (on
    this one: ``step.failure``); and the sum of ``weight``, if it is given. Collective.
    """
    total = torch.zeros((), dtype=torch.float64, device=runtime.device)
    try:
        for unit in step.units if step.failure is None else ():
            total += unit.gradient_square().to(runtime.device)
    except Exception as error:
        step.failure = error
    failed = torch.full_like(total, step.failure is not None)
    more = [] if weight is None else [weight]
    sums = torch.stack([total, (~torch.isfinite(total)).double(), failed, *more])
    return collectives.sum_in_place(sums, runtime.mesh.job)


def global_norm(runtime: Runtime, sums: torch.Tensor, failure: Exception | None) -> tuple[float, float]:
    """Return the L2 norm of the mean gradients over all ranks, before the loss scale is divided out, and the weight.

    A ``failure`` before the step has travelled in ``sums`` and is raised here; other ranks raise RankFailedError.
    """
    norm, failed, weight = step_result.norm_of(sums)
    if failed:
        states = runtime.failures.share(failure, f"step {runtime.steps}", in_forward=False, group=runtime.mesh.job)
        error = failure or error_of(states, runtime.mesh)
        runtime.failures.note_known(error)
        raise error
    return norm, weight
