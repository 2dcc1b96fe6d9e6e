"""From a checkpoint back into an engine: first everything is compared, then everything is read.

Complete or refused: a missing, extra or mis-shaped tensor is an error that lists names, before a byte of the engine has
changed. Every rank reads only what overlaps with its own ranges, whatever layout wrote the checkpoint.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import torch

from deepspeed.checkpoint.format.boxes import Region
from deepspeed.checkpoint.load.source import Key, Source, Wish
from deepspeed.checkpoint.save.collect import (
    States,
    covered,
    names_of,
    pack_scalar,
    part_key,
    region_of,
    segments_of,
    shape_of,
    view_key,
    weights_of,
)
from deepspeed.errors import CheckpointError
from deepspeed.observe.log import logger
from deepspeed.zero.client.consolidate import persistent_buffers
from deepspeed.zero.gradients import Gradients
from deepspeed.zero.layout import Granularity
from deepspeed.zero.optim_view import OptimView
from deepspeed.zero.plan import StateKind
from deepspeed.zero.unit import Unit

_LISTED = 12
_WEIGHTS = ("master", "param")


@dataclass(frozen=True)
class LoadRules:
    """``strict``: names must agree exactly; ``optimizer``: restore its state too; ``module``: restore weights and
    buffers.
    """

    strict: bool = True
    optimizer: bool = True
    module: bool = True


@dataclass
class Comparison:
    """What a checkpoint has for an engine. ``weights``: key by parameter name; ``slots``: keys by parameter and
    slot.
    """

    weights: dict[str, Key] = field(default_factory=dict)
    buffers: dict[str, Key] = field(default_factory=dict)
    slots: dict[str, dict[str, Key]] = field(default_factory=dict)
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def compare(states: States, source: Source, rules: LoadRules) -> Comparison:
    """Names, shapes and slots of both sides. Pure bookkeeping, the same on ranks with the same parameters; raises
    nothing.
    """
    found = Comparison()
    if rules.module:
        _compare_weights(states, source, found)
        _compare_buffers(states, source, found)
    if rules.optimizer and states.optimizer is not None:
        _compare_slots(states, source, found)
    return found


def _compare_weights(states: States, source: Source, found: Comparison) -> None:
    names = names_of(states)
    shared = source.facts.get("shared", {})
    taken = set()
    for name, wanted in names.shapes.items():
        others = [alias for alias, real in names.aliases.items() if real == name]
        candidates = [name, *others, *(shared[n] for n in (name, *others) if n in shared)]
        key = next(((s, n) for n in candidates for s in _WEIGHTS if (s, n) in source.entries), None)
        if key is None:
            found.missing.append(name)
            continue
        taken.add(key)
        shape = source.entries[key].shape
        if shape != wanted:
            found.wrong.append(f"{name} is {shape} there and {wanted} here")
        else:
            found.weights[name] = key
    found.extra += [n for s, n in source.entries if s in _WEIGHTS and (s, n) not in taken]


def _compare_buffers(states: States, source: Source, found: Comparison) -> None:
    here = persistent_buffers(states.module)
    same_size = int(source.facts.get("world", {}).get("size", 0)) == states.mesh.job.size
    own = f"buffer@{states.mesh.job.index}"
    for name, buffer in here.items():
        key: Key = (own, name) if same_size and (own, name) in source.entries else ("buffer", name)
        if key not in source.entries:
            found.missing.append(name)
        elif source.entries[key].shape != tuple(buffer.shape):
            found.wrong.append(f"{name} is {source.entries[key].shape} there and {tuple(buffer.shape)} here")
        else:
            found.buffers[name] = key
    found.extra += [n for s, n in source.entries if s == "buffer" and n not in here]


def _compare_slots(states: States, source: Source, found: Comparison) -> None:
    there: dict[str, dict[str, Key]] = {}
    for state, name in source.entries:
        if state.startswith("optim."):
            there.setdefault(name, {})[state.removeprefix("optim.")] = (state, name)
    scalars = source.facts.get("optimizer", {}).get("scalars", {})
    stored = {name: key[1] for name, key in found.weights.items()}
    optimised = optimised_names(states)
    any_state = bool(there) or bool(scalars)
    slot_names = {slot for slots in there.values() for slot in slots}
    for name in optimised:
        slots = there.get(stored.get(name, name), {})
        numbers = scalars.get(
            stored.get(name, name), {}
        )  # what an optimizer of whole tensors keeps of one without dimensions is there
        lacking = slot_names - slots.keys() if _uniform(states) else set() if slots or numbers else slot_names
        if any_state and lacking and not any(s.startswith("opaque.") for s, _ in source.entries):
            found.missing += [f"optimizer state {slot!r} of {name}" for slot in sorted(lacking)]
        found.slots[name] = slots
        found.scalars[name] = dict(numbers)
    used = {stored.get(n, n) for n in optimised}
    found.extra += [f"optimizer state {s!r} of {n}" for n, slots in there.items() if n not in used for s in slots]


def _uniform(states: States) -> bool:
    """Whether all parameters have the same slots: one view then covers several."""
    return all(u.layout.granularity is Granularity.ELEMENT for u in states.units if u.master is not None)


def optimised_names(states: States) -> list[str]:
    """Parameters with optimizer state on some rank."""
    count = len(states.optimizer.param_groups) if states.optimizer is not None else 0
    return [
        s.name
        for u in states.units
        if u.master is not None
        for s in u.layout.segments
        if 0 <= s.group < count and s.numel
    ]


def verdict(found: Comparison, where: str, *, strict: bool) -> list[str]:
    """What was skipped, in words. Raises CheckpointError when the checkpoint does not fit."""
    faults = []
    if found.wrong:
        faults.append(f"other shapes: {_some(found.wrong)}")
    if strict and found.missing:
        faults.append(f"missing there: {_some(found.missing)}")
    if strict and found.extra:
        faults.append(f"there but not in this model: {_some(found.extra)}")
    if faults:
        raise CheckpointError(
            f"checkpoint {where} does not fit this engine, and nothing was loaded; {'; '.join(faults)}. It may "
            "be of another model; "
            "load_module_strict=False loads what fits (other shapes never do), load_optimizer_states=False "
            "leaves the optimizer out"
        )
    skipped = [f"not in the checkpoint: {_some(found.missing)}"] if found.missing else []
    return skipped + ([f"not in this model: {_some(found.extra)}"] if found.extra else [])


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


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


def fill_weights(states: States, source: Source, found: Comparison, told: Callable[[int], None]) -> None:
    """Weights into the resting range of every unit. Publishing them is the caller's."""
    with torch.no_grad():
        for unit in states.units:
            kind, _ = weights_of(unit)
            start, stop = unit.range_of(kind)
            with unit.values(kind, write=True) as values:
                reads = Reads(source)
                for segment in unit.layout.segments:
                    lo, hi = unit.layout.overlap(segment, start, stop)
                    if lo < hi and segment.name in found.weights:
                        target = values.detach()[lo - start : hi - start]
                        reads.into(target, found.weights[segment.name], lo - segment.offset, region_of(segment))
                reads.run()
                if kind is StateKind.OPTIM and unit.tiled:
                    unit.publish_part(start, values).wait()
            told((stop - start) * unit.full.element_size())


def fill_buffers(states: States, source: Source, found: Comparison) -> None:
    """Persistent buffers, in place."""
    here = persistent_buffers(states.module)
    with torch.no_grad():
        for name, key in found.buffers.items():
            arrived = torch.empty(source.entries[key].shape, dtype=source.entries[key].dtype, device="cpu")
            source.read(key, arrived.view(-1))
            here[name].copy_(arrived)


def fill_optimizer(states: States, source: Source, found: Comparison, told: Callable[[int], None]) -> None:
    """Slots and numbers of every view of this rank; what the optimizer held before is replaced."""
    assert states.optimizer is not None
    parts: dict[str, set[str]] = {}
    for kind, name in source.entries:
        if kind.startswith("part."):
            parts.setdefault(name.rpartition("@")[0], set()).add(kind.removeprefix("part."))
    for view in states.views:
        state = states.state_of(view)
        fresh = _slots_of(view, source, found)
        fresh |= _opaque_of(view, source)
        fresh |= _parts_of(view, source, parts)
        scalars = _scalars_of(view, found)
        if set(fresh) != {k for k, v in state.items() if isinstance(v, torch.Tensor) and v.dim()}:
            states.optimizer.state.pop(view.param, None)
        if not fresh and not scalars:
            states.optimizer.state.pop(view.param, None)
            continue
        with torch.no_grad(), states.attached(view, write=True):
            held = states.optimizer.state.get(view.param, {})
            _fill_view(view, held, fresh, source, scalars)
            states.optimizer.state[view.param] = held
        told(sum(v.nbytes for v in held.values() if isinstance(v, torch.Tensor)))


class _Filling(NamedTuple):
    """What a slot's tensor is filled with: its elements [lo, hi) with those of ``region`` of ``key`` from ``start``
    on.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: list[tuple[int, int, Key, int, Region | None]]


def _slots_of(view: OptimView, source: Source, found: Comparison) -> dict[str, _Filling]:
    """What the slots of a view are filled with."""
    unit, filled = view.unit, dict[str, _Filling]()
    segments = segments_of(view)
    for slot in dict.fromkeys(slot for s in segments for slot in found.slots.get(s.name, {})):
        keys = {s.name: found.slots[s.name][slot] for s in segments if slot in found.slots.get(s.name, {})}
        first = source.entries[next(iter(keys.values()))]
        if unit.layout.granularity is Granularity.PARAMETER:
            region = region_of(segments[0]) if first.shape == shape_of(segments[0]) else None
            shape = first.shape if region is None else region.shape
            filled[slot] = _Filling(shape, first.dtype, [(0, prod(shape), next(iter(keys.values())), 0, region)])
            continue
        pieces = []
        for segment in segments:
            lo, hi = max(segment.offset, view.start), min(segment.stop, view.stop)
            key = keys.get(segment.name)
            if key is None:
                continue
            if prod(source.entries[key].shape) != prod(shape_of(segment)):
                raise CheckpointError(
                    f"optimizer state {slot!r} of {segment.name} has shape {source.entries[key].shape}, not "
                    "that of the parameter "
                    f"({shape_of(segment)}): it was saved by an optimizer that sees whole tensors, this one "
                    "sees elements"
                )
            pieces.append((lo - view.start, hi - view.start, key, lo - segment.offset, region_of(segment)))
        filled[slot] = _Filling((view.stop - view.start,), first.dtype, pieces)
    return filled


def _parts_of(view: OptimView, source: Source, parts: dict[str, set[str]]) -> dict[str, _Filling]:
    """State that fits the very same part of a parameter only; ``parts``: the slots that there is such state of, by
    parameter.
    """
    found: dict[str, _Filling] = {}
    for segment, slot in ((s, slot) for s in segments_of(view) for slot in sorted(parts.get(s.name, ()))):
        region = region_of(segment)
        key = (f"part.{slot}", segment.name if region is None else part_key(segment.name, region))
        if key not in source.entries or view.unit.layout.granularity is Granularity.ELEMENT:
            raise CheckpointError(
                f"optimizer state {slot!r} of {segment.name} belongs to the parts that the parameter was cut "
                "into (tensor parallel) when "
                "it was saved, and cannot be cut anew; load with the same parts and optimizer, or with "
                "load_optimizer_states=False"
            )
        shape = source.entries[key].shape
        found[slot] = _Filling(shape, source.entries[key].dtype, [(0, prod(shape), key, 0, None)])
    return found


def _opaque_of(view: OptimView, source: Source) -> dict[str, _Filling]:
    """State that fits the very same layout only."""
    slots = {s.removeprefix("opaque.") for s, _ in source.entries if s.startswith("opaque.")}
    found: dict[str, _Filling] = {}
    for slot in sorted(slots):
        key = (f"opaque.{slot}", view_key(view))
        if key not in source.entries:
            raise CheckpointError(
                f"optimizer state {slot!r} belongs to the layout it was saved under (ranks, sharding, buckets) "
                "and cannot be cut anew; "
                "load with the same configuration and number of ranks, or with load_optimizer_states=False"
            )
        entry = source.entries[key]
        found[slot] = _Filling(entry.shape, entry.dtype, [(0, prod(entry.shape), key, 0, None)])
    return found


def _scalars_of(view: OptimView, found: Comparison) -> dict[str, Any]:
    names = covered(view)
    # A parameter without any is one that the checkpoint does not have (which strict loading refuses).
    numbers = [s for n in names if (s := found.scalars.get(n))] or [{}]
    packed = [{k: pack_scalar(v) for k, v in one.items()} for one in numbers]
    differing = sorted({k for one in packed for k in one if any(other.get(k) != one[k] for other in packed)})
    if differing:
        raise CheckpointError(
            f"optimizer state {', '.join(differing)} differs between {names[0]} and {names[-1]} in the "
            "checkpoint, but this layout keeps "
            "one number for both; put them into different parameter groups, or load with load_optimizer_states=False"
        )
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in numbers[0].items()}


def _fill_view(
    view: OptimView, held: dict[str, Any], fresh: dict[str, _Filling], source: Source, scalars: dict[str, Any]
) -> None:
    reads = Reads(source)
    for slot, (shape, dtype, pieces) in fresh.items():
        old = held.get(slot)
        if not isinstance(old, torch.Tensor) or old.shape != shape or old.dtype != dtype:
            held[slot] = torch.zeros(shape, dtype=dtype, device=view.param.device)
        flat = held[slot].detach().view(-1)
        for lo, hi, key, start, region in pieces:
            reads.into(flat[lo:hi], key, start, region)
    reads.run()
    for name, value in scalars.items():
        old = held.get(name)
        if isinstance(old, torch.Tensor) and isinstance(value, torch.Tensor) and old.dtype == value.dtype:
            old.copy_(value)
        else:
            held[name] = value


def fill_gradients(states: States, source: Source, gradients: Gradients, *, factor: float) -> None:
    """The open accumulation window: reduced gradients, and the sums of other ranks dealt out to the ranks there are
    now.

    ``factor`` is what a saved gradient must be multiplied by here: the mean over another number of ranks.
    """
    parts: dict[str, list[Key]] = {}
    for state, name in source.entries:
        if state.startswith("grad_partial@"):
            parts.setdefault(name, []).append((state, name))
    with torch.no_grad():
        for unit in states.units:
            names = [s.name for s in unit.layout.segments]
            if unit.trainable and any(("grad", n) in source.entries for n in names):
                gradients.refill(unit)
                _fill_reduced(unit, source, factor)
            zero = unit.mesh.zero
            mine = {
                n: [k for k in parts[n] if int(k[0].partition("@")[2]) % zero.size == zero.index]
                for n in names
                if n in parts
            }
            if any(mine.values()):
                _fill_partial(unit, source, mine, gradients, factor)


def _fill_reduced(unit: Unit, source: Source, factor: float) -> None:
    start, stop = unit.range_of(StateKind.GRAD)
    with unit.values(StateKind.GRAD, write=True) as values:
        reads = Reads(source)
        for segment in unit.layout.segments:
            lo, hi = unit.layout.overlap(segment, start, stop)
            if lo < hi and ("grad", segment.name) in source.entries:
                reads.into(
                    values[lo - start : hi - start], ("grad", segment.name), lo - segment.offset, region_of(segment)
                )
        reads.run()
        if factor != 1.0:
            values.mul_(factor)
        unit.note_gradient(values)


def _fill_partial(unit: Unit, source: Source, parts: dict[str, list[Key]], gradients: Gradients, factor: float) -> None:
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


def restore_groups(states: States, options: Iterable[dict[str, Any]]) -> None:
    """Learning rates and the like into the optimizer's own group dicts."""
    assert states.optimizer is not None
    for group, values in zip(states.optimizer.param_groups, options, strict=True):
        group.update({k: v for k, v in values.items() if k != "params"})


# Tensor slots that the common methods keep, for checkpoints that do not say by whom their state is.
_SLOTS = {
    "adagrad": {"sum"},
    "adamax": {"exp_avg", "exp_inf"},
    "adam": {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"},
    "lion": {"exp_avg"},
}


def optimizer_kind(name: str) -> str:
    """What the classes of one method have in common: ``adam`` for AdamW, FusedAdam and DeepSpeedCPUAdam."""
    word = re.sub(r"^(fused|deepspeedcpu|deepspeed|torch)|withauxadam$", "", name.lower())
    return "adam" if word == "adamw" else word


def check_optimizer(states: States, source: Source) -> None:
    """Raise CheckpointError when the saved state is of a kind of optimizer that this one cannot go on from."""
    saved = source.facts.get("optimizer") or {}
    if not saved:
        raise CheckpointError(
            f"{source.path} has no optimizer state (it was saved by an engine without an optimizer); pass "
            "load_optimizer_states=False"
        )
    assert states.optimizer is not None
    if len(saved["groups"]) != len(states.optimizer.param_groups):
        raise CheckpointError(
            f"the checkpoint has {len(saved['groups'])} optimizer parameter groups, this optimizer has "
            f"{len(states.optimizer.param_groups)}; build the groups as they were, or load with "
            "load_optimizer_states=False"
        )
    there = {s.removeprefix("optim.") for s, _ in source.entries if s.startswith("optim.")}
    own, named = type(states.optimizer).__name__, saved.get("type")
    held, known = live_slots(states), _SLOTS.get(optimizer_kind(own))
    if named:
        other = optimizer_kind(named) != optimizer_kind(own)
        wrong = other and (not held or held != there)
    else:
        other = False
        wrong = bool(held) and bool(there) and not held <= there or known is not None and not there <= known
    if wrong:
        raise CheckpointError(
            f"the checkpoint's optimizer state ({', '.join(sorted(there)) or 'no tensors'}; "
            f"{named or 'unknown class'}) is not what {own} "
            f"keeps{f' ({keeps})' if (keeps := ', '.join(sorted(held or known or ()))) else ''}; use the same "
            "optimizer, or load with "
            "load_optimizer_states=False"
        )
    if other:
        logger.warning("optimizer state of %s is loaded into %s", named, own)


def live_slots(states: States) -> set[str]:
    """Names of the tensor slots that the optimizer holds now."""
    return {
        k for view in states.views for k, v in states.state_of(view).items() if isinstance(v, torch.Tensor) and v.dim()
    }
