"""Full values of sharded parameters for a while: in GatheredParameters, or in a whole model for generation."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from deepspeed.client.zero.incoming import incoming_of
from deepspeed.comm import collectives
from deepspeed.errors import UsageError
from deepspeed.monitor.log import warning_once
from deepspeed.zero.module.state import bit_sums, runtime_of, segment_of
from deepspeed.zero.param import local_of, part_of, point, whole_of
from deepspeed.zero.unit import Unit


def _unpack(saved: Any) -> torch.Tensor:
    if isinstance(saved, torch.Tensor):
        return saved
    unit, *place = saved
    unit.hold_for_backward()
    return cast(torch.Tensor, unit.buffer.full.as_strided(*place))


class GatheredParameters:
    """Gather the full values of the parameters on every rank inside the context; release sharded ones at its end.

    ``params``: a parameter, an iterable of them, or a module; ordinary parameters are ignored. ``modifier_rank`` None:
    read only, an edit (with ``enable_sanity_checks`` any write) is a UsageError on every rank, but one of frozen
    parameters beside trained ones a warning. ``modifier_rank`` r: the values of global rank r at exit win everywhere,
    masters included. Collective at both ends (a reading one inside a forward, which other ranks may skip, at none, and
    edits are writes of the forward); when a rank raises inside, nothing is written back and the others raise a
    UsageError that names it. A step inside shows its new values.

    Aliases of a parameter (``p.detach()``, ``p.data``, ``.cpu()``, ``.numpy()``) taken in a context opened outside a
    forward keep their values after the exit; they cost the memory of the parameter's whole unit until the last alias
    is gone. ``layers_whole`` False: of layers that tensor-parallel ranks share each has its part, as in a forward.
    """

    def __init__(
        self,
        params: nn.Parameter | nn.Module | Iterable[nn.Parameter],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
        *,
        layers_whole: bool = True,
    ) -> None:
        if isinstance(params, nn.Module):
            params = params.parameters()
        elif isinstance(params, torch.Tensor):
            params = [cast(nn.Parameter, params)]
        ours = dict.fromkeys(p for p in params if isinstance(p, nn.Parameter) and _is_cut(p)) if enabled else ()
        # In one order on all ranks: clients pass sets, too.
        self._params = sorted(ours, key=lambda p: (p._ds_unit.index, p._ds_position))
        self._modifier, self._layers_whole = modifier_rank, layers_whole
        self._units: list[Unit] = []
        self._pinned = ExitStack()
        self._inside_forward = False
        self._marks: dict[Unit, tuple[int, torch.Tensor]] = {}  # version and sums of the values as a reader got them
        self._writes: dict[nn.Parameter, int] = {}  # torch's count then, with ``enable_sanity_checks``
        self._whole: set[nn.Parameter] = set()  # that show what tensor-parallel ranks have together
        self._incoming = incoming_of(self._params) if modifier_rank is not None else None

    def __enter__(self) -> None:
        units = {id(p._ds_unit): p._ds_unit for p in self._params}  # type: ignore[attr-defined]
        self._await_updates([*units.values()])
        with ExitStack() as pinned:  # also when a later gather fails
            for unit in sorted(units.values(), key=lambda u: u.index):
                if self._incoming is not None:
                    self._incoming.open(unit)
                else:
                    if torch.is_grad_enabled() and not unit.users and runtime_of(unit) is not None:
                        unit.fetch_on_demand()  # a running module borrows it, whose backward reads it, too
                    unit.pin(lend=True)
                pinned.callback(unit.unpin)
                self._units.append(unit)
            self._pinned = pinned.pop_all()
        # Another rank may skip the module whose forward this is: such a reader must not wait for it.
        self._inside_forward = self._modifier is None and any(u.may_fetch_on_demand() for u in self._units)
        for param in self._params if not any(u.may_fetch_on_demand() for u in self._units) else ():
            unit, segment = param._ds_unit, segment_of(param)  # type: ignore[attr-defined]
            if self._layers_whole and segment.place is not None and not hasattr(param, "_local_tensor"):
                point(param, whole_of(local_of(param).detach(), segment.place, unit.mesh.tp))
                self._whole.add(param)
        marked = self._units if self._modifier is None and not self._inside_forward else []
        self._marks = {u: (u.version, bit_sums(u.buffer.full)) for u in marked}
        self._writes = {p: p._version for u in marked if u.facts.sanity_checks for p in u.params}
        # Under such hooks autograd hands custom functions new tensors in place of the parameters they saved; inside a
        # forward the hooks of the module that runs gather for the backward, so they are not needed there.
        if torch.is_grad_enabled() and any(
            u.movable and runtime_of(u) is not None and not u.may_fetch_on_demand() for u in self._units
        ):
            self._pinned.enter_context(saved_tensors_hooks(self._pack, _unpack))

    def _await_updates(self, units: list[Unit]) -> None:
        """Wait for pending updates before any rank gathers; raise the error of one rank's update on all."""
        for runtime in dict.fromkeys(map(runtime_of, units)):
            if runtime is None or runtime.may_fetch_on_demand():
                continue
            if self._modifier is not None:
                # Masters will be what is shown here, and must not lose their last update.
                runtime.update.wait_together(once=("all",))
                runtime.update.publish()
                continue
            for mesh in {id(unit.mesh): unit.mesh for unit in units if runtime_of(unit) is runtime}.values():
                theirs = [unit for unit in units if unit.mesh is mesh]  # masters and slots may still be on their way
                asked = ("values", *sorted(unit.index for unit in theirs))
                runtime.update.wait_together(units=theirs, groups=(mesh.zero,), once=asked)

    def _pack(self, tensor: torch.Tensor) -> Any:
        """Save the place of a view of a full buffer instead of the tensor, as autograd reads it after the release."""
        storage = tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0
        for unit in self._units if storage else ():
            if unit.movable and storage == unit.buffer.full.data_ptr():
                return unit, tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
        return tensor

    def __exit__(self, kind: object, raised: BaseException | None, _: object) -> None:
        try:
            if raised is None and not self._inside_forward:
                for rank, text in self._failures(self._fault()).items():
                    raise UsageError(
                        f"rank {rank} failed inside GatheredParameters, so nothing is written back on any rank: {text}"
                    )
                if self._incoming is not None and self._modifier is not None:
                    self._incoming.close(self._params, self._modifier, self._write_back)
                else:
                    for param in self._params if self._modifier is not None else ():
                        self._write_back(param)
            elif isinstance(raised, Exception) and not self._inside_forward:  # not what ends a process or a generator
                with suppress(Exception):  # what was raised inside says more
                    self._failures(raised)
        finally:
            for param in self._whole:
                unit = param._ds_unit  # type: ignore[attr-defined]
                point(param, unit.view(unit.buffer.full, segment_of(param)))
            self._whole.clear()
            self._pinned.close()
            self._units, self._marks, self._writes = [], {}, {}

    def _failures(self, fault: Exception | None) -> dict[int, str]:
        """Return faults by rank. A rank that raised serves those still in contexts that it has left. Collective."""
        failed: dict[int, str] = {}
        for mesh, keeper in {id(u.mesh): (u.mesh, u.keeper) for u in self._units}.values():
            group = mesh.control or mesh.zero
            failed |= collectives.failures(fault, group, depth=keeper.meet if keeper is not None else lambda: 0)
        return failed

    def _fault(self) -> UsageError | None:
        """Return the error about the parameters as this rank leaves them, or None."""
        # By something else than a step or a context with a modifier rank.
        same = {u: sums for u, (version, sums) in self._marks.items() if u.version == version}
        edited = {unit.title: unit for unit, sums in same.items() if not torch.equal(bit_sums(unit.buffer.full), sums)}
        for unit, param in ((u, p) for u in same for p in u.params if p._version != self._writes.get(p, p._version)):
            edited[f"{segment_of(param).name} (written in place, which enable_sanity_checks forbids)"] = unit
        for param in self._params:
            unit, segment = param._ds_unit, segment_of(param)  # type: ignore[attr-defined]
            values, inside = local_of(param), unit.view(unit.buffer.full, segment)
            shape = segment.whole_shape if param in self._whole else segment.shape
            if tuple(values.shape) != shape:
                return UsageError(
                    f"parameter {segment.name!r} changed its shape from {shape} to {tuple(values.shape)} in "
                    "GatheredParameters; before deepspeed.initialize replace it (module.weight = nn.Parameter(...)), "
                    "afterwards call engine.destroy(), change it, and initialize again"
                )
            if param in self._whole and segment.place is not None:
                values = part_of(values.detach(), segment.place)
            ranks = tuple(rank for peer in unit.mesh.zero.ranks for rank in unit.mesh.sharers(peer))
            if self._modifier is not None and self._modifier not in ranks:
                return UsageError(
                    f"modifier_rank {self._modifier} is not one of the ranks {ranks} that share {segment.name!r}"
                )
            moved = self._modifier is None and values.data_ptr() != inside.data_ptr()
            if moved and not torch.equal(values.to(inside), inside):
                edited[segment.name] = unit
        return _said_of(edited)

    def _write_back(self, param: nn.Parameter) -> None:
        unit, position, segment = param._ds_unit, param._ds_position, segment_of(param)  # type: ignore[attr-defined]
        assert self._modifier is not None
        with torch.no_grad():
            values, inside = local_of(param), unit.view(unit.buffer.full, segment)
            world, tp = unit.mesh.zero, unit.mesh.tp
            sharers = unit.mesh.sharers(self._modifier)
            if tp.size > 1:
                values = values.contiguous() if param in self._whole else values.clone()
                if tp.ranks[tp.index] in sharers and not hasattr(param, "_local_tensor"):
                    collectives.broadcast(values, tp, source=sharers.index(self._modifier))
                if param in self._whole and segment.place is not None:
                    values = part_of(values, segment.place)
            if world.size > 1 or not values.is_set_to(inside):
                # gloo's thread may hold what it has sent a little longer; of the full buffer that would pass for an
                # alias. In the unit's dtype, which is the same on all ranks, whatever this one has put there.
                values = torch.empty_like(inside).copy_(values)
                collectives.broadcast(values, world, source=next(i for i, r in enumerate(world.ranks) if r in sharers))
            inside.copy_(values)
            if not local_of(param).is_set_to(inside):
                point(param, inside)
            unit.absorb(position)


def _is_cut(param: nn.Parameter) -> bool:
    """Tell whether the parameter belongs to a model of which this rank holds a part."""
    unit: Unit | None = getattr(param, "_ds_unit", None)
    return unit is not None and (hasattr(param, "ds_id") or unit.mesh.tp.size > 1)


def _said_of(edited: dict[str, Unit]) -> UsageError | None:
    """Return the error about edits, by name; None of frozen units beside trained ones, as adapters are merged there."""
    names = []
    for name, unit in edited.items():
        runtime = runtime_of(unit)
        if unit.trainable or unit.facts.sanity_checks or runtime is None or runtime.optimizer is None:
            names.append(name)
    if len(names) < len(edited):
        warning_once(
            "frozen parameters were edited in a read-only GatheredParameters, as adapters do that are merged and "
            "unmerged: sharded ones are what they were before. Edits that shall stay need a modifier_rank"
        )
    if not names:
        return None
    return UsageError(
        f"the values in {', '.join(names[:4])} were edited in a read-only context, which reaches neither shards "
        "nor optimizer. Say whose values count: GatheredParameters(..., modifier_rank=<rank>), or edit a clone"
    )


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Declare that ``module`` uses a parameter of another. Accepted and not needed: such uses are found as they happen.

    Raises RuntimeError for arguments of other types.
    """
    if not isinstance(module, nn.Module) or not isinstance(parameter, nn.Parameter):
        raise RuntimeError("register_external_parameter(module, parameter) takes an nn.Module and an nn.Parameter")


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Revoke ``register_external_parameter``; accepted and not needed."""
    register_external_parameter(module, parameter)


def unwrap_model_for_generation(model: Any) -> AbstractContextManager[nn.Module]:
    """Return ``engine.unsharded()``; a ``model`` that is no engine is yielded as it is."""
    unsharded = model.unsharded() if getattr(model, "_offload", None) is not None else nullcontext(model)
    return cast(AbstractContextManager[nn.Module], unsharded)
