"""Reading and editing sharded state: the safe_get / safe_set families.

``safe_get_full_*`` and ``safe_set_full_*`` are collective: every data-parallel rank calls them with the same parameter.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import nn

from deepspeed.comm import collectives
from deepspeed.errors import UsageError
from deepspeed.zero.client.gathered import runtime_of
from deepspeed.zero.layout import Segment
from deepspeed.zero.optim_view import OptimView
from deepspeed.zero.plan import Spread, StateKind
from deepspeed.zero.unit import Unit

_MASTER, _GRAD = object(), object()  # as ``what``; every other is the name of an optimizer's slot


@dataclass(frozen=True)
class _Opened:
    """What this rank has of one state of a parameter: ``pieces`` (first element in the parameter, flat values).

    ``factor``: what turns them into what clients mean. ``present``: there is such a state on this rank.
    """

    unit: Unit
    segment: Segment
    kind: StateKind
    pieces: list[tuple[int, torch.Tensor]]
    dtype: torch.dtype = torch.float32
    factor: float = 1.0
    present: bool = True

    def whole(self) -> torch.Tensor:
        """The full tensor, from every rank's pieces (one all-reduce of its size)."""
        full = torch.zeros(self.segment.numel, dtype=self.dtype, device=self.unit.device)
        axes = zip(self.unit.plan.of(self.kind).spread, self.unit.mesh.axes, strict=True)
        if all(way is Spread.SHARDED or axis.index == 0 for way, axis in axes):  # of equal copies the first counts
            for start, values in self.pieces:
                full[start : start + values.numel()].copy_(values)
        return collectives.sum_scalars(full, self.unit.mesh.zero).view(self.segment.shape)

    def fill(self, value: torch.Tensor) -> None:
        """Write the full tensor ``value``."""
        for start, values in self.pieces:
            values.copy_(value.reshape(-1)[start : start + values.numel()].to(values.device) / self.factor)

    def fill_local(self, value: torch.Tensor) -> None:
        """Write this rank's part; nothing where there is none (an optimizer before its first step)."""
        if not self.pieces:
            return
        sizes = [values.numel() for _, values in self.pieces]
        for (_, values), part in zip(self.pieces, value.reshape(-1).split(sizes), strict=True):
            values.copy_(part.to(values.device) / self.factor)

    def check(self, value: torch.Tensor) -> None:
        """Raise UsageError when ``value`` is not of the parameter's shape."""
        if tuple(value.shape) != self.segment.shape:
            raise UsageError(
                f"parameter {self.segment.name!r} has shape {self.segment.shape}; a value of shape "
                f"{tuple(value.shape)} does not fit"
            )


@contextmanager
def _opened(param: nn.Parameter, what: object, *, write: bool = False) -> Iterator[_Opened | None]:
    """A state of ``param`` in memory for a while, wherever it rests; None where there is none."""
    unit: Unit | None = getattr(param, "_ds_unit", None)
    with torch.no_grad():
        if unit is None or (unit.master is None if what is not _GRAD else runtime_of(unit) is None):
            yield None
            return
        segment = unit.layout.segments[param._ds_position]  # type: ignore[attr-defined]
        if what not in (_GRAD, _MASTER):
            with ExitStack() as attached:
                yield _slots(unit, segment, str(what), attached, write=write)
            return
        kind, factor = (StateKind.GRAD, _landed(unit)) if what is _GRAD else (StateKind.OPTIM, 1.0)
        if what is _GRAD and not (unit.holds_gradient if write else unit.grad_filled):
            yield None
            return
        start = max(0, unit.range_of(kind)[0] - segment.offset)
        with unit.values(kind, write=write) as flat:
            part = unit.part(kind, segment, flat.detach())
            yield _Opened(unit, segment, kind, [(start, part)], flat.dtype, factor)
            if write and what is _GRAD:
                unit.note_gradient(flat)


def _landed(unit: Unit) -> float:
    """Wait for reductions; what a rest gradient must then be multiplied by to be the averaged, unscaled gradient."""
    runtime = runtime_of(unit)
    assert runtime is not None
    runtime.gradients.settle()
    return runtime.gradients.after(unit) / float(runtime.client().current_loss_scale())


def _slots(unit: Unit, segment: Segment, key: str, attached: ExitStack, *, write: bool) -> _Opened:
    """The optimizer's slots ``key`` of every view of this rank that covers part of the parameter."""
    runtime, pieces, present = runtime_of(unit), [], False
    assert runtime is not None, f"unit {unit.name} belongs to no living engine"
    for view in unit.views:
        lo, hi = max(view.start, segment.offset), min(view.stop, segment.stop)
        if lo < hi:
            slot = attached.enter_context(runtime.attached(cast(OptimView, view), write=write)).get(key)
            if isinstance(slot, torch.Tensor):
                present = True
                if write or slot.numel() == view.stop - view.start:
                    flat = slot.reshape(-1)[lo - view.start : hi - view.start]
                    pieces.append((lo - segment.offset, flat))
    return _Opened(unit, segment, StateKind.OPTIM, pieces, present=present)


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """The full fp32 master of ``param``, or None when it is not optimised. Collective."""
    with _opened(param, _MASTER) as master:
        return None if master is None else master.whole().float()


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Write the full master of ``param`` (same ``value`` on every rank); the model's copy follows. Collective."""
    with _opened(param, _MASTER, write=True) as master:
        if master is None:
            return
        master.check(value)
        master.fill(value)
        unit, segment = master.unit, master.segment
    with torch.no_grad():
        lo, hi = unit.layout.overlap(segment, *unit.range_of(StateKind.PARAM))
        with unit.values(StateKind.PARAM, write=True) as resting:
            if lo < hi:
                piece = value.reshape(-1)[lo - segment.offset : hi - segment.offset]
                unit.part(StateKind.PARAM, segment, resting).copy_(piece)
        if unit.full.untyped_storage().nbytes():
            unit.view(unit.full, segment).copy_(value)
            unit.new_version(shown=True)


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """The full averaged, unscaled fp32 gradient from a window's last backward to the step; else None. Collective."""
    if getattr(param, "_ds_unit", None) is None:
        return getattr(param, "grad", None)
    with _opened(param, _GRAD) as grad:
        return None if grad is None else replace(grad, dtype=torch.float32).whole().mul_(grad.factor)


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace the full gradient of ``param`` before the step (same ``value`` on every rank)."""
    with _opened(param, _GRAD, write=True) as grad:
        if grad is not None:
            grad.check(value)
            grad.fill(value)


def safe_update_full_grad_vectorized(
    params: Iterable[nn.Parameter], fn: Callable[[torch.Tensor, nn.Parameter], torch.Tensor]
) -> None:
    """Replace the full gradient of each parameter by ``fn(gradient, parameter)``. Collective."""
    for param in params:
        grad = safe_get_full_grad(param)
        if grad is not None:
            safe_set_full_grad(param, fn(grad, param))


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """The full tensor of an optimizer slot (``exp_avg``, ...) of ``param``; None when there is none yet. Collective."""
    with _opened(param, optim_state_key) as slots:
        if slots is None:
            return None
        present = torch.tensor([float(slots.present)], device=slots.unit.device)
        return slots.whole() if collectives.sum_scalars(present, slots.unit.mesh.zero).item() else None


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Write the full tensor of one optimizer slot (same ``value`` on every rank)."""
    with _opened(param, optim_state_key, write=True) as slots:
        if slots is not None:
            slots.fill(value)


def safe_get_local_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """This rank's flat part of the fp32 master (possibly empty); a copy when it rests on a drive. No collective."""
    with _opened(param, _MASTER) as master:
        return None if master is None else master.pieces[0][1]


def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor | None:
    """This rank's flat part of the averaged, unscaled gradient, or None outside backward..step. No collective."""
    with _opened(param, _GRAD) as grad:
        return None if grad is None else grad.pieces[0][1] * grad.factor


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """This rank's flat part of one optimizer slot (possibly empty), or None when there is none yet. No collective."""
    with _opened(param, optim_state_key) as slots:
        if slots is None:
            return None
        lo, hi = slots.unit.layout.overlap(slots.segment, *slots.unit.range_of(StateKind.OPTIM))
        local = torch.zeros(max(0, hi - lo), dtype=torch.float32, device=slots.unit.device)
        for start, values in slots.pieces:
            at = start + slots.segment.offset - lo
            local[at : at + values.numel()].copy_(values)
        return local if slots.present or lo >= hi else None


def safe_set_local_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Write this rank's part of the master; the model sees it from the next step on, in fp32 at once."""
    with _opened(param, _MASTER, write=True) as master:
        if master is None:
            return
        master.fill_local(value)
        unit, ((start, part),) = master.unit, master.pieces
    # In memory fp32 parameters are their own master; where they are two, both change.
    if part.numel() and unit.full.dtype == part.dtype and not unit.master_is_param:
        unit.publish_part(master.segment.offset + start, value.reshape(-1)).wait()  # the caller may change it now


def safe_set_local_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Write this rank's part of the gradient."""
    with _opened(param, _GRAD, write=True) as grad:
        if grad is not None:
            grad.fill_local(value)


def safe_set_local_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Write this rank's part of one optimizer slot."""
    with _opened(param, optim_state_key, write=True) as slots:
        if slots is not None:
            slots.fill_local(value)
