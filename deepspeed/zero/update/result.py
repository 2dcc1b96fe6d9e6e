"""What an update has come to: its norm, and whether it was left out, which the device may not have said yet."""

import math
from collections.abc import Callable

import torch

from deepspeed.accelerator.device import get_accelerator
from deepspeed.comm import collectives
from deepspeed.monitor.log import logger
from deepspeed.zero.plan import StateKind
from deepspeed.zero.runtime import Runtime
from deepspeed.zero.unit import Unit


class StepResult:
    """Result of an update. ``norm``: unscaled, before clipping, inf on overflow, None if not computed; ``overflow``:
    nothing was updated. Both wait for the device until it has reported: see ``known``. ``weight``: summed over the
    micro-batches of all ranks, where they have one. ``culprit``: a parameter that has caused the overflow, as far as
    this rank knows.
    """

    culprit = ""
    skip: torch.Tensor | None = None  # 1 on the device if nothing was updated, where the program does not know
    undo: Callable[[], None] | None = None  # what was done as if this update was not left out

    def __init__(self, norm: float | None = None, *, overflow: bool = False, weight: float = 0.0) -> None:
        self._norm, self._overflow, self.weight = norm, overflow, weight

    norm = property(lambda self: self._norm)
    overflow = property(lambda self: self._overflow)
    left_out = property(lambda self: self._overflow, doc="Whether the program has found an overflow already.")

    def known(self) -> bool:
        """Tell whether the result can be read without waiting."""
        return True


class LateResult(StepResult):
    """Result of an update for whose norm the program has not waited. ``skips``: a norm that is not finite leaves it
    out, and ``report`` is called when this is found; ``sums`` and ``factor`` as for ``norm_of``.
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


def norm_of(sums: torch.Tensor) -> tuple[float, bool, float]:
    """Return global norm, whether a rank has failed, and the weight (or 0), from ``summed_squares``; waits."""
    whole, bad, failed, *weight = sums.tolist()
    return math.inf if bad else math.sqrt(whole), failed > 0, sum(weight)


def late_report(runtime: Runtime) -> Callable[[], str]:
    """Return a callable that logs that this update was left out. On a rank whose own backward was the cause it names
    the parameter, and returns that name. Local, as ranks may hear of it at different times.
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
    """Log, and return, the first parameter with a non-finite gradient; and the ranks whose backward produced it.
    Collective.
    """
    first = (len(runtime.units), 0, "", "")
    for unit in units:
        with unit.values(StateKind.GRAD) as grad:
            parts = ((s, unit.part(StateKind.GRAD, s, grad)) for s in unit.layout.segments)
            bad = next((s for s, part in parts if not torch.isfinite(part).all().item()), None)
        if bad is not None:
            first = (unit.index, bad.offset, bad.name, unit.name)
            break
    gathered = collectives.gather_objects((first, runtime.gradients.bad_units()), runtime.mesh.job)
    _, _, name, where = min(seen for seen, _ in gathered)
    ranks = zip(runtime.mesh.job.ranks, gathered, strict=True)
    culprits = [runtime.mesh.title(rank).removeprefix("rank ") for rank, (_, names) in ranks if where in names]
    if runtime.mesh.first:
        logger.warning(
            "step %d skipped: the gradient of %s is not finite; it came from the backward of rank %s",
            runtime.steps,
            name or "an unknown parameter",
            ", ".join(culprits) or "none alone (the sum over ranks overflowed)",
        )
    return name
