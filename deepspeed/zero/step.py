"""The update: norm, overflow, clip, step, publish.

The global norm is the L2 norm over each rank's owned ranges, each weighted by one over its replication on the axes that
are summed; one all-reduce carries the norm and the overflow flag. The program waits for it only where its next decision
depends on it: else the norm follows behind (``StepResult``), and the optimizer's kernels leave out an update whose
gradients are not finite by themselves.
"""

import contextlib
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch

from deepspeed.comm import collectives
from deepspeed.device import get_accelerator
from deepspeed.errors import UsageError
from deepspeed.observe.log import logger
from deepspeed.zero.failures import error_of
from deepspeed.zero.optim_view import OptimTiles, OptimView, captured_groups, run_step
from deepspeed.zero.plan import StateKind
from deepspeed.zero.publish import Publication
from deepspeed.zero.runtime import Runtime
from deepspeed.zero.unit import Unit
from deepspeed.zero.update.standing import frozen_later
from deepspeed.zero.update.turns import Turns

_Views = list[OptimView]
_Failure = Exception | None


class StepResult:
    """What an update has come to. ``norm``: unscaled, before clipping, inf on overflow, None if not computed;
    ``overflow``: nothing was updated. Both wait for the device where it has not said so yet: see ``known``.
    ``weight``: of the micro-batches of all ranks, where they have one. ``culprit``: a parameter that has caused the
    overflow, as far as this rank knows.
    """

    culprit = ""
    undo: Callable[[], None] | None = None  # what was done as if this update was not left out

    def __init__(self, norm: float | None = None, *, overflow: bool = False, weight: float = 0.0) -> None:
        self._norm, self._overflow, self.weight = norm, overflow, weight

    norm = property(lambda self: self._norm)
    overflow = property(lambda self: self._overflow)

    def known(self) -> bool:
        """Whether it can be read without waiting."""
        return True


class LateResult(StepResult):
    """Of an update for whose norm the program has not waited. ``skips``: it was left out if that is not finite, and
    ``report`` is called when this is found; ``sums`` and ``factor`` as for ``norm_of``.
    """

    def __init__(self, sums: torch.Tensor, factor: float, *, skips: bool, report: Callable[[], str]) -> None:
        super().__init__()
        self._factor, self._skips, self._report = factor, skips, report
        self._sums = torch.empty_like(sums, device="cpu", pin_memory=sums.device.type != "cpu")
        self._sums.copy_(sums, non_blocking=True)
        self._event = get_accelerator().awaited_event()
        self._event.record()

    def _read(self) -> None:
        if self._norm is None:
            if not self._event.query():
                self._event.synchronize()
            self._norm = norm_of(self._sums)[0] * self._factor
            self._overflow = self._skips and not math.isfinite(self._norm)
            if self._overflow:
                self._norm = math.inf
                self.culprit = self._report()

    @property
    def norm(self) -> float | None:
        self._read()
        return self._norm

    @property
    def overflow(self) -> bool:
        if self._skips:
            self._read()
        return self._overflow

    def known(self) -> bool:
        return not self._skips or self._norm is not None or bool(self._event.query())


def take_step(
    runtime: Runtime,
    views: list[OptimView],
    *,
    clip: float,
    need_norm: bool,
    skip_nonfinite: bool,
    loss_scale: float,
    at_once: bool,
    weight: torch.Tensor | None = None,
) -> StepResult:
    """One optimizer update over all units. Collective. Gradients are consumed.

    ``clip``: maximum global norm, 0 for none. Without ``need_norm`` there is neither norm nor look for overflow.
    ``at_once``: the caller acts on an overflow before the next update. ``weight``: of this rank's micro-batches, by
    which its gradients are multiplied; what is left of the mean over all ranks' is to divide by the mean of that.
    """
    units, failure = runtime.gather_gradients()
    if runtime.watch_gradients is not None:
        runtime.watch_gradients(units)
    runtime.steps += 1
    factor: Any = 1.0 / loss_scale  # or, where the norm is known on the device only, a number there
    result, skip = StepResult(), None
    if need_norm or weight is not None:
        sums, failure = summed_squares(runtime, units, failure, weight)
        decides = (clip > 0 or skip_nonfinite) and not _goes_ahead(runtime)
        if decides or weight is not None or (skip_nonfinite and at_once):
            norm, of_all = global_norm(runtime, sums, failure)
            factor *= runtime.mesh.job.size / of_all if of_all > 0 else 1.0
            norm *= factor
            if not math.isfinite(norm) and skip_nonfinite:
                if runtime.delayed is not None:
                    runtime.delayed.left_out()
                result = StepResult(math.inf, overflow=True, weight=of_all)
                result.culprit = report_nonfinite(runtime, units)
                runtime.gradients.clear(collected=True)
                return result
            result = StepResult(norm, weight=of_all)
            if clip > 0:
                factor /= max(1.0, (norm + 1e-6) / clip)
        else:
            try:
                skip = (~torch.isfinite(sums[0])).float() if skip_nonfinite else None
                result = LateResult(sums, factor, skips=skip_nonfinite, report=_late_report(runtime))
                factor = _clipped(sums, factor, clip) if clip > 0 else factor
            except Exception as error:  # no page-locked memory, say; the others go on
                failure = failure or error
    runtime.before_update()
    _update(runtime, views, units, factor, failure, skip)
    runtime.gradients.clear(collected=True)
    return result


def _clipped(sums: torch.Tensor, factor: float, clip: float) -> torch.Tensor:
    """``factor`` with the clipping, on the device; bit by bit what the host makes of it."""
    norm = torch.where(sums[1] > 0, math.inf, sums[0].sqrt()) * factor
    return torch.full_like(norm, factor).div_(((norm + 1e-6) / clip).clamp_(min=1.0))


def _goes_ahead(runtime: Runtime) -> bool:
    """Whether the update may begin before the norm is known: its kernels leave it out, all of it on the device. The
    same answer on all ranks, as they meet elsewhere otherwise; what one rank's views or hooks are does not count.
    """
    away = runtime.device.type == "cpu" or any(u.plan.optim is not None and u.plan.optim.away for u in runtime.units)
    return not away and getattr(type(runtime.optimizer), "heeds_skip", False)


def _update(
    runtime: Runtime, views: _Views, units: list[Unit], factor: float, failure: _Failure, skip: torch.Tensor | None
) -> None:
    """The optimizer's rule: over what is in memory, then tile by tile over a drive; and the publication of PARAM.

    Nothing changes where ``skip``, a number on the device, is not 0. Where it fails, or with a ``failure`` from before,
    the other ranks get what they wait for: a publication, or with ``tiles`` the bad news.
    """
    if runtime.delayed is not None and runtime.delayed.applies():
        try:
            runtime.delayed.step(views, factor, failure=failure)
        except Exception:
            runtime.half_updated = True
            raise
    elif runtime.tiles is None:
        publication = runtime.publication(units)
        try:
            if failure is not None:
                raise failure
            written = _update_in_memory(runtime, views, publication, factor, skip)
        except Exception:  # the others know nothing of it; and each may have written its part of PARAM
            runtime.half_updated = True
            with contextlib.suppress(Exception):
                publication.finish()
            raise
        publication.finish(written)
        if runtime.worker is not None:
            runtime.worker.busy = True  # masters travel to the device: who may write to them waits, as for an update
    else:
        publication = runtime.publication(units)
        publication.finish(_update_tiles(runtime, runtime.tiles, views, factor, failure, publication.spare))


def _update_in_memory(
    runtime: Runtime, views: _Views, publication: Publication, factor: float, skip: torch.Tensor | None
) -> _Views:
    """At once; but what rests on the host, and this package's kernels update, unit by unit in the order of the forward:
    what is new travels, to the device and to other ranks, beside the update of the next; and what ``visits`` the
    device for its update. What is no matter of other ranks is left to the ``worker``, last. Returns for the end of the
    publication the views whose PARAM is written and that it does not know of.
    """
    optimizer: Any = runtime.optimizer
    visits = runtime.visits
    if skip is not None and not optimizer.skips_alone():  # a hook of the user's
        if skip.item():
            return []
        skip = None
    homes = [view.unit if view.unit.plan.of(StateKind.OPTIM).away else None for view in views]
    if not any(homes) or not getattr(type(optimizer), "undisturbed", lambda _: False)(optimizer):
        for view in views:
            view.unit.exchange_early(None)  # which writes where this does
        with visits.all_at_once(views) if visits is not None else contextlib.nullcontext():
            return run_step(optimizer, views, optimizer.step, factor, skip=skip)
    turns, captured, pairs = Turns(optimizer), captured_groups(optimizer), zip(homes, views, strict=True)
    parts = [(home, [view for _, view in those]) for home, those in itertools.groupby(pairs, lambda pair: pair[0])]
    worker = runtime.worker if visits is None else None  # what visits is launched by the program, which waits for it
    behind = worker if worker is not None and optimizer.scales_on_host() else None
    spared = {unit for unit, _ in parts if behind is not None and unit is not None and publication.spare(unit)}
    rest = [part for part in parts if part[0] not in spared]
    with visits.expected([those for _, those in rest]) if visits is not None else contextlib.nullcontext():
        for unit, those in rest:
            at_once = functools.partial(run_step, optimizer, those, functools.partial(turns.take, those), factor)
            with visits.on_device(those) if visits is not None else contextlib.nullcontext():
                written = _or_early(at_once, those, captured, factor)()
            publication.through(unit, written)
    if behind is not None and spared:
        optimizer.step()  # without gradients: whoever counts steps, as schedules do, sees one
        for unit, those in parts:
            if unit is None or unit not in spared:
                continue
            publication.leave_to(behind, unit, _turn_of(optimizer, those, captured, factor))
    return []


def _turn_of(optimizer: Any, views: _Views, groups: list[dict[str, Any]], factor: float) -> Callable[[], _Views]:
    """The update of ``views`` with the settings in ``groups``, whatever changes before it is called."""
    those = [group | {"params": [v.param for v in views if v.group == i]} for i, group in enumerate(groups)]
    step = functools.partial(optimizer.update, those)
    at_once = functools.partial(run_step, optimizer, views, step, factor, frozen=frozen_later(views))
    return _or_early(at_once, views, groups, factor)


def _or_early(
    at_once: Callable[[], _Views], views: _Views, groups: list[dict[str, Any]], factor: float
) -> Callable[[], _Views]:
    """That update of ``views``, of one unit or of several, or the same one begun before the step."""
    early = views[0].unit.exchange_early(None, taken=True)
    if early is None:
        return at_once
    if early.fits(groups, factor, frozen_later(views)):
        return functools.partial(early.finish, at_once)
    early.forget()
    return at_once


def _update_tiles(
    runtime: Runtime, tiles: OptimTiles, views: _Views, factor: float, failure: _Failure, spare: Callable[[Unit], bool]
) -> _Views:
    written: _Views = []
    try:
        if failure is None:
            written = tiles.step(views, factor, spare=spare, worker=runtime.worker)
    except Exception as error:
        failure = error
    failed = collectives.failures(failure, runtime.mesh.talk)
    runtime.known = failure
    if failure is not None:
        raise failure
    for rank, text in failed.items():
        tiles.torn = True
        where = runtime.mesh.title(rank)
        runtime.known = UsageError(f"the update failed half way on {where}: {text}. Start again from a checkpoint")
        raise runtime.known
    return written


def summed_squares(
    runtime: Runtime, units: list[Unit], failure: Exception | None, weight: torch.Tensor | None = None
) -> tuple[torch.Tensor, Exception | None]:
    """On the device: the square of the norm of the mean gradients over all ranks, before the loss scale is divided out;
    on how many ranks it is not finite; how many have failed on the way here; and the sum of ``weight``, if there is
    one. And this rank's failure, if any.
    """
    total = torch.zeros((), dtype=torch.float64, device=runtime.device)
    try:
        for unit in units if failure is None else ():
            total += unit.gradient_square().to(runtime.device)
    except Exception as error:
        failure = error
    failed = torch.full_like(total, failure is not None)
    more = [] if weight is None else [weight]
    sums = torch.stack([total, (~torch.isfinite(total)).double(), failed, *more])
    return collectives.sum_in_place(sums, runtime.mesh.job), failure


def norm_of(sums: torch.Tensor) -> tuple[float, bool, float]:
    """Global norm, whether a rank has failed, and the weight (or 0), from ``summed_squares``; waits for the device."""
    whole, bad, failed, *weight = sums.tolist()
    return math.inf if bad else math.sqrt(whole), failed > 0, sum(weight)


def global_norm(runtime: Runtime, sums: torch.Tensor, failure: Exception | None) -> tuple[float, float]:
    """L2 norm of the mean gradients over all ranks, before the loss scale is divided out; and the weight.

    A ``failure`` on the way to the step has travelled with it, and is raised: RankFailedError on the others.
    """
    norm, failed, weight = norm_of(sums)
    if failed:
        states = runtime.share(failure, f"step {runtime.steps}", in_forward=False, group=runtime.mesh.job)
        runtime.known = failure or error_of(states, runtime.mesh)
        raise runtime.known
    return norm, weight


def _late_report(runtime: Runtime) -> Callable[[], str]:
    """Logs, when it is called, that this update was left out: a rank whose own backward was the cause says of what
    parameter, and returns that. Local, as ranks may hear of it at different times.
    """
    step, mesh, culprits = runtime.steps, runtime.mesh, runtime.gradients.evidence()

    def report() -> str:
        names = culprits()
        if names:
            text = "step %d skipped: the gradient of %s is not finite; it came from the backward of rank %d"
            logger.warning(text, step, names[0], mesh.job.ranks[mesh.job.index])
        elif mesh.first:
            text = "step %d skipped: its gradients are not finite; %s"
            logger.warning(text, step, "the ranks they came from name them, unless only the sum over ranks overflowed")
        return names[0] if names else ""

    return report


def report_nonfinite(runtime: Runtime, units: list[Unit]) -> str:
    """Log and return the first parameter with a non-finite gradient, and the ranks that produced it. Collective."""
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
    return name
