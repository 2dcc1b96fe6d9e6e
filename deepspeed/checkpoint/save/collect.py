"""Parts of global tensors, by name, that one rank writes of an engine's state, with any slot of the optimizer."""

import base64
import bisect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn

from deepspeed.checkpoint.format.plain import Collected
from deepspeed.comm.mesh.groups import Mesh
from deepspeed.tier.drive import Stored
from deepspeed.tier.store import TierStore
from deepspeed.zero.layout import ALIGNMENT_NUMEL, Granularity, Segment
from deepspeed.zero.optim_view import OptimView, segments_of
from deepspeed.zero.plan import Spread, StateKind
from deepspeed.zero.regions import Region
from deepspeed.zero.unit import Unit
from deepspeed.zero.update.policy import UpdatePolicy

Site = tuple[str, Region | None]  # a parameter's name, and where the local tensor sits in the global one
Owned = tuple[Segment, int, int]  # a parameter's place in its unit, and the flat indices [lo, hi) of it that are meant
_PART_NUMEL = 8 << 20  # elements that are in memory at once, for what comes from a drive


class Elements(NamedTuple):
    """Elements in memory, of any shape. On a drive: in ``store`` from byte ``start`` on, with ``values`` on meta."""

    values: torch.Tensor
    store: Stored | None = None
    start: int = 0

    @classmethod
    def of(cls, like: torch.Tensor, store: TierStore, start: int = 0) -> "Elements":
        """Refer to as many elements as ``like`` has, of its dtype, in the bytes of ``store`` from ``start`` on."""
        if isinstance(store, Stored):
            return cls(torch.empty(like.numel(), dtype=like.dtype, device="meta"), store, start)
        return cls(store.tensor.detach().view(torch.uint8)[start : start + like.nbytes].view(like.dtype))

    def part(self, lo: int, hi: int) -> "Elements":
        """Return elements [lo, hi). The full range stays as it is: a strided tensor is copied flat only at its turn."""
        if hi - lo == self.values.numel():
            return self
        return Elements(self.values.reshape(-1)[lo:hi], self.store, self.start + lo * self.values.dtype.itemsize)


@dataclass(frozen=True)
class TensorPart:
    """Elements from ``lo`` on of ``region`` (None: all) of the global tensor (state, name). ``quiet``: they change only
    when the engine itself writes them, in an update or at a call of the client's.
    """

    state: str
    name: str
    shape: tuple[int, ...]
    lo: int
    elements: Elements
    region: Region | None = None
    quiet: bool = False

    @cached_property
    def values(self) -> torch.Tensor:
        return self.elements.values


@dataclass(frozen=True)
class States:
    """State of one engine. ``groups``: names of parameters in the user's order; ``update`` knows which part of the
    optimizer state rests on a drive.
    """

    module: nn.Module
    mesh: Mesh
    units: list[Unit]
    views: list[OptimView]
    optimizer: torch.optim.Optimizer | None
    groups: list[list[str]]
    update: UpdatePolicy

    def state_of(self, view: OptimView) -> dict[str, Any]:
        """Return the optimizer's state for ``view``."""
        return self.optimizer.state.get(view.param, {}) if self.optimizer is not None else {}

    def slots_of(self, view: OptimView) -> Iterator[tuple[str, torch.Tensor, Elements]]:
        """Yield every tensor the optimizer keeps for ``view``: name, a tensor of its shape, elements."""
        store, places = self.update.region_of(view)
        for name, value in self.state_of(view).items():
            if isinstance(value, torch.Tensor) and value.dim():
                if store is not None and name in places:
                    yield name, value, Elements.of(value, store, places[name])
                else:
                    yield name, value, Elements(value.detach())


def weights_of(unit: Unit) -> tuple[StateKind, str]:
    """Return the state that holds a unit's authoritative weights, and its name in a checkpoint."""
    return (StateKind.OPTIM, "master") if unit.master is not None else (StateKind.PARAM, "param")


def _turn(unit: Unit, kind: StateKind) -> tuple[int, int]:
    """Return how many ranks of the ``zero`` group replicate this range of a state, and this rank's index among them."""
    replicas, index = 1, 0
    for way, axis in zip(unit.plan.of(kind).spread, unit.facts.axes, strict=False):
        if way is Spread.REPLICATED:
            replicas, index = replicas * axis.size, index * axis.size + axis.index
    return replicas, index


def owned(unit: Unit, kind: StateKind) -> Iterator[Owned]:
    """Yield the parts this rank writes of a state: replicas divide the range, or deal out whole parameters."""
    (replicas, index), (start, stop) = _turn(unit, kind), unit.range_of(kind)
    whole = unit.layout.granularity is Granularity.PARAMETER
    if not whole:
        per_replica = -(-(stop - start) // (replicas * ALIGNMENT_NUMEL)) * ALIGNMENT_NUMEL
        start, stop = min(stop, start + index * per_replica), min(stop, start + (index + 1) * per_replica)
    for position, segment in enumerate(unit.layout.segments):
        lo, hi = unit.layout.overlap(segment, start, stop)
        if lo < hi and (not whole or position % replicas == index):
            yield segment, lo, hi


def _pieces(
    state: str, segment: Segment, elements: Elements, lo: int, hi: int, *, base: int, quiet: bool
) -> Iterator[TensorPart]:
    """Yield flat indices [lo, hi) of a unit in parts of bounded size; ``elements`` begin at index ``base``."""
    step = _PART_NUMEL if elements.values.is_contiguous() else max(1, hi - lo)
    for first, last, span in segment.spans(lo, hi):
        for at in range(first, last, step):
            part = elements.part(at - base, min(at + step, last) - base)
            start = span.lo + at - first
            yield TensorPart(state, segment.name, segment.whole_shape, start, part, span.region, quiet)


def range_parts(unit: Unit, kind: StateKind, state: str, ours: Iterable[Owned]) -> Iterator[TensorPart]:
    """Yield the parts ``ours`` of one state of a unit, under the name ``state``."""
    elements = Elements.of(unit.rest[kind].tensor, unit.rest[kind])
    # gradients are written by the next backward, and what is whole on every rank by anybody who has the module
    hidden = unit.movable or (kind is StateKind.OPTIM and not unit.master_is_param)
    quiet = hidden and kind is not StateKind.GRAD
    for segment, lo, hi in ours:
        yield from _pieces(state, segment, elements, lo, hi, base=unit.range_of(kind)[0], quiet=quiet)


def weight_parts(states: States, *, without: set[str]) -> Iterator[TensorPart]:
    """Yield weights and optimizer slots of every unit, but for the parameters ``without``."""
    views: dict[Unit, list[OptimView]] = {}
    for view in states.views:
        views.setdefault(view.unit, []).append(view)
    for unit in states.units:
        kind, state = weights_of(unit)
        ours = [o for o in owned(unit, kind) if o[0].name not in without]
        yield from range_parts(unit, kind, state, ours)
        if unit.mesh.zero.index == 0:  # in nobody's range, but a complete checkpoint names them
            nothing = Elements(torch.empty(0, dtype=unit.rest[kind].tensor.dtype, device="cpu"))
            for segment in unit.layout.segments:
                if not prod(segment.whole_shape) and segment.name not in without:
                    yield TensorPart(state, segment.name, segment.whole_shape, 0, nothing, segment.region)
        for view in views.get(unit, ()) if kind is StateKind.OPTIM else ():
            first = bisect.bisect_right(ours, view.start, key=lambda o: o[2])  # a unit may have a thousand of both
            last = bisect.bisect_left(ours, view.stop, key=lambda o: o[1])
            yield from _slot_parts(states, view, ours[first:last])


def _slot_parts(states: States, view: OptimView, ours: list[Owned]) -> Iterator[TensorPart]:
    by_parameter = view.unit.layout.granularity is Granularity.PARAMETER
    for name, like, elements in states.slots_of(view):
        shape = tuple(like.shape)
        if shape == (tuple(view.param.shape) if by_parameter else (view.stop - view.start,)):
            for segment, lo, hi in ours:
                lo, hi = max(lo, view.start), min(hi, view.stop)
                yield from _pieces(f"optim.{name}", segment, elements, lo, hi, base=view.start, quiet=True)
        elif by_parameter:
            for segment, _, _ in ours:
                region = segment.region
                state, key = ("optim", view.name) if region is None else ("part", part_key(view.name, region))
                yield TensorPart(f"{state}.{name}", key, shape, 0, elements)
        elif _turn(view.unit, StateKind.OPTIM)[1] == 0:
            yield TensorPart(f"opaque.{name}", view_key(view), shape, 0, elements)


def view_key(view: OptimView) -> str:
    """Return a name of a view, for state that only the very same layout can load, unique across the job's units."""
    job, zero = view.unit.mesh.job, view.unit.mesh.zero
    suffix = "" if zero.size == job.size else f"@{job.ranks.index(zero.ranks[0])}"
    return f"{view.unit.name}:{view.group}:{view.start}-{view.stop}/{view.unit.layout.numel}{suffix}"


def part_key(name: str, region: Region) -> str:
    """Return a name of a parameter's part, for state that only the very same part can load."""
    return f"{name}@{','.join(map(str, region.start))}+{','.join(map(str, region.shape))}"


def scalar_state(states: States) -> dict[str, dict[str, Any]]:
    """Return the numbers the optimizer keeps (a step count), as JSON by parameter and slot, from one of replicas."""
    scalars: dict[str, dict[str, Any]] = {}
    for view in states.views:
        if _turn(view.unit, StateKind.OPTIM)[1] and view.unit.layout.granularity is Granularity.ELEMENT:
            continue
        state = states.state_of(view)
        packed = {
            slot: pack_scalar(value)
            for slot, value in state.items()
            if isinstance(value, torch.Tensor) and value.dim() == 0 or isinstance(value, (bool, int, float))
        }
        if packed:
            scalars |= dict.fromkeys([s.name for s in segments_of(view)], packed)
            counts = {name: pack_scalar(state["step"] - missed) for name, missed in view.missed.items()}
            scalars |= {name: {**packed, "step": count} for name, count in counts.items()}
    return scalars


def in_rows(scalars: Iterable[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Group packed numbers in rows of equal ones: {"values": ..., "names": [...]}; a name counts once."""
    rows: dict[str, tuple[dict[str, Any], dict[str, None]]] = {}
    for name, values in scalars:
        rows.setdefault(repr(sorted(values.items(), key=str)), (values, {}))[1][name] = None
    return [{"values": values, "names": list(names)} for values, names in rows.values()]


def group_rows(groups: Iterable[tuple[list[str], dict[str, Any]]], plain: Collected, name: str) -> list[dict[str, Any]]:
    """Pack names and options of optimizer groups; ``name``: what the names of tensors among the options begin with."""
    return [
        {"names": names, "options": plain.add({k: v for k, v in options.items() if k != "params"}, f"{name}/{index}")}
        for index, (names, options) in enumerate(groups)
    ]


def odd_state(states: States) -> dict[str, Any]:
    """Return the optimizer's other state: values of views that are no tensors or numbers, and entries of no tensor."""
    views: dict[str, Any] = {}
    for view in states.views:
        rest = {k: v for k, v in states.state_of(view).items() if not isinstance(v, (torch.Tensor, bool, int, float))}
        if rest:
            views[view_key(view)] = rest
    entries = states.optimizer.state if states.optimizer is not None else {}
    shared = {k: v for k, v in entries.items() if not isinstance(k, torch.Tensor)}
    return {"views": views, "shared": shared} if views or shared else {}


def pack_scalar(value: Any) -> Any:
    """Pack a number, or a tensor without dimensions, as JSON that keeps every bit."""
    if isinstance(value, torch.Tensor):
        raw = value.detach().cpu().contiguous().view(1).view(torch.uint8).numpy().tobytes()
        return {"dtype": str(value.dtype).removeprefix("torch."), "bytes": base64.b64encode(raw).decode()}
    return value.hex() if isinstance(value, float) else value


def unpack_scalar(packed: Any) -> Any:
    """Invert ``pack_scalar``."""
    if isinstance(packed, dict):
        dtype = getattr(torch, packed["dtype"])
        return torch.frombuffer(bytearray(base64.b64decode(packed["bytes"])), dtype=dtype).clone().view(())
    return float.fromhex(packed) if isinstance(packed, str) else packed


def gradient_parts(states: States, *, without: set[str]) -> Iterator[TensorPart]:
    """Yield the gradients of an open window: reduced ones, then this rank's partial sums, under its ``zero`` index."""
    for unit in (u for u in states.units if u.window.filled):
        ours = (o for o in owned(unit, StateKind.GRAD) if o[0].name not in without)
        yield from range_parts(unit, StateKind.GRAD, "grad", ours)
    for unit in (u for u in states.units if u.window.partial is not None):
        assert unit.window.partial is not None
        for segment in (unit.layout.segments[i] for i in sorted(unit.window.fired)):
            if segment.numel and segment.name not in without:
                state = f"grad_partial@{unit.mesh.zero.index}"
                for lo, hi, span in segment.spans(segment.offset, segment.stop):
                    values = Elements(unit.window.partial[lo:hi])
                    yield TensorPart(state, segment.name, segment.whole_shape, span.lo, values, span.region)


def sites(states: States) -> list[Site]:
    """Return parameters that ranks outside their unit's ``zero`` group may hold too; empty but on its first rank."""
    units = [u for u in states.units if u.mesh.zero.index == 0 and u.mesh.zero.size < u.mesh.job.size]
    return [(s.name, s.region) for u in units for s in u.layout.segments]


def written_elsewhere(states: States, first: dict[Site, int]) -> set[str]:
    """Return the parameters that other ranks write; ``first``: the first rank of the job to name each site."""
    ranks, units = states.mesh.job.ranks, [u for u in states.units if u.mesh.zero.size < u.mesh.job.size]
    return {s.name for u in units for s in u.layout.segments if ranks[first[s.name, s.region]] != u.mesh.zero.ranks[0]}


def frozen_names(states: States) -> set[str]:
    """Return the names of frozen parameters in units without master weights."""
    units = [u for u in states.units if weights_of(u)[0] is StateKind.PARAM]
    return {s.name for u in units for s, p in zip(u.layout.segments, u.params, strict=True) if not p.requires_grad}


def extra_modules(module: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that define an extra state, by path."""
    return {path: m for path, m in module.named_modules() if type(m).get_extra_state is not nn.Module.get_extra_state}


def names_of(states: States) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Return global shapes of parameters this rank has a part of; and the stored name of each further tied name."""
    shapes, stored = dict[str, tuple[int, ...]](), dict[int, str]()
    for unit in states.units:
        for param, segment in zip(unit.params, unit.layout.segments, strict=True):
            shapes[segment.name], stored[id(param)] = segment.whole_shape, segment.name
    named = ((name, stored.get(id(p), name)) for name, p in states.module.named_parameters(remove_duplicate=False))
    return shapes, {name: real for name, real in named if name != real}
