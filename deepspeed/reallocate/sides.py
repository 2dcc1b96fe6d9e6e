"""The ends of a reallocation, engines or modules: what rests where, and which of the names of both are one tensor."""

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from deepspeed.errors import UsageError
from deepspeed.reallocate.moves import GlobalShape, Spans
from deepspeed.reallocate.resting import FlowTensor, RestingWeights
from deepspeed.zero.module.state import runtime_of, segment_of, state_names
from deepspeed.zero.param import castable, local_of
from deepspeed.zero.plan import StateKind
from deepspeed.zero.unit import Unit

_LISTED = 4
_AT_ONCE = 1 << 20  # elements of masters that are compared


class Inventory(NamedTuple):
    """Tensors of one side on one rank: entries, aliases of tied ones, and the ranks that must take part too."""

    entries: dict[str, FlowTensor]
    aliases: dict[str, str]
    ranks: tuple[int, ...]


Inventories = Mapping[int, Inventory]  # by rank


class Side:
    """Side of a reallocation on this rank: an engine, a module, or nothing. ``role``: "source" or "target"."""

    def __init__(self, model: Any, role: str, rank: int) -> None:
        self.role, self._rank = role, rank
        self.absent = model is None
        self._engine = getattr(model, "_offload", None) is not None
        if not (self.absent or isinstance(model, nn.Module)):
            raise UsageError(f"the {role} is {type(model).__name__}; pass an engine, a module, or None")
        self._model = weakref.ref(model) if model is not None else lambda: None

    def open(self, *, moving: bool = False) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Return tensors and aliases (``state_names``); UsageError while in use. ``moving``: weights will move."""
        if self.absent:
            return {}, {}
        model: Any = self._model()
        if model is None:
            raise UsageError(f"the {self.role} of this reallocation is gone; plan another one")
        if self._engine:
            model._weights.settle("reallocation")
        tensors, aliases = state_names(model.module if self._engine else model, exclude_frozen=False)
        units = units_of(tensors)
        if not self._engine and any(runtime_of(unit) is not None for unit in units):
            raise UsageError(f"the {self.role} is the module of an engine; pass the engine")
        if on_meta := next((name for name, tensor in tensors.items() if local_of(tensor).is_meta), None):
            raise UsageError(f"{on_meta} of the {self.role} is on meta, without memory; give it some with to_empty()")
        if self.role == "target":
            if busy := next((unit for unit in units if not unit.idle), None):
                raise UsageError(
                    f"the weights of the target ({busy.title}) are gathered, in unsharded() or GatheredParameters; "
                    "leave that first"
                )
            fault = model._parts.hooks.refuse("run()", "the target") if moving and self._engine else None
            if fault is not None:
                raise fault
            for name, tensor in tensors.items():
                if not hasattr(tensor, "_ds_unit") and not local_of(tensor).is_contiguous():
                    raise UsageError(f"{name} of the target is not contiguous; give it p.data = p.data.contiguous()")
        return tensors, aliases

    def inventory(self) -> Inventory | None:
        """Return this rank's inventory, to be gathered by all ranks; None where the side is absent."""
        if self.absent:
            return None
        tensors, aliases = self.open()
        model: Any = self._model()
        ranks = {self._rank} | set(model.mesh.job.ranks if self._engine else ())
        for unit in units_of(tensors):  # of a module of ``zero.Init``
            ranks |= set(unit.mesh.job.ranks)
        for tensor in tensors.values():  # a DTensor
            mesh = getattr(tensor, "device_mesh", None)
            ranks |= set() if mesh is None else set(mesh.mesh.flatten().tolist())
        return Inventory(RestingWeights(tensors).entries, aliases, tuple(sorted(ranks)))


def units_of(tensors: Mapping[str, torch.Tensor]) -> list[Unit]:
    """Return the units that hold ``tensors``."""
    return list(dict.fromkeys(t._ds_unit for t in tensors.values() if hasattr(t, "_ds_unit")))


def follow(unit: Unit, params: Iterable[torch.Tensor]) -> None:
    """Update the masters of ``params``, whose PARAM was written; masters that round to the new value are kept."""
    unit.new_version(shown=not unit.movable)
    if unit.master is None or unit.master_is_param:
        return
    with unit.values(StateKind.PARAM) as resting, unit.values(StateKind.OPTIM, write=True) as master:
        for param in params:
            lo, hi = unit.layout.overlap(segment_of(param), *unit.range_of(StateKind.OPTIM))
            for start in range(lo, hi, _AT_ONCE):
                stop = min(hi, start + _AT_ONCE)
                part = unit.within(StateKind.PARAM, resting, start, stop)
                wide = unit.within(StateKind.OPTIM, master, start, stop)
                values = part.to(wide)
                wide.copy_(torch.where(wide.to(part.dtype).to(wide.dtype) == values, wide, values))


@dataclass(frozen=True)
class Pairing:
    """Input of the planner, by the names of the target; ``stored``: the name of each tensor in the source."""

    shapes: dict[str, GlobalShape]
    wire: dict[str, torch.dtype]
    stored: dict[str, str]
    resting: dict[int, Spans]
    needed: dict[int, Spans]


def match(sources: Inventories, targets: Inventories, *, convert: bool, strict: bool) -> Pairing:
    """Pair the tensors of both sides, on every rank. UsageError for missing names (``strict``), shapes or dtypes."""
    _complete(sources, "source")
    _complete(targets, "target")
    has, wants = _entries(sources), _entries(targets)
    stored = _pairs(has, wants, sources, targets)
    used = set(stored.values())
    for reason, names in {
        "in the target and not in the source": [name for name in wants if name not in stored],
        "in the source and not in the target": [name for name in has if name not in used],
    }.items():
        if names and strict:
            more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
            raise UsageError(f"{', '.join(names[:_LISTED])}{more}: {reason}; strict=False moves what both have")
    shapes, wire = {}, {}
    for name, real in stored.items():
        one, two = has[real], wants[name]
        if one.shape != two.shape:
            raise UsageError(f"{name} is {list(one.shape)} in the source and {list(two.shape)} in the target")
        if one.dtype != two.dtype and not (convert and castable(one.dtype) and castable(two.dtype)):
            which = "no conversion is possible" if convert else "convert_dtype=True converts between floating dtypes"
            raise UsageError(f"{name} is {one.dtype} in the source and {two.dtype} in the target; {which}")
        wire[name] = two.dtype if two.dtype.itemsize < one.dtype.itemsize else one.dtype
        shapes[name] = GlobalShape(one.shape, wire[name].itemsize)
    resting: dict[int, Spans] = {
        rank: {n: ours.entries[real].spans for n, real in stored.items() if real in ours.entries}
        for rank, ours in sources.items()
    }
    needed: dict[int, Spans] = {
        rank: {n: e.spans for n, e in ours.entries.items() if n in stored} for rank, ours in targets.items()
    }
    return Pairing(shapes, wire, stored, resting, needed)


def _complete(side: Inventories, role: str) -> None:
    if not side:
        raise UsageError(f"no rank has a {role}")
    for rank, ours in side.items():
        for other in ours.ranks:
            if other not in side:
                raise UsageError(
                    f"rank {other} takes part in the {role} of rank {rank}, on ranks {list(ours.ranks)}, but does not "
                    "bring it here; every rank that has a part of an engine or module must pass it, and be in the group"
                )


def _entries(side: Inventories) -> dict[str, FlowTensor]:
    """Return every tensor of a side. Raises UsageError where ranks differ about one."""
    entries: dict[str, tuple[int, FlowTensor]] = {}
    for rank, ours in side.items():
        for name, entry in ours.entries.items():
            first, reference = entries.setdefault(name, (rank, entry))
            if (reference.dtype, reference.shape) != (entry.dtype, entry.shape):
                raise UsageError(
                    f"{name} is {reference.dtype} {list(reference.shape)} on rank {first} and {entry.dtype} "
                    f"{list(entry.shape)} on rank {rank}"
                )
    return {name: entry for name, (_, entry) in entries.items()}


def _pairs(
    has: Mapping[str, FlowTensor], wants: Mapping[str, FlowTensor], sources: Inventories, targets: Inventories
) -> dict[str, str]:
    """Return the name in the source of each tensor of the target, by its own name or one it is tied to."""
    real_names = {alias: real for ours in sources.values() for alias, real in ours.aliases.items()}
    names: dict[str, list[str]] = {name: [name] for name in wants}
    for alias, real in {a: r for ours in targets.values() for a, r in ours.aliases.items()}.items():
        names[real].append(alias)
    stored = {}
    for name, tied in names.items():
        reals = list(dict.fromkeys(n if n in has else real_names[n] for n in tied if n in has or n in real_names))
        if len(reals) > 1:
            raise UsageError(f"{' and '.join(tied)} are tied in the target, but not in the source; untie them there")
        if reals:
            stored[name] = reals[0]
    return stored
