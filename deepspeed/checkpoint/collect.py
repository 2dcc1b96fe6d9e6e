"""What one rank writes of an engine's state: parts of global tensors under their own names, each written by exactly one rank.

Nothing here depends on the optimizer's class: every tensor slot it keeps is saved by its own name.
"""

import base64
import bisect
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn

from deepspeed.checkpoint.held import Read, Reader, Slot
from deepspeed.mesh.groups import Mesh
from deepspeed.zero.layout import ALIGNMENT_NUMEL, Granularity, Segment
from deepspeed.zero.optim_tiles import OptimTiles
from deepspeed.zero.optim_view import OptimView
from deepspeed.zero.plan import Spread, StateKind, StatePlan
from deepspeed.zero.unit import Unit

_PART_NUMEL = 8 << 20  # elements that are in memory at once, for what comes from a drive


@dataclass(frozen=True)
class Part:
    """``values`` (flat) are the elements from ``lo`` on, in row-major order, of the global tensor (state, name)."""

    state: str
    name: str
    shape: tuple[int, ...]
    lo: int
    values: torch.Tensor


@dataclass(frozen=True)
class States:
    """The state of one engine, wherever it rests. ``attached(view)`` brings a view's optimizer state into memory for a while.

    ``groups``: names of the parameters of every optimizer group, in the order the user gave them in. ``tiles``: what rests on a drive.
    """

    module: nn.Module
    mesh: Mesh
    units: list[Unit]
    views: list[OptimView]
    optimizer: torch.optim.Optimizer | None
    attached: Callable[..., AbstractContextManager[None]]
    groups: list[list[str]]
    tiles: OptimTiles | None = None

    def state_of(self, view: OptimView) -> dict[str, Any]:
        """What the optimizer holds for ``view``."""
        return self.optimizer.state.get(view.param, {}) if self.optimizer is not None else {}

    def views_of(self, unit: Unit) -> list[OptimView]:
        return self._by_unit.get(id(unit), [])

    @cached_property
    def _by_unit(self) -> dict[int, list[OptimView]]:
        found: dict[int, list[OptimView]] = {}
        for view in self.views:
            found.setdefault(id(view.unit), []).append(view)
        return found


def weights_of(unit: Unit) -> tuple[StateKind, str]:
    """Which state holds the authoritative weights of a unit, and its name in a checkpoint."""
    return (StateKind.OPTIM, "master") if unit.master is not None else (StateKind.PARAM, "param")


def plan_of(unit: Unit, kind: StateKind) -> StatePlan:
    """The row entry of a state that the unit has."""
    plan = {StateKind.PARAM: unit.plan.param, StateKind.GRAD: unit.plan.grad, StateKind.OPTIM: unit.plan.optim}[kind]
    assert plan is not None
    return plan


@dataclass(frozen=True)
class Share:
    """What of a state this rank writes: ranks that hold the same range divide it among themselves."""

    start: int
    stop: int
    replicas: int
    index: int

    def takes(self, position: int) -> bool:
        """Whether an indivisible thing with that number is this rank's to write."""
        return position % self.replicas == self.index


def share_of(unit: Unit, kind: StateKind) -> Share:
    """This rank's share of its resting range. Whole parameters are dealt out one by one instead (``takes``)."""
    plan = plan_of(unit, kind)
    replicas, index = 1, 0
    for way, axis in zip(plan.spread, unit.mesh.axes, strict=True):
        if way is Spread.REPLICATED:
            index = index * axis.size + axis.index
            replicas *= axis.size
    start, stop = unit.range_of(kind)
    if unit.layout.granularity is Granularity.PARAMETER:
        return Share(start, stop, replicas, index)
    each = -(-(stop - start) // (replicas * ALIGNMENT_NUMEL)) * ALIGNMENT_NUMEL
    return Share(min(stop, start + index * each), min(stop, start + (index + 1) * each), replicas, index)


Overlap = tuple[int, Segment, int, int]


def overlaps(unit: Unit, share: Share) -> Iterator[Overlap]:
    """(position, segment, lo, hi) in flat indices of everything in ``share`` that this rank writes."""
    whole = unit.layout.granularity is Granularity.PARAMETER
    for position, segment in enumerate(unit.layout.segments):
        lo, hi = unit.layout.overlap(segment, share.start, share.stop)
        if lo < hi and (not whole or share.takes(position)):
            yield position, segment, lo, hi


def frozen_names(states: States) -> set[str]:
    """Parameters without fp32 weights of their own that are not trained."""
    units = [u for u in states.units if weights_of(u)[0] is StateKind.PARAM]
    return {s.name for u in units for s, p in zip(u.layout.segments, u.params, strict=True) if not p.requires_grad}


def weight_parts(states: States, reader: Reader, *, without: set[str]) -> Iterator[Part]:
    """Weights and optimizer slots of every unit, but for the parameters ``without``; a part is valid until the next one is asked for."""
    for unit in states.units:
        kind, state = weights_of(unit)
        share, base = share_of(unit, kind), unit.range_of(kind)[0]
        ours = list(overlaps(unit, share))
        with reader.values(unit, kind) as read:
            for _, segment, lo, hi in ours:
                if segment.name not in without:
                    yield from _pieces(state, segment, read, lo, hi, base=base)
            if states.mesh.first:  # in nobody's range, but a complete checkpoint names them
                for segment in unit.layout.segments:
                    if not segment.numel and segment.name not in without:
                        yield Part(state, segment.name, segment.shape, 0, read(0, 0))
        if kind is StateKind.OPTIM:
            for view in states.views_of(unit):
                with reader.slots(view) as slots:
                    yield from _slot_parts(view, slots, share, _met(ours, view))


def _pieces(state: str, segment: Segment, read: Read, lo: int, hi: int, *, base: int) -> Iterator[Part]:
    """Flat indices [lo, hi) of a unit, of which ``read`` knows those from ``base`` on, in parts of bounded size."""
    for at in range(lo, hi, _PART_NUMEL):
        yield Part(state, segment.name, segment.shape, at - segment.offset, read(at - base, min(hi, at + _PART_NUMEL) - base))


def is_elementwise(view: OptimView, value: Any) -> bool:
    """Whether an optimizer slot has one element for every element of the view's weights."""
    if not isinstance(value, torch.Tensor) or value.dim() == 0 or value.layout is not torch.strided:
        return False
    if view.unit.layout.granularity is Granularity.PARAMETER:
        return value.shape == view.param.shape
    return value.numel() == view.stop - view.start and value.dim() == 1


def _met(ours: list[Overlap], view: OptimView) -> list[Overlap]:
    """Those of ``ours`` (ascending) that ``view`` meets. A unit may have a thousand of both."""
    first = bisect.bisect_right(ours, view.start, key=lambda o: o[3])
    return ours[first : bisect.bisect_left(ours, view.stop, key=lambda o: o[2])]


def _slot_parts(view: OptimView, slots: dict[str, Slot], share: Share, ours: list[Overlap]) -> Iterator[Part]:
    for name, slot in slots.items():
        shape, numel = tuple(slot.like.shape), slot.like.numel()
        if is_elementwise(view, slot.like):
            for _, segment, lo, hi in ours:
                lo, hi = max(lo, view.start), min(hi, view.stop)
                yield from _pieces(f"optim.{name}", segment, slot.read, lo, hi, base=view.start)
        elif view.unit.layout.granularity is Granularity.PARAMETER:
            if ours:
                yield Part(f"optim.{name}", view.name, shape, 0, slot.read(0, numel))
        elif share.index == 0:
            yield Part(f"opaque.{name}", view_key(view), shape, 0, slot.read(0, numel))


def view_key(view: OptimView) -> str:
    """Name of a view for state that only the very same layout can take back."""
    return f"{view.unit.name}:{view.group}:{view.start}-{view.stop}/{view.unit.layout.numel}"


def covered(view: OptimView) -> list[str]:
    """Names of the parameters that a view has a part of."""
    return [s.name for s in segments_of(view)]


def segments_of(view: OptimView) -> list[Segment]:
    """The parameters that a view has a part of; they lie in ascending order."""
    segments = view.unit.layout.segments
    first = bisect.bisect_right(segments, view.start, key=lambda s: s.stop)
    last = bisect.bisect_left(segments, view.stop, key=lambda s: s.offset)
    return [s for s in segments[first:last] if s.numel]


def scalar_state(states: States) -> dict[str, dict[str, Any]]:
    """Numbers the optimizer keeps per parameter (a step count), as JSON by parameter and slot; from the first of equal replicas."""
    found: dict[str, dict[str, Any]] = {}
    for view in states.views:
        if share_of(view.unit, StateKind.OPTIM).index and view.unit.layout.granularity is Granularity.ELEMENT:
            continue
        own = {
            slot: pack_scalar(value)
            for slot, value in states.state_of(view).items()
            if isinstance(value, torch.Tensor) and value.dim() == 0 or isinstance(value, (bool, int, float))
        }
        for name in covered(view):
            if own:
                found[name] = own
    return found


def in_rows(scalars: Iterable[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Packed numbers by parameter as rows of equal ones: {"values": ..., "names": [...]}; a name counts once."""
    rows: dict[str, tuple[dict[str, Any], dict[str, None]]] = {}
    for name, values in scalars:
        rows.setdefault(repr(sorted(values.items(), key=str)), (values, {}))[1][name] = None
    return [{"values": values, "names": list(names)} for values, names in rows.values()]


def odd_state(states: States) -> dict[str, Any]:
    """Whatever else the optimizer keeps: per view neither tensors nor numbers, and entries that belong to no tensor."""
    assert states.optimizer is not None
    found: dict[str, Any] = {}
    for view in states.views:
        rest = {k: v for k, v in states.state_of(view).items() if not isinstance(v, (torch.Tensor, bool, int, float))}
        if rest:
            found[view_key(view)] = rest
    shared = {k: v for k, v in states.optimizer.state.items() if not isinstance(k, torch.Tensor)}
    return {"views": found, "shared": shared} if found or shared else {}


def pack_scalar(value: Any) -> Any:
    """A number, or a tensor without dimensions, as JSON that keeps every bit."""
    if isinstance(value, torch.Tensor):
        raw = value.detach().cpu().contiguous().view(1).view(torch.uint8).numpy().tobytes()
        return {"dtype": str(value.dtype).removeprefix("torch."), "bytes": base64.b64encode(raw).decode()}
    return value.hex() if isinstance(value, float) else value


def unpack_scalar(packed: Any) -> Any:
    """The inverse of ``pack_scalar``."""
    if isinstance(packed, dict):
        dtype = getattr(torch, packed["dtype"])
        return torch.frombuffer(bytearray(base64.b64decode(packed["bytes"])), dtype=dtype).clone().view(())
    return float.fromhex(packed) if isinstance(packed, str) else packed


def gradient_parts(states: States, reader: Reader) -> Iterator[Part]:
    """Gradients of an accumulation window that is open, as far as they are reduced; every unit has some."""
    for unit in states.units:
        base = unit.range_of(StateKind.GRAD)[0]
        with reader.values(unit, StateKind.GRAD) as read:
            for _, segment, lo, hi in overlaps(unit, share_of(unit, StateKind.GRAD)):
                yield from _pieces("grad", segment, read, lo, hi, base=base)


def partial_parts(states: States) -> Iterator[Part]:
    """This rank's own sums of gradients that are not reduced yet."""
    for unit in states.units:
        for position in sorted(unit.fired) if unit.partial is not None else ():
            segment = unit.layout.segments[position]
            if segment.numel and unit.partial is not None:
                values = unit.partial[segment.offset : segment.stop]
                yield Part(f"grad_partial@{states.mesh.job.index}", segment.name, segment.shape, 0, values)


def buffer_parts(buffers: dict[str, torch.Tensor], state: str) -> Iterator[Part]:
    for name, buffer in buffers.items():
        yield Part(state, name, tuple(buffer.shape), 0, buffer.detach().contiguous().view(-1))


def extra_states(module: nn.Module) -> dict[str, Any]:
    """``get_extra_state()`` of the modules that have one, by module path."""
    return {path: m.get_extra_state() for path, m in extra_modules(module).items()}


def extra_modules(module: nn.Module) -> dict[str, nn.Module]:
    """Modules with an extra state of their own, by path."""
    return {path: m for path, m in module.named_modules() if type(m).get_extra_state is not nn.Module.get_extra_state}


@dataclass(frozen=True)
class Expected:
    """A tensor that a complete checkpoint of this engine must hold, whether or not this rank has part of it."""

    state: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class Names:
    """Parameters by name; tied names and the one they are stored under."""

    weights: dict[str, Expected] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)


def names_of(states: States) -> Names:
    """Every parameter's name and shape; ``aliases`` for the further names of tied ones."""
    names = Names()
    stored: dict[int, str] = {}
    for unit in states.units:
        _, state = weights_of(unit)
        dtype = unit.master.dtype if unit.master is not None else unit.full.dtype
        for param, segment in zip(unit.params, unit.layout.segments, strict=True):
            names.weights[segment.name] = Expected(state, segment.shape, dtype)
            stored[id(param)] = segment.name
    for name, param in states.module.named_parameters(remove_duplicate=False):
        if stored.get(id(param), name) != name:
            names.aliases[name] = stored[id(param)]
    return names


def nbytes_of(states: States) -> int:
    """Bytes of weights and slots that this rank will write, about: for progress."""
    total = 0
    for unit in states.units:
        kind, _ = weights_of(unit)
        share = share_of(unit, kind)
        dtype = unit.master.dtype if unit.master is not None else unit.full.dtype
        dealt = share.replicas if unit.layout.granularity is Granularity.PARAMETER else 1
        slots = sum(v.nbytes for view in states.views_of(unit) for v in states.state_of(view).values() if isinstance(v, torch.Tensor))
        total += (share.stop - share.start) * dtype.itemsize // dealt + slots // share.replicas
    return total
