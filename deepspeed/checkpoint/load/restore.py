"""From a checkpoint into an engine: every rank reads what its own ranges overlap with; one that fails tells all."""

from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any

import torch

from deepspeed.checkpoint.foreign.legacy import ReferenceSource
from deepspeed.checkpoint.foreign.weights import shared_names, weight_keys, with_aliases
from deepspeed.checkpoint.load.compare import Comparison, check_optimizer, compare, in_no_model, own_facts, verdict
from deepspeed.checkpoint.load.source import Key, Source, Wish, fill, whole
from deepspeed.checkpoint.save import collect
from deepspeed.checkpoint.save.client_files import names_and_shapes
from deepspeed.checkpoint.save.collect import States
from deepspeed.checkpoint.save.writer import progress
from deepspeed.errors import CheckpointError
from deepspeed.monitor.log import logger
from deepspeed.optim.base import GroupStep
from deepspeed.zero.gradients import Gradients
from deepspeed.zero.layout import Granularity
from deepspeed.zero.module.state import persistent_buffers
from deepspeed.zero.optim_view import OptimView, copied, segments_of
from deepspeed.zero.plan import StateKind
from deepspeed.zero.regions import Region
from deepspeed.zero.runtime import Runtime
from deepspeed.zero.sync.failures import together
from deepspeed.zero.unit import Unit

# Options of a group that say how this optimizer computes; a checkpoint may come from one that computes otherwise.
_OWN_OPTIONS = ("params", "fused", "foreach", "capturable", "differentiable", "decoupled_weight_decay")
_CUT_ANEW = (
    "belongs to the layout it was saved under (ranks, sharding, buckets, parts of parameters) and cannot be cut anew; "
    "load with the same configuration and number of ranks, or load_optimizer_states=False"
)


def load_into(
    states: States,
    runtime: Runtime,
    source: Source,
    *,
    strict: bool = True,
    module: bool = True,
    optimizer: bool = True,
    check: Callable[[], None] = lambda: None,
    begin: Callable[[], None] = lambda: None,
) -> Source:
    """Load weights and buffers (``module``) and optimizer state; return the source of the other state. Collective.

    ``strict``: names must agree. ``check`` may refuse too; until ``begin``, called when all fits, nothing has changed.
    """
    if isinstance(source, ReferenceSource):
        source = source.with_groups(states.groups)  # some of its files have numbers instead of names
    mesh, action = states.mesh, f"loading {source.path}"
    with together(mesh, action) as shared:
        match = compare(states, source, module=module, optimizer=optimizer)
        shared.mine = match.extra
    match.extra = in_no_model(shared.all)
    with together(mesh, action):
        for line in verdict(match, str(source.path), strict=strict):
            logger.warning("loading %s: %s", source.path, line)
        if optimizer:
            check_optimizer(states, source)
        plan = _plan_views(states, source, match) if optimizer else []
        check()
    begin()
    nbytes = sum(u.shard.numel() * u.buffer.full.element_size() for u in states.units)
    with together(mesh, action), progress(f"loading {source.path.name}", nbytes, show=mesh.first) as report:
        if module:
            _fill_module(states, source, match, report)
        if optimizer:
            _fill_optimizer(states, source, plan, report)
    runtime.publish(runtime.units)
    return source


# -- what is no tensor of the engine ------------------------------------------------------------------------------
def client_state(source: Source) -> dict[str, Any]:
    """Return the user's client state, and the entries that DeepSpeed's loader adds."""
    facts, world = source.facts, source.facts.get("world") or {}
    ours = {
        **names_and_shapes({key: entry.shape for key, entry in source.entries.items()}, facts.get("shared") or {}),
        "global_samples": (facts.get("engine") or {}).get("global_samples", 0),
        "ds_config": facts.get("config"),
        "ds_version": (facts.get("saved") or {}).get("deepspeed"),
        "checkpoint_parallel_dimensions": {"pp_degree": world.get("pp", 1), "tp_degree": world.get("tp", 1)},
    }
    return ours | (facts.get("client_state") or {})


def of_rank(source: Source, rank: int, name: str) -> Any:
    """Return the value that one rank saved under ``name``; None when there is none."""
    return (source.facts.get("ranks") or {}).get(rank, {}).get(name)


def state_dict(source: Source) -> dict[str, torch.Tensor]:
    """Read every weight and buffer, whole."""
    return with_aliases({key[1]: whole(source, key) for key in weight_keys(source)}, shared_names(source))


# -- weights and buffers ------------------------------------------------------------------------------------------
def _of_range(unit: Unit, kind: StateKind, values: torch.Tensor, keys: Mapping[str, Key]) -> Iterator[Wish]:
    """Yield the reads that fill ``values``, this rank's range of a unit's state; ``keys`` may lack parameters."""
    start, stop = unit.range_of(kind)
    for segment in unit.layout.segments:
        if segment.name in keys:
            for lo, hi, span in segment.spans(start, stop):
                yield Wish(keys[segment.name], values.detach()[lo - start : hi - start], span.lo, span.region)


def _fill_module(states: States, source: Source, match: Comparison, report: Callable[[int], None]) -> None:
    """Load weights into every unit's resting range (the caller publishes them), buffers and extra state."""
    with torch.no_grad():
        for unit in states.units:
            kind, _ = collect.weights_of(unit)
            start, stop = unit.range_of(kind)
            with unit.values(kind, write=True) as values:
                fill(source, _of_range(unit, kind, values, match.keys))
                if kind is StateKind.OPTIM and unit.tiled:
                    unit.publish_part(start, values).wait()
            report((stop - start) * unit.buffer.full.element_size())
        for name, buffer in persistent_buffers(states.module).items():
            if name in match.keys:
                buffer.copy_(whole(source, match.keys[name]))
    saved = source.facts.get("extra_state") or {}
    for path, module in collect.extra_modules(states.module).items():
        if path in saved:
            module.set_extra_state(saved[path])


# -- optimizer state ----------------------------------------------------------------------------------------------
_Piece = tuple[int, int, Key, int, Region | None]  # elements [lo, hi) of a slot: those of key from there on, of region
_Filling = tuple[tuple[int, ...], torch.dtype, list[_Piece]]  # what fills a slot's tensor of that shape and dtype
_Plan = list[tuple[OptimView, dict[str, _Filling], tuple[dict[str, Any], dict[str, int]]]]  # slots and numbers of views


def _all_of(source: Source, key: Key, region: Region | None = None) -> _Filling:
    """Return a filling with the whole of ``region`` of ``key``."""
    dtype, shape = source.entries[key]
    shape = shape if region is None else region.shape
    return shape, dtype, [(0, prod(shape), key, 0, region)]


def _odd_state(states: States, source: Source) -> dict[str, Any]:
    """Return what the optimizer keeps besides tensors and numbers."""
    return of_rank(source, states.mesh.job.index, "odd") or of_rank(source, 0, "odd") or {}


def _plan_views(states: States, source: Source, match: Comparison) -> _Plan:
    """Plan what fills each view, from descriptions alone. CheckpointError for state that fits another layout only."""
    keys = {collect.view_key(view) for view in states.views}
    for key, values in _odd_state(states, source).get("views", {}).items():
        if key not in keys:
            raise CheckpointError(f"optimizer state {', '.join(values)} {_CUT_ANEW}")
    return [(view, _fillings(view, source, match), _scalars_of(view, match)) for view in states.views]


def _fill_optimizer(states: States, source: Source, plan: _Plan, report: Callable[[int], None]) -> None:
    """Load the options of the groups, and slots and numbers of this rank's views, in place of any earlier ones."""
    optimizer = states.optimizer
    assert optimizer is not None
    for group, values in zip(optimizer.param_groups, own_facts(states, source)["groups"], strict=True):
        group.update({k: v for k, v in values["options"].items() if k not in _OWN_OPTIONS or k not in group})
    for view, fresh, (scalars, missed) in plan:
        tensors = {k for k, v in states.state_of(view).items() if isinstance(v, torch.Tensor) and v.dim()}
        view.missed = missed
        if fresh.keys() != tensors or not fresh and not scalars:
            optimizer.state.pop(view.param, None)
        if not fresh and not scalars:
            continue
        with torch.no_grad(), states.update.attached(view, write=True):
            state = optimizer.state.get(view.param, {})
            _fill_view(view, state, fresh, source, {k: _placed(k, v, optimizer, view) for k, v in scalars.items()})
            optimizer.state[view.param] = state
        report(sum(v.nbytes for v in state.values() if isinstance(v, torch.Tensor)))
    odd = _odd_state(states, source)
    optimizer.state.update(odd.get("shared", {}))
    views = {collect.view_key(v): v for v in states.views}
    for key, values in odd.get("views", {}).items():
        optimizer.state[views[key].param].update(values)


def _fillings(view: OptimView, source: Source, match: Comparison) -> dict[str, _Filling]:
    """Return for each slot of a view the tensor shape, dtype and pieces to read."""
    fillings, segments = dict[str, _Filling](), segments_of(view)
    by_parameter = view.unit.layout.granularity is Granularity.PARAMETER
    for slot in dict.fromkeys(slot for s in segments for slot in match.slots.get(s.name, {})):
        keys = {s.name: match.slots[s.name][slot] for s in segments if slot in match.slots.get(s.name, {})}
        first = next(iter(keys.values()))
        dtype, shape = source.entries[first]
        if by_parameter:
            region = segments[0].region if shape == segments[0].whole_shape else None
            fillings[slot] = _all_of(source, first, region)
        else:
            fillings[slot] = (view.stop - view.start,), dtype, list(_elementwise(view, slot, keys, source))
    fixed = [(slot, view.name, (f"opaque.{slot}", collect.view_key(view))) for slot in sorted(match.opaque)]
    for segment, slot in ((s, slot) for s in segments for slot in sorted(match.parts.get(s.name, ()))):
        region = segment.region
        part = segment.name if region is None else collect.part_key(segment.name, region)
        fixed.append((slot, segment.name, (f"part.{slot}", part if by_parameter else "")))
    for slot, owner, key in fixed:
        if key not in source.entries:
            raise CheckpointError(f"optimizer state {slot!r} of {owner} {_CUT_ANEW}")
        fillings[slot] = _all_of(source, key)
    return fillings


def _elementwise(view: OptimView, slot: str, keys: Mapping[str, Key], source: Source) -> Iterator[_Piece]:
    """Yield the pieces to read for a flat slot that covers several parameters."""
    for segment in (s for s in segments_of(view) if s.name in keys):
        key = keys[segment.name]
        if prod(source.entries[key].shape) != prod(segment.whole_shape):
            raise CheckpointError(
                f"optimizer state {slot!r} of {segment.name} has shape {source.entries[key].shape}, the parameter "
                f"{segment.whole_shape}: it was saved by an optimizer that sees whole tensors, and this one sees "
                "elements"
            )
        for lo, hi, span in segment.spans(view.start, view.stop):
            yield lo - view.start, hi - view.start, key, span.lo, span.region


def _scalars_of(view: OptimView, match: Comparison) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the numbers of a view, and by name how many updates fewer than the most parameters have counted."""
    # A parameter without any has not been updated: it was frozen, or the checkpoint lacks it (refused where strict).
    by_name = {s.name: match.scalars.get(s.name, {}) for s in segments_of(view)} or {"": {}}
    counts = {name: numbers.get("step", 0) for name, numbers in by_name.items()}
    names = [name for name in by_name if by_name[name]]
    most = max(names or by_name, key=lambda name: float(counts[name]))
    packed = [{k: collect.pack_scalar(v) for k, v in by_name[name].items() if k != "step"} for name in names]
    differing = sorted({k for one in packed for k in one if any(other.get(k) != one[k] for other in packed)})
    if differing:
        raise CheckpointError(
            f"optimizer state {', '.join(differing)} differs between {names[0]} and {names[-1]}, but this layout keeps "
            "one number for both; put them into different parameter groups, or load with load_optimizer_states=False"
        )
    missed = {name: int(counts[most] - count) for name, count in counts.items()}
    return {k: copied(v) for k, v in by_name[most].items()}, {name: n for name, n in missed.items() if n}


def _placed(name: str, value: Any, optimizer: torch.optim.Optimizer, view: OptimView) -> Any:
    """Return a number of a view as torch's ``load_state_dict`` leaves it: on the parameter's device, but for a count of
    updates that no kernel there reads. DeepSpeed's Adams count in plain numbers, torch's and this package's in tensors.
    """
    in_tensors = isinstance(optimizer, GroupStep) or hasattr(optimizer, "_init_group")
    if name == "step" and in_tensors and isinstance(value, (int, float)):
        value = torch.tensor(float(value))
    group = optimizer.param_groups[view.group]
    if not isinstance(value, torch.Tensor) or name == "step" and not (group.get("fused") or group.get("capturable")):
        return value
    return value.to(view.param.device)


def _fill_view(
    view: OptimView, state: dict[str, Any], fresh: dict[str, _Filling], source: Source, scalars: dict[str, Any]
) -> None:
    wishes: list[Wish] = []
    for slot, (shape, dtype, pieces) in fresh.items():
        old = state.get(slot)
        if not isinstance(old, torch.Tensor) or old.shape != shape or old.dtype != dtype:
            state[slot] = torch.empty(shape, dtype=dtype, device=view.param.device)
        flat = state[slot].detach().zero_().view(-1)  # of a parameter that the checkpoint lacks, too
        wishes += [Wish(key, flat[lo:hi], start, region) for lo, hi, key, start, region in pieces]
    fill(source, wishes)
    for name, value in scalars.items():
        old = state.get(name)
        if isinstance(old, torch.Tensor) and isinstance(value, torch.Tensor) and old.dtype == value.dtype:
            old.copy_(value)
        else:
            state[name] = value


# -- an open accumulation window ----------------------------------------------------------------------------------
def fill_gradients(states: States, source: Source, gradients: Gradients, *, factor: float) -> None:
    """Load reduced gradients; deal out partial sums anew, times ``factor``: the mean over another number of ranks."""
    parts: dict[str, list[tuple[int, Key]]] = {}
    for state, name in source.entries:
        kind, _, rank = state.partition("@")
        if kind == "grad_partial":
            parts.setdefault(name, []).append((int(rank), (state, name)))
    with torch.no_grad():
        for unit in states.units:
            segments, zero = {s.name: s for s in unit.layout.segments}, unit.mesh.zero
            reduced = {n: ("grad", n) for n in segments if ("grad", n) in source.entries}
            if unit.trainable and reduced:
                gradients.refill(unit)
                with unit.values(StateKind.GRAD, write=True) as values:
                    fill(source, _of_range(unit, StateKind.GRAD, values, reduced))
                    if factor != 1.0:
                        values.mul_(factor)
                    unit.note_gradient(values)
            ours = [key for n in segments for rank, key in parts.get(n, ()) if rank % zero.size == zero.index]
            if not unit.trainable or not ours:
                continue
            dtype = source.entries[ours[0]].dtype
            total = torch.zeros(unit.layout.numel, dtype=dtype, device=unit.device)
            for key in ours:
                segment = segments[key[1]]
                for lo, hi, span in segment.spans(segment.offset, segment.stop):
                    arrived = torch.empty(hi - lo, dtype=dtype, device="cpu")
                    source.read(key, arrived, start=span.lo, region=span.region)
                    total[lo:hi].add_(arrived.to(unit.device), alpha=factor)
            names = {name for _, name in ours}
            unit.window.restore(total, {position for position, name in enumerate(segments) if name in names})
