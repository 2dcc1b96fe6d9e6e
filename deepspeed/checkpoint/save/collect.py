"""What one rank writes of an engine's state: parts of global tensors under their own names, each written by one rank.

Nothing here depends on the optimizer's class: every tensor slot it keeps is saved by its own name. Nothing of a drive
is copied to be saved: whoever wants to write over it waits until it has been read (``Stored.hold``). As a save reads in
the order of the next update, and has the next forward and backward for that, nobody waits as a rule.
"""

import base64
import bisect
import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn

from deepspeed.checkpoint.format.boxes import Region
from deepspeed.errors import InvalidStateError
from deepspeed.mesh.groups import Mesh
from deepspeed.tier.aligned import ALIGN, aligned_empty
from deepspeed.tier.drive import Held, Stored
from deepspeed.tier.store import TierStore
from deepspeed.zero.layout import ALIGNMENT_NUMEL, Granularity, Segment
from deepspeed.zero.optim_tiles import OptimTiles
from deepspeed.zero.optim_view import OptimView
from deepspeed.zero.plan import Spread, StateKind, StatePlan
from deepspeed.zero.unit import Unit

Site = tuple[str, Region | None]  # a parameter's name, and where the local tensor sits in the global one
Read = Callable[[int, int], torch.Tensor]  # elements [lo, hi), flat, valid until the next read
_PART_NUMEL = 8 << 20  # elements that are in memory at once, for what comes from a drive


@dataclass(frozen=True)
class TensorPart:
    """``values`` (flat): the elements from ``lo`` on of ``region`` (None: all) of the global tensor (state, name)."""

    state: str
    name: str
    shape: tuple[int, ...]
    lo: int
    values: torch.Tensor
    region: Region | None = None


@dataclass(frozen=True)
class States:
    """The state of one engine, wherever it rests. ``attached(view)`` brings a view's optimizer state into memory.

    ``groups``: names of the parameters of every optimizer group, in the user's order. ``tiles``: what is on a drive.
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
        views: dict[int, list[OptimView]] = {}
        for view in self.views:
            views.setdefault(id(view.unit), []).append(view)
        return views


class StateReader:
    """Reads the states of one engine for one save. What rests in memory is given as it is: copy it before training."""

    def __init__(self, states: States) -> None:
        self._states = states
        self._holds: dict[int, Held] = {}
        self._layouts: dict[int, _Layout] = {}
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._over = False

    def hold(
        self, states: Iterable[tuple[Unit, StateKind]], views: Iterable[OptimView], hurry: Callable[[], None]
    ) -> None:
        """From here on reads of these give the values of now; ``hurry`` is called when somebody waits for that."""
        for unit, kind in states:
            stored = unit.rest[kind]
            assert isinstance(stored, Stored)
            self._holds[id(stored)] = stored.hold(hurry)
        for view in views:
            layout = self._layout(view)
            if isinstance(layout.store, Stored):
                self._holds[id(layout.store)] = layout.store.hold(hurry)
            tensors = {k: v if v.device.type == "meta" else v.clone() for k, v in layout.tensors.items()}
            self._layouts[id(view)] = layout._replace(tensors=tensors)

    def release(self) -> None:
        """Nothing more can be read. Also after an error, when a reader of parts stands still half way."""
        self._over = True
        for hold in list(self._holds.values()):
            hold.release()
        self._holds.clear()
        self._layouts.clear()
        self._buffer = torch.empty(0, dtype=torch.uint8)

    @contextlib.contextmanager
    def values(self, unit: Unit, kind: StateKind) -> Iterator[Read]:
        """This rank's range of a state, by elements of that range."""
        stored = unit.rest.get(kind)
        if isinstance(stored, Stored):
            with self._opened(stored) as hold:
                yield self._placed(hold, 0, stored.dtype)
            return
        with unit.values(kind) as values:
            yield lambda lo, hi: values.detach()[lo:hi]

    @contextlib.contextmanager
    def slots(self, view: OptimView) -> Iterator[dict[str, tuple[torch.Tensor, Read]]]:
        """Every tensor the optimizer keeps for ``view``: one of its shape and dtype, and its flat elements."""
        layout = self._layouts.pop(id(view), None) or self._layout(view)
        near = {k: (v, _flat(v)) for k, v in layout.tensors.items() if k not in layout.places}
        if not isinstance(layout.store, Stored):
            yield near
            return
        with self._opened(layout.store) as hold:
            away = {k: (layout.tensors[k], start) for k, start in layout.places.items()}
            yield near | {k: (like, self._placed(hold, start, like.dtype)) for k, (like, start) in away.items()}

    def _layout(self, view: OptimView) -> "_Layout":
        store, places = self._states.tiles.region_of(view) if self._states.tiles is not None else (None, {})
        tensors = {k: v for k, v in self._states.state_of(view).items() if isinstance(v, torch.Tensor) and v.dim() > 0}
        away = {k: torch.empty(v.shape, dtype=v.dtype, device="meta") for k, v in tensors.items() if k in places}
        return _Layout(tensors | away, store, places)

    def _placed(self, hold: Held, start: int, dtype: torch.dtype) -> Read:
        return lambda lo, hi: self._read(hold, start + lo * dtype.itemsize, (hi - lo) * dtype.itemsize, dtype)

    @contextlib.contextmanager
    def _opened(self, stored: Stored) -> Iterator[Held]:
        if self._over:
            raise InvalidStateError("a state was read for a save that had let go of it; save again")
        if id(stored) not in self._holds:
            self._holds[id(stored)] = stored.hold(lambda: None)
        hold = self._holds[id(stored)]
        try:
            yield hold
        finally:
            hold.release()
            self._holds.pop(id(stored), None)

    def _read(self, hold: Held, start: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
        # The same place within a page as in the file, so that whole pages can bypass the page cache.
        shift = start % ALIGN
        if self._buffer.numel() < shift + nbytes:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # before the larger one is there
            self._buffer = aligned_empty(-(-(shift + nbytes) // ALIGN) * ALIGN)
        inside = self._buffer[shift : shift + nbytes]
        hold.read(start, inside)
        return inside.view(dtype)


class _Layout(NamedTuple):
    """The slots of one view: tensors (on meta where the values are on a drive), and where on it they are."""

    tensors: dict[str, torch.Tensor]
    store: TierStore | None
    places: dict[str, int]


def _flat(value: torch.Tensor) -> Read:
    flat = value.detach().contiguous().view(-1)
    return lambda lo, hi: flat[lo:hi]


def region_of(segment: Segment) -> Region | None:
    """Where the local tensor sits in the global one; None: it is the whole."""
    if segment.global_start is None or segment.global_shape == segment.shape:
        return None
    return Region(segment.global_start, segment.shape)


def shape_of(segment: Segment) -> tuple[int, ...]:
    """The global tensor's."""
    return segment.shape if segment.global_shape is None else segment.global_shape


def weights_of(unit: Unit) -> tuple[StateKind, str]:
    """Which state holds the authoritative weights of a unit, and its name in a checkpoint."""
    return (StateKind.OPTIM, "master") if unit.master is not None else (StateKind.PARAM, "param")


@dataclass(frozen=True)
class WriteRange:
    """What of a state this rank writes: ranks that hold the same range divide it among themselves."""

    start: int
    stop: int
    replicas: int
    index: int

    def takes(self, position: int) -> bool:
        """Whether an indivisible thing with that number is this rank's to write."""
        return position % self.replicas == self.index


def write_range(unit: Unit, kind: StateKind) -> WriteRange:
    """This rank's part of its resting range. Whole parameters are dealt out one by one instead (``takes``)."""
    plan: StatePlan = getattr(unit.plan, kind.value)
    replicas, index = 1, 0
    for way, axis in zip(plan.spread, unit.mesh.axes, strict=True):
        if way is Spread.REPLICATED:
            index = index * axis.size + axis.index
            replicas *= axis.size
    start, stop = unit.range_of(kind)
    if unit.layout.granularity is Granularity.PARAMETER:
        return WriteRange(start, stop, replicas, index)
    each = -(-(stop - start) // (replicas * ALIGNMENT_NUMEL)) * ALIGNMENT_NUMEL
    return WriteRange(min(stop, start + index * each), min(stop, start + (index + 1) * each), replicas, index)


def overlaps(unit: Unit, turn: WriteRange) -> Iterator[tuple[Segment, int, int]]:
    """(segment, lo, hi) in flat indices of everything in ``turn`` that this rank writes."""
    whole = unit.layout.granularity is Granularity.PARAMETER
    for position, segment in enumerate(unit.layout.segments):
        lo, hi = unit.layout.overlap(segment, turn.start, turn.stop)
        if lo < hi and (not whole or turn.takes(position)):
            yield segment, lo, hi


def weight_parts(states: States, reader: StateReader, *, without: set[str]) -> Iterator[TensorPart]:
    """Weights and optimizer slots of every unit, but for the parameters ``without``; a part is valid until the next."""
    for unit in states.units:
        kind, state = weights_of(unit)
        turn, base = write_range(unit, kind), unit.range_of(kind)[0]
        ours = [o for o in overlaps(unit, turn) if o[0].name not in without]
        with reader.values(unit, kind) as read:
            for segment, lo, hi in ours:
                yield from _pieces(state, segment, read, lo, hi, base=base)
            if unit.mesh.zero.index == 0:  # in nobody's range, but a complete checkpoint names them
                for segment in unit.layout.segments:
                    if not prod(shape_of(segment)) and segment.name not in without:
                        yield _part(state, segment, 0, read(0, 0))
        if kind is StateKind.OPTIM:
            for view in states.views_of(unit):
                with reader.slots(view) as slots:
                    yield from _slot_parts(view, slots, turn, _met(ours, view))


def _part(state: str, segment: Segment, lo: int, values: torch.Tensor) -> TensorPart:
    return TensorPart(state, segment.name, shape_of(segment), lo, values, region_of(segment))


def _pieces(state: str, segment: Segment, read: Read, lo: int, hi: int, *, base: int) -> Iterator[TensorPart]:
    """Flat indices [lo, hi) of a unit, of which ``read`` knows those from ``base`` on, in parts of bounded size."""
    for at in range(lo, hi, _PART_NUMEL):
        yield _part(state, segment, at - segment.offset, read(at - base, min(hi, at + _PART_NUMEL) - base))


def is_elementwise(view: OptimView, value: Any) -> bool:
    """Whether an optimizer slot has one element for every element of the view's weights."""
    if not isinstance(value, torch.Tensor) or value.dim() == 0 or value.layout is not torch.strided:
        return False
    if view.unit.layout.granularity is Granularity.PARAMETER:
        return value.shape == view.param.shape
    return value.numel() == view.stop - view.start and value.dim() == 1


def _met(ours: list[tuple[Segment, int, int]], view: OptimView) -> list[tuple[Segment, int, int]]:
    """Those of ``ours`` (ascending) that ``view`` meets. A unit may have a thousand of both."""
    first = bisect.bisect_right(ours, view.start, key=lambda o: o[2])
    return ours[first : bisect.bisect_left(ours, view.stop, key=lambda o: o[1])]


def _slot_parts(
    view: OptimView, slots: dict[str, tuple[torch.Tensor, Read]], turn: WriteRange, ours: list[tuple[Segment, int, int]]
) -> Iterator[TensorPart]:
    for name, (like, read) in slots.items():
        shape, numel = tuple(like.shape), like.numel()
        if is_elementwise(view, like):
            for segment, lo, hi in ours:
                lo, hi = max(lo, view.start), min(hi, view.stop)
                yield from _pieces(f"optim.{name}", segment, read, lo, hi, base=view.start)
        elif view.unit.layout.granularity is Granularity.PARAMETER:
            for segment, _, _ in ours:
                region = region_of(segment)
                state, key = ("optim", view.name) if region is None else ("part", part_key(view.name, region))
                yield TensorPart(f"{state}.{name}", key, shape, 0, read(0, numel))
        elif turn.index == 0:
            yield TensorPart(f"opaque.{name}", view_key(view), shape, 0, read(0, numel))


def view_key(view: OptimView) -> str:
    """Name of a view for state that only the very same layout can take back, whatever units other ranks have."""
    job, zero = view.unit.mesh.job, view.unit.mesh.zero
    suffix = "" if zero.size == job.size else f"@{job.ranks.index(zero.ranks[0])}"
    return f"{view.unit.name}:{view.group}:{view.start}-{view.stop}/{view.unit.layout.numel}{suffix}"


def part_key(name: str, region: Region) -> str:
    """Name of a part of a parameter for state that only the very same part can take back."""
    return f"{name}@{','.join(map(str, region.start))}+{','.join(map(str, region.shape))}"


def segments_of(view: OptimView) -> list[Segment]:
    """The parameters that a view has a part of; they lie in ascending order."""
    segments = view.unit.layout.segments
    first = bisect.bisect_right(segments, view.start, key=lambda s: s.stop)
    last = bisect.bisect_left(segments, view.stop, key=lambda s: s.offset)
    return [s for s in segments[first:last] if s.numel]


def scalar_state(states: States) -> dict[str, dict[str, Any]]:
    """Numbers the optimizer keeps per parameter (a step count), as JSON by parameter and slot; from one of replicas."""
    scalars: dict[str, dict[str, Any]] = {}
    for view in states.views:
        if write_range(view.unit, StateKind.OPTIM).index and view.unit.layout.granularity is Granularity.ELEMENT:
            continue
        packed = {
            slot: pack_scalar(value)
            for slot, value in states.state_of(view).items()
            if isinstance(value, torch.Tensor) and value.dim() == 0 or isinstance(value, (bool, int, float))
        }
        if packed:
            scalars |= dict.fromkeys([s.name for s in segments_of(view)], packed)
    return scalars


def in_rows(scalars: Iterable[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Packed numbers by parameter as rows of equal ones: {"values": ..., "names": [...]}; a name counts once."""
    rows: dict[str, tuple[dict[str, Any], dict[str, None]]] = {}
    for name, values in scalars:
        rows.setdefault(repr(sorted(values.items(), key=str)), (values, {}))[1][name] = None
    return [{"values": values, "names": list(names)} for values, names in rows.values()]


def odd_state(states: States) -> dict[str, Any]:
    """Whatever else the optimizer keeps: per view neither tensors nor numbers, and entries that belong to no tensor."""
    assert states.optimizer is not None
    views: dict[str, Any] = {}
    for view in states.views:
        rest = {k: v for k, v in states.state_of(view).items() if not isinstance(v, (torch.Tensor, bool, int, float))}
        if rest:
            views[view_key(view)] = rest
    shared = {k: v for k, v in states.optimizer.state.items() if not isinstance(k, torch.Tensor)}
    return {"views": views, "shared": shared} if views or shared else {}


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


def gradient_parts(states: States, reader: StateReader, *, without: set[str]) -> Iterator[TensorPart]:
    """Gradients of an accumulation window that is open, as far as they are reduced; every unit has some."""
    for unit in states.units:
        base = unit.range_of(StateKind.GRAD)[0]
        with reader.values(unit, StateKind.GRAD) as read:
            for segment, lo, hi in overlaps(unit, write_range(unit, StateKind.GRAD)):
                if segment.name not in without:
                    yield from _pieces("grad", segment, read, lo, hi, base=base)


def partial_parts(states: States, *, without: set[str]) -> Iterator[TensorPart]:
    """This rank's sums of gradients that are not reduced yet, by its number among the ranks that will reduce them."""
    for unit in states.units:
        for segment in (unit.layout.segments[i] for i in sorted(unit.fired) if unit.partial is not None):
            if segment.numel and segment.name not in without and unit.partial is not None:
                values = unit.partial[segment.offset : segment.stop]
                yield _part(f"grad_partial@{unit.mesh.zero.index}", segment, 0, values)


def sites(states: States) -> list[Site]:
    """The parameters that other ranks than their unit's ``zero`` may hold too, as told by the first of these."""
    units = [u for u in states.units if u.mesh.zero.index == 0 and u.mesh.zero.size < u.mesh.job.size]
    return [(s.name, region_of(s)) for u in units for s in u.layout.segments]


def written_elsewhere(states: States, first: dict[Site, int]) -> set[str]:
    """Parameters that are other ranks' to write; ``first``: which rank of the job was the first to name each site."""
    ranks, units = states.mesh.job.ranks, [u for u in states.units if u.mesh.zero.size < u.mesh.job.size]
    return {
        s.name for u in units for s in u.layout.segments if ranks[first[s.name, region_of(s)]] != u.mesh.zero.ranks[0]
    }


def frozen_names(states: States) -> set[str]:
    """Parameters without fp32 weights of their own that are not trained."""
    units = [u for u in states.units if weights_of(u)[0] is StateKind.PARAM]
    return {s.name for u in units for s, p in zip(u.layout.segments, u.params, strict=True) if not p.requires_grad}


def extra_modules(module: nn.Module) -> dict[str, nn.Module]:
    """Modules with an extra state of their own, by path."""
    return {path: m for path, m in module.named_modules() if type(m).get_extra_state is not nn.Module.get_extra_state}


def names_of(states: States) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Global shapes of the parameters that this rank has a part of; tied names and the one they are stored under."""
    shapes, stored = dict[str, tuple[int, ...]](), dict[int, str]()
    for unit in states.units:
        for param, segment in zip(unit.params, unit.layout.segments, strict=True):
            shapes[segment.name], stored[id(param)] = shape_of(segment), segment.name
    named = ((name, stored.get(id(p), name)) for name, p in states.module.named_parameters(remove_duplicate=False))
    return shapes, {name: real for name, real in named if name != real}


def nbytes_of(states: States) -> int:
    """Bytes of weights and slots that this rank will write, about: for progress."""
    total = 0
    for unit in states.units:
        turn = write_range(unit, weights_of(unit)[0])
        dtype = unit.master.dtype if unit.master is not None else unit.full.dtype
        dealt = turn.replicas if unit.layout.granularity is Granularity.PARAMETER else 1
        tensors = (v for view in states.views_of(unit) for v in states.state_of(view).values())
        slots = sum(v.nbytes for v in tensors if isinstance(v, torch.Tensor))
        total += (turn.stop - turn.start) * dtype.itemsize // dealt + slots // turn.replicas
    return total
