"""From a checkpoint into an engine that it fits: every rank reads what its own ranges overlap with."""

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import torch

from deepspeed.checkpoint.format.boxes import Region
from deepspeed.checkpoint.load.match import Comparison
from deepspeed.checkpoint.load.source import Key, Source, Wish, whole
from deepspeed.checkpoint.save import collect
from deepspeed.checkpoint.save.collect import States, region_of, segments_of, shape_of
from deepspeed.errors import CheckpointError
from deepspeed.zero.client.consolidate import persistent_buffers
from deepspeed.zero.gradients import Gradients
from deepspeed.zero.layout import Granularity
from deepspeed.zero.optim_view import OptimView
from deepspeed.zero.plan import StateKind
from deepspeed.zero.unit import Unit

CUT_ANEW = (
    "and cannot be cut anew; load with the same configuration and number of ranks, or load_optimizer_states=False"
)


class Reads:
    """Reads that are collected and done together; conversions happen when the bytes are here."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._wanted: list[Wish] = []
        self._after: list[tuple[torch.Tensor, torch.Tensor]] = []

    def into(self, target: torch.Tensor, key: Key, start: int, region: Region | None) -> None:
        """Fill the flat ``target`` with elements of ``region`` of ``key`` from ``start`` on, converted to its dtype."""
        dtype = self._source.entries[key].dtype
        if target.device.type == "cpu" and target.dtype == dtype and target.is_contiguous():
            self._wanted.append(Wish(key, target, start, region))
            return
        arrived = torch.empty(target.numel(), dtype=dtype, device="cpu")
        self._wanted.append(Wish(key, arrived, start, region))
        self._after.append((target, arrived))

    def run(self) -> None:
        """Do them."""
        many = getattr(self._source, "read_many", None)
        if many is not None:
            many(self._wanted)
        else:
            for key, out, start, region in self._wanted:
                self._source.read(key, out, start=start, region=region)
        for target, arrived in self._after:
            target.copy_(arrived)
        self._wanted.clear()
        self._after.clear()


def _fill_range(unit: Unit, kind: StateKind, values: torch.Tensor, source: Source, keys: dict[str, Key]) -> None:
    """This rank's range of a unit's state from ``keys`` by parameter, as far as there are some."""
    start, stop = unit.range_of(kind)
    reads = Reads(source)
    for segment in unit.layout.segments:
        lo, hi = unit.layout.overlap(segment, start, stop)
        if lo < hi and segment.name in keys:
            target = values.detach()[lo - start : hi - start]
            reads.into(target, keys[segment.name], lo - segment.offset, region_of(segment))
    reads.run()


def fill_weights(states: States, source: Source, match: Comparison, report: Callable[[int], None]) -> None:
    """Weights into the resting range of every unit. Publishing them is the caller's."""
    with torch.no_grad():
        for unit in states.units:
            kind, _ = collect.weights_of(unit)
            start, stop = unit.range_of(kind)
            with unit.values(kind, write=True) as values:
                _fill_range(unit, kind, values, source, match.weights)
                if kind is StateKind.OPTIM and unit.tiled:
                    unit.publish_part(start, values).wait()
            report((stop - start) * unit.full.element_size())


def fill_buffers(states: States, source: Source, match: Comparison) -> None:
    """Persistent buffers, in place."""
    buffers = persistent_buffers(states.module)
    with torch.no_grad():
        for name, key in match.buffers.items():
            buffers[name].copy_(whole(source, key))


def fill_optimizer(states: States, source: Source, match: Comparison, report: Callable[[int], None]) -> None:
    """Slots and numbers of every view of this rank; what the optimizer held before is replaced."""
    assert states.optimizer is not None
    parts: dict[str, set[str]] = {}
    for kind, name in source.entries:
        if kind.startswith("part."):
            parts.setdefault(name.rpartition("@")[0], set()).add(kind.removeprefix("part."))
    for view in states.views:
        tensors = {k for k, v in states.state_of(view).items() if isinstance(v, torch.Tensor) and v.dim()}
        fresh = _slots_of(view, source, match) | _opaque_of(view, source) | _parts_of(view, source, parts)
        scalars = _scalars_of(view, match)
        if fresh.keys() != tensors or not fresh and not scalars:
            states.optimizer.state.pop(view.param, None)
        if not fresh and not scalars:
            continue
        with torch.no_grad(), states.attached(view, write=True):
            state = states.optimizer.state.get(view.param, {})
            _fill_view(view, state, fresh, source, scalars)
            states.optimizer.state[view.param] = state
        report(sum(v.nbytes for v in state.values() if isinstance(v, torch.Tensor)))


class _Filling(NamedTuple):
    """What fills a slot's tensor: its elements [lo, hi) come from ``start`` on of ``region`` of ``key``."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: list[tuple[int, int, Key, int, Region | None]]

    @classmethod
    def of(cls, source: Source, key: Key, region: Region | None = None) -> "_Filling":
        """The whole of ``region`` of ``key``."""
        dtype, shape = source.entries[key]
        shape = shape if region is None else region.shape
        return cls(shape, dtype, [(0, prod(shape), key, 0, region)])


def _slots_of(view: OptimView, source: Source, match: Comparison) -> dict[str, _Filling]:
    """What the slots of a view are filled with."""
    fillings, segments = dict[str, _Filling](), segments_of(view)
    for slot in dict.fromkeys(slot for s in segments for slot in match.slots.get(s.name, {})):
        keys = {s.name: match.slots[s.name][slot] for s in segments if slot in match.slots.get(s.name, {})}
        key = next(iter(keys.values()))
        first = source.entries[key]
        if view.unit.layout.granularity is Granularity.PARAMETER:
            region = region_of(segments[0]) if first.shape == shape_of(segments[0]) else None
            fillings[slot] = _Filling.of(source, key, region)
            continue
        pieces = []
        for segment in (s for s in segments if s.name in keys):
            lo, hi = max(segment.offset, view.start), min(segment.stop, view.stop)
            key = keys[segment.name]
            if prod(source.entries[key].shape) != prod(shape_of(segment)):
                raise CheckpointError(
                    f"optimizer state {slot!r} of {segment.name} has shape {source.entries[key].shape}, not that of "
                    f"the parameter ({shape_of(segment)}): it was saved by an optimizer that sees whole tensors, this "
                    "one sees elements"
                )
            pieces.append((lo - view.start, hi - view.start, key, lo - segment.offset, region_of(segment)))
        fillings[slot] = _Filling((view.stop - view.start,), first.dtype, pieces)
    return fillings


def _parts_of(view: OptimView, source: Source, parts: dict[str, set[str]]) -> dict[str, _Filling]:
    """State that fits the very same part of a parameter only; ``parts``: the slots that there are, by parameter."""
    fillings: dict[str, _Filling] = {}
    for segment, slot in ((s, slot) for s in segments_of(view) for slot in sorted(parts.get(s.name, ()))):
        region = region_of(segment)
        key = (f"part.{slot}", segment.name if region is None else collect.part_key(segment.name, region))
        if key not in source.entries or view.unit.layout.granularity is Granularity.ELEMENT:
            raise CheckpointError(
                f"optimizer state {slot!r} of {segment.name} belongs to the parts that the parameter was cut into "
                f"(tensor parallel) when it was saved, {CUT_ANEW}"
            )
        fillings[slot] = _Filling.of(source, key)
    return fillings


def _opaque_of(view: OptimView, source: Source) -> dict[str, _Filling]:
    """State that fits the very same layout only."""
    fillings: dict[str, _Filling] = {}
    for slot in sorted({s.removeprefix("opaque.") for s, _ in source.entries if s.startswith("opaque.")}):
        key = (f"opaque.{slot}", collect.view_key(view))
        if key not in source.entries:
            raise CheckpointError(
                f"optimizer state {slot!r} belongs to the layout it was saved under (ranks, sharding, buckets) "
                f"{CUT_ANEW}"
            )
        fillings[slot] = _Filling.of(source, key)
    return fillings


def _scalars_of(view: OptimView, match: Comparison) -> dict[str, Any]:
    names = [s.name for s in segments_of(view)]
    # A parameter without any is one that the checkpoint does not have (which strict loading refuses).
    numbers = [s for n in names if (s := match.scalars.get(n))] or [{}]
    packed = [{k: collect.pack_scalar(v) for k, v in one.items()} for one in numbers]
    differing = sorted({k for one in packed for k in one if any(other.get(k) != one[k] for other in packed)})
    if differing:
        raise CheckpointError(
            f"optimizer state {', '.join(differing)} differs between {names[0]} and {names[-1]} in the checkpoint, but "
            "this layout keeps one number for both; put them into different parameter groups, or load with "
            "load_optimizer_states=False"
        )
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in numbers[0].items()}


def _fill_view(
    view: OptimView, state: dict[str, Any], fresh: dict[str, _Filling], source: Source, scalars: dict[str, Any]
) -> None:
    reads = Reads(source)
    for slot, (shape, dtype, pieces) in fresh.items():
        old = state.get(slot)
        if not isinstance(old, torch.Tensor) or old.shape != shape or old.dtype != dtype:
            state[slot] = torch.zeros(shape, dtype=dtype, device=view.param.device)
        flat = state[slot].detach().view(-1)
        for lo, hi, key, start, region in pieces:
            reads.into(flat[lo:hi], key, start, region)
    reads.run()
    for name, value in scalars.items():
        old = state.get(name)
        if isinstance(old, torch.Tensor) and isinstance(value, torch.Tensor) and old.dtype == value.dtype:
            old.copy_(value)
        else:
            state[name] = value


def fill_gradients(states: States, source: Source, gradients: Gradients, *, factor: float) -> None:
    """The open accumulation window: reduced gradients, and the sums of other ranks dealt out to those there are now.

    ``factor`` is what a saved gradient must be multiplied by: the mean over another number of ranks.
    """
    parts: dict[str, list[Key]] = {}
    for state, name in source.entries:
        if state.startswith("grad_partial@"):
            parts.setdefault(name, []).append((state, name))
    with torch.no_grad():
        for unit in states.units:
            names, zero = [s.name for s in unit.layout.segments], unit.mesh.zero
            reduced = {n: ("grad", n) for n in names if ("grad", n) in source.entries}
            if unit.trainable and reduced:
                gradients.refill(unit)
                with unit.values(StateKind.GRAD, write=True) as values:
                    _fill_range(unit, StateKind.GRAD, values, source, reduced)
                    if factor != 1.0:
                        values.mul_(factor)
                    unit.note_gradient(values)
            mine = {
                n: [k for k in parts[n] if int(k[0].partition("@")[2]) % zero.size == zero.index]
                for n in names
                if n in parts
            }
            if any(mine.values()):
                _fill_partial(unit, source, mine, factor)


def _fill_partial(unit: Unit, source: Source, parts: dict[str, list[Key]], factor: float) -> None:
    dtype = next(source.entries[k].dtype for s in unit.layout.segments for k in parts.get(s.name, []))
    total = torch.zeros(unit.layout.numel, dtype=dtype, device=unit.device)
    positions: set[int] = set()
    for position, segment in enumerate(unit.layout.segments):
        for key in parts.get(segment.name, []):
            arrived = torch.empty(segment.numel, dtype=dtype, device="cpu")
            source.read(key, arrived, region=region_of(segment))
            total[segment.offset : segment.stop].add_(arrived.to(unit.device), alpha=factor)
            positions.add(position)
    unit.restore_partial(total, positions)
