"""Reading and editing sharded state: GatheredParameters and the safe_get / safe_set families.

``safe_get_full_*`` and ``safe_set_full_*`` are collective: every data-parallel rank calls them with the same parameter.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from deepspeed.comm import collectives
from deepspeed.errors import UsageError
from deepspeed.zero.facts import View
from deepspeed.zero.layout import Segment
from deepspeed.zero.param import ZeroParamStatus, ZeroParamType, local_of, point
from deepspeed.zero.plan import Spread, StateKind
from deepspeed.zero.runtime import Runtime
from deepspeed.zero.unit import Unit

__all__ = [
    "GatheredParameters",
    "ZeroParamStatus",
    "ZeroParamType",
    "register_external_parameter",
    "unregister_external_parameter",
]


def _place(param: torch.Tensor) -> tuple[Unit, int, Segment] | None:
    unit = getattr(param, "_ds_unit", None)
    if unit is None:
        return None
    position = param._ds_position  # type: ignore[attr-defined]
    return unit, position, unit.layout.segments[position]


def _runtime(unit: Unit) -> Runtime | None:
    """The runtime of the living engine that trains the unit, if there is one."""
    keeper = unit.keeper
    return keeper if isinstance(keeper, Runtime) and keeper.client() is not None else None


_ROW_BYTES = 8192


@dataclass(frozen=True)
class _SavedPlace:
    """A view of a unit's full buffer that autograd has saved."""

    unit: Unit
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int | torch.SymInt


def _unpack(saved: torch.Tensor | _SavedPlace) -> torch.Tensor:
    if isinstance(saved, torch.Tensor):
        return saved
    saved.unit.hold_for_backward()
    return saved.unit.full.as_strided(saved.shape, saved.stride, saved.offset)


class GatheredParameters:
    """Inside, the given parameters hold their full values on every rank; outside, sharded ones are released again.

    ``params``: a parameter, an iterable of them, or a module; ordinary parameters are ignored. ``modifier_rank`` None:
    read only, an edit is a UsageError on every rank. ``modifier_rank`` r: what global rank r holds at exit wins
    everywhere, masters included. Collective at both ends (a reading one inside a forward, which other ranks may skip,
    at none, and edits there are not looked for); when a rank raises inside, nothing is written back and the others
    raise a UsageError that names it. An ``engine.step()`` inside shows its new values.

    What is taken of a parameter (``p.detach()``, ``p.data``, ``.cpu()``, ``.numpy()``) in a context opened outside a
    forward keeps its values after the exit; it costs the memory of the parameter's whole unit until the last such alias
    is gone.
    """

    def __init__(
        self,
        params: nn.Parameter | nn.Module | Iterable[nn.Parameter],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        if isinstance(params, nn.Module):
            params = params.parameters()
        elif isinstance(params, torch.Tensor):
            params = [cast(nn.Parameter, params)]
        found = list(dict.fromkeys(p for p in params if isinstance(p, nn.Parameter))) if enabled else []
        self._params = [p for p in found if getattr(p, "_ds_unit", None) is not None and hasattr(p, "ds_id")]
        self._modifier = modifier_rank
        self._units: list[Unit] = []
        self._pinned = ExitStack()
        self._inside_forward = False
        self._marks: list[_Mark] = []
        self._saving: saved_tensors_hooks | None = None

    def __enter__(self) -> None:
        units = {id(p._ds_unit): p._ds_unit for p in self._params}  # type: ignore[attr-defined]
        with ExitStack() as pinned:  # also when a later gather fails
            for unit in sorted(units.values(), key=lambda u: u.order):
                unit.pin(lend=True)
                pinned.callback(unit.unpin)
                self._units.append(unit)
            self._pinned = pinned.pop_all()
        # Another rank may skip the module whose forward this is: such a reader must not wait for it.
        self._inside_forward = self._modifier is None and any(u.may_fetch_on_demand() for u in self._units)
        self._marks = [_Mark.of(u) for u in self._units] if self._modifier is None and not self._inside_forward else []
        # Under such hooks autograd hands custom functions new tensors in place of the parameters they saved; inside a
        # forward the module's own hooks gather for the backward, so they are not needed there.
        if torch.is_grad_enabled() and any(
            u.movable and _runtime(u) is not None and not u.may_fetch_on_demand() for u in self._units
        ):
            self._saving = saved_tensors_hooks(self._pack, _unpack)
            self._saving.__enter__()

    def _pack(self, tensor: torch.Tensor) -> "torch.Tensor | _SavedPlace":
        """What autograd saves here of a parameter (a regulariser over the weights) is read after the context has
        released it.
        """
        storage = tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0
        for unit in self._units if storage else ():
            if unit.movable and storage == unit.full.data_ptr():
                return _SavedPlace(unit, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
        return tensor

    def __exit__(self, kind: object, raised: BaseException | None, _: object) -> None:
        if self._saving is not None:
            self._saving.__exit__(kind, raised, _)
            self._saving = None
        try:
            if self._inside_forward:
                pass
            elif raised is None:
                self._settle()
            elif isinstance(raised, Exception):  # not what ends a process or closes a generator
                with suppress(Exception):  # what was raised inside says more
                    self._failures(raised)
        finally:
            self._pinned.close()
            self._units, self._marks = [], []

    def _settle(self) -> None:
        """What the modifier rank holds becomes the parameters; an error on every rank when one has a fault.
        Collective.
        """
        for rank, text in self._failures(self._fault()).items():
            raise UsageError(
                f"rank {rank} failed inside GatheredParameters, so nothing is written back on any rank: {text}"
            )
        for param in self._params if self._modifier is not None else ():
            self._write_back(param)

    def _failures(self, fault: Exception | None) -> dict[int, str]:
        """Rank -> its fault. A rank that raised may have left contexts that others are still in: it serves them until
        then. Collective.
        """
        failed: dict[int, str] = {}
        for mesh, keeper in {id(u.mesh): (u.mesh, u.keeper) for u in self._units}.values():
            group = mesh.control or mesh.zero
            failed |= collectives.failures(fault, group, depth=keeper.meet if keeper is not None else lambda: 0)
        return failed

    def _fault(self) -> UsageError | None:
        """What is wrong with the parameters as this rank leaves them."""
        edited = [mark.unit.title for mark in self._marks if mark.outdated()]
        for param in self._params:
            unit, segment = param._ds_unit, param._ds_unit.layout.segments[param._ds_position]  # type: ignore[attr-defined]
            own, inside = local_of(param), unit.view(unit.full, segment)
            if tuple(own.shape) != segment.shape:
                return UsageError(
                    f"parameter {segment.name!r} changed its shape from {segment.shape} to {tuple(own.shape)} "
                    "inside GatheredParameters; "
                    "replace the Parameter object instead (module.weight = nn.Parameter(...)) before "
                    "deepspeed.initialize"
                )
            if self._modifier is not None and self._modifier not in unit.mesh.zero.ranks:
                ranks = unit.mesh.zero.ranks
                return UsageError(
                    f"modifier_rank {self._modifier} is not one of the ranks {ranks} that share {segment.name!r}"
                )
            if (
                self._modifier is None
                and own.data_ptr() != inside.data_ptr()
                and not torch.equal(own.to(inside), inside)
            ):
                edited.append(segment.name)
        if not edited:
            return None
        return UsageError(
            f"the values of {', '.join(edited[:4])} were edited in a read-only context, which reaches neither "
            "the shards nor the "
            "optimizer. Say whose values count: GatheredParameters(..., modifier_rank=<rank>), or edit a clone"
        )

    def _write_back(self, param: nn.Parameter) -> None:
        unit, position = param._ds_unit, param._ds_position  # type: ignore[attr-defined]
        with torch.no_grad():
            inside = unit.view(unit.full, unit.layout.segments[position])
            if local_of(param).data_ptr() != inside.data_ptr():
                inside.copy_(local_of(param))
                point(param, inside)
            world = unit.mesh.zero
            collectives.broadcast(inside, world, source=world.ranks.index(self._modifier))
            unit.absorb(position)


@dataclass(frozen=True)
class _Mark:
    """The values of a gathered unit as a reader got them, in a few thousandths of their size."""

    unit: Unit
    version: int
    sums: torch.Tensor

    @classmethod
    def of(cls, unit: Unit) -> "_Mark":
        """Row and column sums over the bits: an edit that leaves all of them as they were was made to."""
        data = unit.full.detach().view(torch.uint8)
        cut = data.numel() // _ROW_BYTES * _ROW_BYTES
        rows = data[:cut].view(torch.int64).view(-1, _ROW_BYTES // 8)
        return cls(unit, unit.version, torch.cat([rows.sum(1), rows.sum(0), data[cut:]]))

    def outdated(self) -> bool:
        """True when the values were edited, by something else than a step or a context with a modifier rank."""
        now = _Mark.of(self.unit)
        return now.version == self.version and not torch.equal(now.sums, self.sums)


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Declare that ``module`` uses a parameter it does not own. Accepted and not needed: such uses are found when they
    happen.

    Raises RuntimeError for arguments of other types.
    """
    if not isinstance(module, nn.Module) or not isinstance(parameter, nn.Parameter):
        raise RuntimeError("register_external_parameter(module, parameter) takes an nn.Module and an nn.Parameter")


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """The counterpart of ``register_external_parameter``."""
    register_external_parameter(module, parameter)


# -- full tensors ------------------------------------------------------------------------------------------------


def _assemble(unit: Unit, segment: Segment, local: torch.Tensor, kind: StateKind) -> torch.Tensor:
    """The full tensor of one parameter from every rank's resting range ``local`` (one all-reduce of its size)."""
    start, stop = unit.range_of(kind)
    lo, hi = unit.layout.overlap(segment, start, stop)
    whole = torch.zeros(segment.numel, dtype=local.dtype, device=unit.device)
    plan = unit.plan.grad if kind is StateKind.GRAD else unit.plan.optim
    assert plan is not None
    first = all(way is Spread.SHARDED or axis.index == 0 for way, axis in zip(plan.spread, unit.mesh.axes, strict=True))
    if lo < hi and first:
        whole[lo - segment.offset : hi - segment.offset].copy_(local[lo - start : hi - start])
    collectives.sum_scalars(whole, unit.mesh.zero)
    return whole.view(segment.shape)


def _store(unit: Unit, segment: Segment, local: torch.Tensor, kind: StateKind, *, value: torch.Tensor) -> None:
    start, stop = unit.range_of(kind)
    lo, hi = unit.layout.overlap(segment, start, stop)
    if tuple(value.shape) != segment.shape:
        raise UsageError(
            f"parameter {segment.name!r} has shape {segment.shape}; a value of shape {tuple(value.shape)} does not fit"
        )
    if lo < hi:
        local[lo - start : hi - start].copy_(value.reshape(-1)[lo - segment.offset : hi - segment.offset])


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """The full fp32 master of ``param``, or None when it is not optimised. Collective."""
    place = _place(param)
    if place is None or place[0].master is None:
        return None
    unit, _, segment = place
    with torch.no_grad(), unit.values(StateKind.OPTIM) as master:
        return _assemble(unit, segment, master.detach(), StateKind.OPTIM).float()


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Write the full master of ``param`` (same ``value`` on every rank); the model's copy follows. Collective."""
    place = _place(param)
    if place is None or place[0].master is None:
        return
    unit, _, segment = place
    with torch.no_grad():
        value = value.to(unit.device)
        for kind in (StateKind.OPTIM, StateKind.PARAM):
            with unit.values(kind, write=True) as resting:
                _store(unit, segment, resting, kind, value=value)
        if unit.full.untyped_storage().nbytes():
            unit.view(unit.full, segment).copy_(value)
            unit.new_version(shown=True)


def _landed(unit: Unit) -> float:
    """Wait for reductions under way; what a rest gradient must then be multiplied by to be the averaged, unscaled
    gradient.
    """
    runtime = _runtime(unit)
    assert runtime is not None and (client := runtime.client()) is not None
    runtime.gradients.settle()
    return runtime.gradients.after(unit) / client.current_loss_scale()


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """The full averaged, unscaled fp32 gradient between backward (of the last micro-batch) and step; else None.
    Collective.
    """
    place = _place(param)
    if place is None:
        return getattr(param, "grad", None)
    unit, _, segment = place
    if not unit.trainable or _runtime(unit) is None:
        return None
    factor = _landed(unit)
    if not unit.grad_filled:
        return None
    with torch.no_grad(), unit.values(StateKind.GRAD) as grad:
        return _assemble(unit, segment, grad.float(), StateKind.GRAD).mul_(factor)


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace the full gradient of ``param`` before the step (same ``value`` on every rank)."""
    place = _place(param)
    if place is None or _runtime(place[0]) is None:
        return
    unit, _, segment = place
    factor = _landed(unit)
    if not unit.holds_gradient:
        return
    with torch.no_grad(), unit.values(StateKind.GRAD, write=True) as grad:
        _store(unit, segment, grad, StateKind.GRAD, value=value.to(grad.device) / factor)
        unit.note_gradient(grad)


def safe_update_full_grad_vectorized(
    params: Iterable[nn.Parameter], fn: Callable[[torch.Tensor, nn.Parameter], torch.Tensor]
) -> None:
    """Replace the full gradient of each parameter by ``fn(gradient, parameter)``. Collective."""
    for param in params:
        grad = safe_get_full_grad(param)
        if grad is not None:
            safe_set_full_grad(param, fn(grad, param))


@contextmanager
def _slots(unit: Unit, segment: Segment, key: str, *, write: bool = False) -> Iterator[list[tuple[View, torch.Tensor]]]:
    """Optimizer slots ``key`` of every view of this rank that covers part of the parameter, in memory for a while."""
    runtime = _runtime(unit)
    assert runtime is not None, f"unit {unit.name} belongs to no living engine"
    with ExitStack() as held:
        found = []
        for view in unit.views:
            if max(view.start, segment.offset) < min(view.stop, segment.stop):
                held.enter_context(runtime.attached(view, write=write))
                value = runtime.optimizer_state(view).get(key)
                if isinstance(value, torch.Tensor):
                    found.append((view, value))
        yield found


def _slot_range(unit: Unit, segment: Segment, key: str) -> torch.Tensor | None:
    """A copy of the OPTIM range of one slot, zero outside the parameter; None when no rank-local view has the slot."""
    start, stop = unit.range_of(StateKind.OPTIM)
    with _slots(unit, segment, key) as slots:
        local = torch.zeros(stop - start, dtype=torch.float32, device=unit.device)
        for view, slot in slots:
            if slot.numel() == view.stop - view.start:
                local[view.start - start : view.stop - start].copy_(slot.reshape(-1))
        return local if slots else None


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """The full tensor of one optimizer slot (``exp_avg``, ...) of ``param``; None when there is none yet.
    Collective.
    """
    place = _place(param)
    if place is None or place[0].master is None:
        return None
    unit, _, segment = place
    local = _slot_range(unit, segment, optim_state_key)
    present = torch.tensor([0.0 if local is None else 1.0], device=unit.device)
    if collectives.sum_scalars(present, unit.mesh.zero).item() == 0:
        return None
    start, stop = unit.range_of(StateKind.OPTIM)
    with torch.no_grad():
        zeros = torch.zeros(stop - start, device=unit.device) if local is None else local
        return _assemble(unit, segment, zeros, StateKind.OPTIM)


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Write the full tensor of one optimizer slot (same ``value`` on every rank)."""
    place = _place(param)
    if place is None or place[0].master is None:
        return
    unit, _, segment = place
    flat = value.reshape(-1).to(unit.optim_device)
    with torch.no_grad(), _slots(unit, segment, optim_state_key, write=True) as slots:
        for view, slot in slots:
            lo, hi = max(view.start, segment.offset), min(view.stop, segment.stop)
            slot.reshape(-1)[lo - view.start : hi - view.start].copy_(flat[lo - segment.offset : hi - segment.offset])


# -- local shards ------------------------------------------------------------------------------------------------


def _part(unit: Unit, segment: Segment, buffer: torch.Tensor, kind: StateKind) -> torch.Tensor:
    start, stop = unit.range_of(kind)
    lo, hi = unit.layout.overlap(segment, start, stop)
    return buffer[lo - start : hi - start] if lo < hi else buffer[:0]


def safe_get_local_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """This rank's flat part of the fp32 master (possibly empty); a copy when it rests on a drive. No collective."""
    place = _place(param)
    if place is None or place[0].master is None:
        return None
    with place[0].values(StateKind.OPTIM) as master:
        return _part(place[0], place[2], master, StateKind.OPTIM)


def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor | None:
    """This rank's flat part of the averaged, unscaled gradient, or None outside backward..step. No collective."""
    place = _place(param)
    if place is None or not place[0].trainable or _runtime(place[0]) is None:
        return None
    factor = _landed(place[0])
    if not place[0].grad_filled:
        return None
    with place[0].values(StateKind.GRAD) as grad:
        return _part(place[0], place[2], grad, StateKind.GRAD) * factor


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """This rank's flat part of one optimizer slot (possibly empty), or None when there is none yet. No collective."""
    place = _place(param)
    if place is None or place[0].master is None:
        return None
    part = _part(place[0], place[2], place[0].master, StateKind.OPTIM)
    if part.numel() == 0:
        return part.detach()
    slot = _slot_range(place[0], place[2], optim_state_key)
    return None if slot is None else _part(place[0], place[2], slot, StateKind.OPTIM)


def safe_set_local_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Write this rank's part of the master; the model sees it from the next step on, in fp32 at once."""
    place = _place(param)
    if place is None or place[0].master is None:
        return
    unit, _, segment = place
    # In memory fp32 parameters are their own master; where they are two, both change.
    both = unit.full.dtype == unit.master.dtype and not unit.master_is_param  # type: ignore[union-attr]
    start, stop = unit.range_of(StateKind.OPTIM)
    lo, hi = unit.layout.overlap(segment, start, stop)
    with torch.no_grad():
        with unit.values(StateKind.OPTIM, write=True) as master:
            _part(unit, segment, master.detach(), StateKind.OPTIM).copy_(value.reshape(-1))
        if both and lo < hi:
            unit.publish_part(lo, value.reshape(-1)).wait()  # the caller may change it from now on


def safe_set_local_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Write this rank's part of the gradient."""
    place = _place(param)
    if place is None or _runtime(place[0]) is None:
        return
    unit, _, segment = place
    factor = _landed(unit)
    if not unit.holds_gradient:
        return
    with unit.values(StateKind.GRAD, write=True) as grad:
        _part(unit, segment, grad, StateKind.GRAD).copy_(value.reshape(-1) / factor)
        unit.note_gradient(grad)


def safe_set_local_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Write this rank's part of one optimizer slot."""
    place = _place(param)
    if place is None or place[0].master is None:
        return
    unit, _, segment = place
    done = 0
    with _slots(unit, segment, optim_state_key, write=True) as slots:
        for view, slot in slots:
            lo, hi = max(view.start, segment.offset), min(view.stop, segment.stop)
            slot.reshape(-1)[lo - view.start : hi - view.start].copy_(value.reshape(-1)[done : done + hi - lo])
            done += hi - lo
