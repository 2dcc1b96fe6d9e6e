"""Reading and editing sharded state: the safe_get / safe_set families.

``safe_get_full_*`` and ``safe_set_full_*`` are collective: every data-parallel rank calls them with the same parameter,
and a setter's ``value`` is the same everywhere; what has become of an update behind the program on one rank is a
UsageError on all. The local ones are not; this rank's part is flat and possibly empty. Where there is no such state a
getter answers None and a setter does nothing; to set a gradient that is not there, unless to zero, is a UsageError.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from deepspeed.comm import collectives
from deepspeed.errors import UsageError
from deepspeed.zero.layout import Segment
from deepspeed.zero.module.state import runtime_of
from deepspeed.zero.param import part_of, whole_of
from deepspeed.zero.plan import Spread, StateKind
from deepspeed.zero.unit import Unit

_MASTER, _GRAD = object(), object()  # as ``key``; every other is the name of an optimizer's slot


@dataclass(frozen=True)
class _Opened:
    """Local part of one state of a parameter: ``pieces`` (first element in the parameter, flat values).

    True values are ``factor`` times the pieces. ``present``: whether this rank has the slot; None if all ranks agree.
    """

    unit: Unit
    segment: Segment
    kind: StateKind
    pieces: list[tuple[int, torch.Tensor]]
    dtype: torch.dtype = torch.float32
    factor: float = 1.0
    present: bool | None = None

    def whole(self) -> torch.Tensor:
        """Return the full tensor, from every rank's pieces (one all-reduce of its size)."""
        full = torch.zeros(self.segment.numel, dtype=self.dtype, device=self.unit.device)
        axes = zip(self.unit.plan.of(self.kind).spread, self.unit.facts.axes, strict=False)
        if all(way is Spread.SHARDED or axis.index == 0 for way, axis in axes):  # of equal copies the first counts
            for start, values in self.pieces:
                full[start : start + values.numel()].copy_(values)
        part = collectives.sum_in_place(full, self.unit.mesh.zero).view(self.segment.shape)
        return whole_of(part, self.segment.place, self.unit.mesh.tp)


@contextmanager
def _opened(
    param: nn.Parameter, key: object, *, together: bool = False, write: bool = False
) -> Iterator[_Opened | None]:
    """Open a state of ``param`` in memory, wherever it rests; yields None without one. ``together``: on all ranks."""
    unit: Unit | None = getattr(param, "_ds_unit", None)
    runtime = runtime_of(unit) if unit is not None else None
    with torch.no_grad():
        if unit is None or (unit.master is None if key is not _GRAD else runtime is None):
            yield None
            return
        segment, kind, factor = unit.layout.segments[param._ds_position], StateKind.OPTIM, 1.0  # type: ignore[attr-defined]
        if together and runtime is not None and unit.trainable:
            groups = (unit.mesh.zero,) if segment.place is None else (unit.mesh.zero, unit.mesh.tp)
            runtime.update.wait_together(groups=groups, once=("states", *(group.ranks for group in groups)))
        if key not in (_GRAD, _MASTER):
            with ExitStack() as attached:
                yield _slots(unit, segment, str(key), attached, write=write)
            return
        if key is _GRAD and runtime is not None:
            runtime.gradients.settle()
            kind = StateKind.GRAD
            if not unit.window.filled:
                yield None
                return
            # What makes of a rest gradient the averaged, unscaled one.
            factor = runtime.gradients.after(unit) / runtime.client()._gradient_divisor(together=together)
        start = max(0, unit.range_of(kind)[0] - segment.offset)
        with unit.values(kind, write=write) as flat:
            part = unit.part(kind, segment, flat.detach())
            yield _Opened(unit, segment, kind, [(start, part)], torch.promote_types(flat.dtype, torch.float32), factor)
            if write and key is _GRAD:
                unit.note_gradient(flat)


def _slots(unit: Unit, segment: Segment, key: str, attached: ExitStack, *, write: bool) -> _Opened:
    """Open the optimizer's slots ``key`` of every view of this rank that covers part of the parameter."""
    runtime, pieces, present = runtime_of(unit), [], False
    assert runtime is not None, f"unit {unit.name} belongs to no living engine"
    for view in unit.views:
        lo, hi = max(view.start, segment.offset), min(view.stop, segment.stop)
        if lo < hi:
            slot = attached.enter_context(runtime.attached(view, write=write)).get(key)
            # One of another size, as Adafactor's sums of rows, is no state of each element.
            if isinstance(slot, torch.Tensor) and slot.numel() == view.stop - view.start:
                present = True
                pieces.append((lo - segment.offset, slot.reshape(-1)[lo - view.start : hi - view.start]))
    return _Opened(unit, segment, StateKind.OPTIM, pieces, present=present)


def _full(param: nn.Parameter, key: object) -> torch.Tensor | None:
    with _opened(param, key, together=True) as state:
        if state is None:
            return None
        if state.present is not None:
            anywhere = torch.tensor([float(state.present)], device=state.unit.device)
            if not collectives.sum_in_place(anywhere, state.unit.mesh.zero).item():
                return None
        return state.whole().float().mul_(state.factor)


def _set(param: nn.Parameter, key: object, value: torch.Tensor, *, whole: bool) -> _Opened | None:
    """Write ``value``, the whole tensor or this rank's part, to a state of ``param``; return that state."""
    with _opened(param, key, write=True, together=whole) as state:
        if state is None and key is _GRAD and bool(value.any()):
            raise UsageError(
                f"parameter {getattr(param, '_ds_name', '')!r} has no gradient that can be set: there is one between a "
                "backward of the engine that trains it, in which its layer takes part, and step()"
            )
        if state is None or not (whole or state.pieces):  # an optimizer before its first step
            return state
        if whole and tuple(value.shape) != state.segment.whole_shape:
            name, shape = state.segment.name, state.segment.whole_shape
            raise UsageError(f"parameter {name!r} has shape {shape}; one of shape {tuple(value.shape)} does not fit")
        sizes = [values.numel() for _, values in state.pieces]
        flat = (_part(value, state.segment) if whole else value).reshape(-1)
        parts = [flat[start : start + n] for (start, _), n in zip(state.pieces, sizes, strict=True)]
        for (_, values), part in zip(state.pieces, parts if whole else flat.split(sizes), strict=True):
            values.copy_(part.to(values.device) / state.factor)
        return state


def _part(value: torch.Tensor, segment: Segment) -> torch.Tensor:
    """Return this rank's part of the full ``value`` of a parameter that tensor-parallel ranks share."""
    return value if segment.place is None else part_of(value.view(segment.whole_shape), segment.place)


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """Return the full fp32 master of ``param``, or None when it is not optimised. Collective."""
    return _full(param, _MASTER)


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Write the full master of ``param``; the model's copy follows. Collective."""
    if (master := _set(param, _MASTER, value, whole=True)) is None:
        return
    unit, segment = master.unit, master.segment
    value = _part(value, segment)
    with torch.no_grad():
        lo, hi = unit.layout.overlap(segment, *unit.range_of(StateKind.PARAM))
        with unit.values(StateKind.PARAM, write=True) as resting:
            if lo < hi:
                piece = value.reshape(-1)[lo - segment.offset : hi - segment.offset]
                unit.part(StateKind.PARAM, segment, resting).copy_(piece)
        if unit.buffer.full.untyped_storage().nbytes():
            unit.view(unit.buffer.full, segment).copy_(value)
            unit.new_version(shown=True)


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return the full averaged, unscaled fp32 gradient; None outside a window's last backward..step. Collective."""
    if getattr(param, "_ds_unit", None) is None:
        return getattr(param, "grad", None)
    return _full(param, _GRAD)


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace the full gradient of ``param`` before the step."""
    _set(param, _GRAD, value, whole=True)


def safe_update_full_grad_vectorized(
    params: Iterable[nn.Parameter], fn: Callable[[torch.Tensor, nn.Parameter], torch.Tensor]
) -> None:
    """Replace the full gradient of each parameter by ``fn(gradient, parameter)``. Collective."""
    for param in params:
        if (grad := safe_get_full_grad(param)) is not None:
            safe_set_full_grad(param, fn(grad, param))


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Return the full optimizer slot (``exp_avg``, ...) of ``param``; None when there is none yet. Collective."""
    return _full(param, optim_state_key)


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Write the full tensor of one optimizer slot."""
    _set(param, optim_state_key, value, whole=True)


def safe_get_local_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """Return this rank's part of the fp32 master; a copy if on a drive, or if updates begin beside the backward."""
    with _opened(param, _MASTER) as master:
        if master is None:
            return None
        runtime, values = runtime_of(master.unit), master.pieces[0][1]
        return values if runtime is None or not runtime.update.swaps_memory else values.clone()


def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return this rank's averaged, unscaled gradient (not yet divided by tokens); None outside backward..step."""
    with _opened(param, _GRAD) as grad:
        return None if grad is None else grad.pieces[0][1] * grad.factor


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Return this rank's part of one optimizer slot, or None when there is none yet."""
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
    if (master := _set(param, _MASTER, value, whole=False)) is None:
        return
    unit, ((start, part),) = master.unit, master.pieces
    # In memory fp32 parameters are their own master; where they are two, both change.
    if part.numel() and unit.dtype == part.dtype and not unit.master_is_param:
        unit.publish_part(master.segment.offset + start, value.reshape(-1)).wait()  # the caller may change it now


def safe_set_local_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Write this rank's part of the gradient."""
    _set(param, _GRAD, value, whole=False)


def safe_set_local_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Write this rank's part of one optimizer slot."""
    _set(param, optim_state_key, value, whole=False)
