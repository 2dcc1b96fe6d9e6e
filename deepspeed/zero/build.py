"""From a plain model to units with memory: partition, layout, values, runtime, hooks."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from deepspeed.accelerator.device import get_accelerator
from deepspeed.comm import collectives
from deepspeed.comm.mesh.groups import Mesh
from deepspeed.errors import UsageError
from deepspeed.monitor import hostmem
from deepspeed.monitor.log import log_dist, logger
from deepspeed.zero.hooks import ModuleHooks
from deepspeed.zero.layout import FlatLayout, Granularity, build_layout
from deepspeed.zero.memory.fit import Fitted, MemoryPlan, RankMemory, UnitSize, Widths, fit, limits_of, limits_present
from deepspeed.zero.memory.tiers import Tiers
from deepspeed.zero.module.attributes import mark_zero_parameter
from deepspeed.zero.module.mapped import agreed_files, say_full_load, values_from_files
from deepspeed.zero.optim_view import OptimView, attach, build_views
from deepspeed.zero.param import (
    Piece,
    castable,
    expose,
    is_composed,
    local_of,
    move_composed,
    part_of,
    pieces_of,
    place_of,
    shape_on_rank,
    whole_of,
)
from deepspeed.zero.partition import UnitFacts, UnitSpec, is_shared, partition
from deepspeed.zero.plan import Tier, UnitPlan, ZeroPlan, every_so_many
from deepspeed.zero.runtime import Runtime
from deepspeed.zero.unit import Unit
from deepspeed.zero.update.registry import build_policy


@dataclass(frozen=True)
class BuildRules:
    """Rules by which parameter values become units.

    ``compute_dtype`` None leaves each parameter in its own dtype, ``buffer_dtype`` None each buffer. Names with one of
    ``keep_fp32`` among their parts stay fp32. Parameters in ``beside`` follow the dtype of a buffer; those in ``low``
    rest and travel in ``low_dtype``. ``slot_bytes``: bytes of optimizer state an element, beside the weight.
    ``accum_dtype``: dtype of the rest gradient. ``window``: whether several micro-batches make an update.
    """

    device: torch.device
    compute_dtype: torch.dtype | None
    keep_fp32: tuple[str, ...]
    granularity: Granularity
    keep_master: bool
    buffer_dtype: torch.dtype | None = None
    beside: dict[nn.Parameter, torch.dtype] = field(default_factory=dict)
    low: frozenset[nn.Parameter] = frozenset()
    low_dtype: torch.dtype = torch.bfloat16
    slot_bytes: int = 8
    accum_dtype: torch.dtype = torch.float32
    window: bool = True

    def kept(self, name: str) -> bool:
        """Tell whether the parameter or buffer of that name stays fp32 in a 16-bit run."""
        return any(part in name.split(".") for part in self.keep_fp32)

    def rest_dtype(self, name: str, param: nn.Parameter) -> torch.dtype:
        """Return the dtype in which PARAM of that parameter is stored."""
        if not castable(param.dtype):
            return param.dtype
        if self.compute_dtype is not None and self.kept(name):
            return torch.float32
        if self.compute_dtype is not None and param in self.beside:
            return self.buffer_dtype or self.beside[param]
        return self.low_dtype if param in self.low else self.compute_dtype or param.dtype


@dataclass
class ZeroParts:
    """Result of ``build``: the runtime over its units, the hooks that drive it, and their memory."""

    runtime: Runtime
    hooks: ModuleHooks
    born_sharded: bool
    tiers: Tiers
    memory: MemoryPlan
    shared: set[nn.Parameter]  # that another engine keeps, or kept
    views: list[OptimView]  # what the optimizer sees


def _take_over(
    unit: Unit, spec: UnitSpec, values: torch.Tensor | None, rules: BuildRules, tiers: Tiers, *, plain: bool
) -> None:
    """Move ``values`` (None: those of its parameters) into ``unit``, and mark the parameters as the unit's."""
    values = _values(unit, rules.device) if values is None else values
    unit.adopt(values, spec.rest, keep_master=rules.keep_master, tiers=tiers)
    for position, segment in enumerate(unit.layout.segments):
        mark_zero_parameter(unit.params[position], unit, position, name=segment.name, plain=plain)


def build(
    model: nn.Module,
    plan: ZeroPlan,
    facts: UnitFacts,
    *,
    rules: BuildRules,
    optimizer: torch.optim.Optimizer | None,
    facts_of: Callable[[str, nn.Parameter], UnitFacts] | None = None,
) -> ZeroParts:
    """Take over every parameter of ``model``. Collective. ``facts``: ranks and divisor, for single ones ``facts_of``.

    ``optimizer``: its groups hold the trained parameters, and afterwards views of the masters; None when nothing is
    trained (no gradients, no optimizer state). Values come from the first rank. Raises DivergenceError when ranks hold
    different models.
    """
    mesh, groups = facts.mesh, optimizer.param_groups if optimizer is not None else []
    group_of = {p: i for i, group in enumerate(groups) for p in group["params"]}
    check_same_model(model, mesh, groups)
    files = agreed_files(model, mesh)
    if rules.device.type == "cpu":
        hostmem.return_large_blocks()
    shared = _shared(model, rules)
    born_sharded = any(hasattr(p, "_ds_unit") and p not in shared for p in model.parameters())
    trained = [p for p in model.parameters() if p.requires_grad and p in group_of]
    facts_of = facts_of or (lambda *_: facts)
    whole = rules.granularity is Granularity.PARAMETER
    parts = partition(model, plan, trainable=trained, rest_dtype=rules.rest_dtype, facts_of=facts_of, whole=whole)
    layouts = [_layout_of(spec, plan, rules, group_of) for spec in parts.units]
    if plan.regular.param.sharded or mesh.tp.size > 1:
        say_full_load(model, files, partial(log_dist, level=logging.WARNING))
    placed = [p for p in model.parameters() if p not in files and p not in shared and not is_composed(p)]
    fitted = _fitted(placed, list(zip(parts.units, layouts, strict=True)), plan, mesh, rules)
    tiers = Tiers(fitted.offload, rules.device)
    if mesh.job.size > mesh.zero.size or any(Tier.NVME in _offload_tiers(row) for row in fitted.rows):
        _open_everywhere(tiers, fitted, mesh, width=max(s.rest.itemsize for s in parts.units))
    units = [_bare_unit(i, *args) for i, args in enumerate(zip(parts.units, layouts, fitted.rows, strict=True))]
    heap, plain = hostmem.HeapTrimmer(), not plan.regular.param.sharded
    for unit, spec in zip(units, parts.units, strict=True):
        _take_over(unit, spec, values_from_files(unit, rules.device, files, mesh=mesh), rules, tiers, plain=plain)
        if rules.device.type == "cpu":
            heap.passed(2 * unit.layout.numel * spec.dtype.itemsize)
    heap.trim()
    _move_buffers(model, mesh, rules)
    runtime = Runtime(units, plan, mesh, accum=rules.accum_dtype, device=rules.device)
    views = [] if optimizer is None else _train_by(optimizer, runtime, tiers)
    hooks = ModuleHooks(model, runtime, touches=parts.touches, roots=parts.roots)
    hooks.awaited = {p for p in group_of if not p.requires_grad}
    for param in shared:
        vars(param).setdefault("_ds_readers", WeakSet()).add(runtime)
    return ZeroParts(runtime, hooks, born_sharded, tiers, fitted.memory, shared, views)


def _train_by(optimizer: torch.optim.Optimizer, runtime: Runtime, tiers: Tiers) -> list[OptimView]:
    """Attach views of the units to ``optimizer``, set the update policy of the plan, and return the views."""
    offload = runtime.plan.offload
    views = build_views(runtime.units, len(optimizer.param_groups), tile_numel=offload.tile_numel)
    attach(optimizer, views)
    runtime.train_by(optimizer, build_policy(runtime, optimizer, views, offload.update, tiers))
    return views


def _open_everywhere(tiers: Tiers, fitted: Fitted, mesh: Mesh, *, width: int) -> None:
    """Open the drives; where one rank fails all ranks raise, as the others would wait. Collective."""
    failure = tiers.open(fitted.rows, fitted.memory, width=width)
    failed = collectives.failures(failure, mesh.job)
    if failed:
        tiers.close()
        rank, text = next(iter(failed.items()))
        raise failure or UsageError(f"{mesh.title(rank)}: {text}")


def _shared(model: nn.Module, rules: BuildRules) -> set[nn.Parameter]:
    """Return frozen parameters that stay with another engine. UsageError where this engine wants another dtype."""
    named = [(name, param) for name, param in model.named_parameters() if is_shared(param)]
    for name, param in named:
        if (wanted := rules.rest_dtype(name, param)) is not param.dtype:
            raise UsageError(
                f"frozen parameter {name!r} is kept in {param.dtype} by another engine, and this one computes in "
                f"{wanted}: give both one precision, or this one its own copy of the module"
            )
    if named:
        log_dist(
            f"{len(named)} frozen parameters stay with another engine ({named[0][0]}, ...), and in its checkpoints"
        )
    return {param for _, param in named}


def _fitted(
    params: list[nn.Parameter], units: list[tuple[UnitSpec, FlatLayout]], plan: ZeroPlan, mesh: Mesh, rules: BuildRules
) -> Fitted:
    """Return each unit's row within the plan's limits and, with offload, within the memory of the fullest host."""
    sizes: list[UnitSize] = []
    specs = [spec for spec, _ in units]
    trained = [s.numel if s.trainable else 0 for s in specs]
    by_device = every_so_many(trained, plan.offload.device_share)
    for (spec, layout), chosen in zip(units, by_device, strict=True):
        row = plan.row(trainable=spec.trainable, persistent=spec.persistent)
        if chosen and row.optim is not None and row.optim.away:
            row = row.updated_on_device(loads=plan.offload.update.loads_states)
        largest = max(p.numel() for p in spec.params) if rules.granularity is Granularity.PARAMETER else 0
        shapes = tuple((segment.offset, segment.shape) for segment in layout.segments)
        axes = tuple(group.size for group in spec.facts.axes) if spec.facts is not None else ()
        sizes.append(UnitSize(layout.numel, spec.rest.itemsize, row, largest, shapes, axes))
    wire = max((s.facts.wire.itemsize for s in specs if s.facts is not None and s.facts.wire is not None), default=0)
    widths = Widths(rules.accum_dtype.itemsize, rules.slot_bytes, wire, rules.window)
    shared = rules.device.type == "cpu"
    on_device = 0 if shared else max(0, get_accelerator().memory_allocated() - _bytes_of(params, on_host=False))
    ranks = memory_of_ranks(mesh, device=on_device, replaced=_bytes_of(params, on_host=True))
    limits, present = limits_of(plan.offload, ranks), limits_present(ranks)
    if not limits.host and any(_offload_tiers(s.row) - {Tier.DEVICE} for s in sizes):
        limits = replace(present, device=limits.device, device_used=limits.device_used)
    meshes = [mesh, *(spec.facts.mesh for spec in specs if spec.facts is not None)]
    count = 0 if shared else len(set().union(*(m.communicators for m in meshes)))
    dims = [group.size for group in mesh.groups]
    fitted = fit(plan, sizes, dims, widths, limits, shared=shared, communicators=count)
    for text in filter(None, (fitted.moved, present.doubt(fitted.memory))):
        log_dist(text, level=logging.WARNING)
    return fitted


def memory_of_ranks(mesh: Mesh, *, device: int = 0, replaced: int = 0) -> list[RankMemory]:
    """Return the memory of each rank now; ``replaced``: bytes of its host memory that will be freed. Collective."""
    rss = hostmem.rss_bytes()
    short = min(rss, replaced)
    return collectives.gather_objects(RankMemory(rss - short, device, short, tuple(hostmem.memory_pools())), mesh.job)


def _bytes_of(params: list[nn.Parameter], *, on_host: bool) -> int:
    """Return the bytes of the parameters' storages on the host, or on the device."""
    units = ((p, getattr(p, "_ds_unit", None)) for p in params)
    tensors = [local_of(p) if unit is None else unit.shard for p, unit in units]
    storages = [t.untyped_storage() for t in tensors if (t.device.type == "cpu") is on_host]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _offload_tiers(row: UnitPlan) -> set[Tier]:
    """Return the tiers on which parameters and optimizer state rest."""
    return {state.tier for state in (row.param, row.optim) if state is not None}


def check_same_model(model: nn.Module, mesh: Mesh, groups: list[dict[str, Any]]) -> None:
    """Raise DivergenceError unless all ranks have equal names, shapes, dtypes and requires_grad, and the numbers of the
    optimizer's ``groups`` are the same. Collective.
    """
    if mesh.zero.size == 1:
        return
    local = []
    for index, group in enumerate(groups):
        numbers = [(key, value) for key, value in group.items() if isinstance(value, (bool, int, float, tuple))]
        local += [f"{key} {value} in optimizer group {index}" for key, value in numbers]
    # Each rank has experts of its own.
    named = [(repr(n) if getattr(p, "allreduce", True) else "an expert", p) for n, p in model.named_parameters()]
    local += [f"{n} {tuple(p.shape)} {p.dtype} requires_grad={p.requires_grad}" for n, p in named]
    advice = "Build the same model and optimizer, with the same requires_grad flags, on every rank"
    collectives.check_alike("hold different models", local, mesh.zero, advice, title=mesh.title)


def _layout_of(spec: UnitSpec, plan: ZeroPlan, rules: BuildRules, groups: dict[nn.Parameter, int]) -> FlatLayout:
    """Build the unit's layout: the place of each parameter, independent of the tiers."""
    items = [(n, shape_on_rank(p), groups.get(p, -1)) for n, p in zip(spec.names, spec.params, strict=True)]
    granularity = rules.granularity if spec.trainable else Granularity.ELEMENT
    return build_layout(items, spec.shards(plan), granularity, first=spec.first)


def _bare_unit(index: int, spec: UnitSpec, layout: FlatLayout, row: UnitPlan) -> Unit:
    assert spec.facts is not None
    by_name = dict(zip(spec.names, spec.params, strict=True))
    params = [by_name[s.name] for s in layout.segments]
    if (tp := spec.facts.mesh.tp).size > 1:
        placed = (s.at(place_of(p, s.name, tp)) for p, s in zip(params, layout.segments, strict=True))
        layout = replace(layout, segments=tuple(placed))
    row = row.over(len(spec.facts.mesh.groups))
    return Unit(index, spec.name, params, layout=layout, plan=row, facts=spec.facts)


def _values(unit: Unit, device: torch.device) -> torch.Tensor:
    """Return the unit's full flat values in their source dtype, from rank 0; free each parameter's old storage."""
    dtype = unit.params[0].dtype
    values = torch.zeros(unit.layout.numel, dtype=dtype, device=device)
    sources: dict[int, Unit] = {}
    beside = any(hasattr(p, "_ds_unit") for p in unit.params)  # parameters born sharded, which are alike already
    for param, segment in zip(unit.params, unit.layout.segments, strict=True):
        source = getattr(param, "_ds_unit", None)
        if source is not None:
            source.fetch_whole()
            sources[id(source)] = source
        if param.is_meta:
            raise UsageError(
                f"parameter {segment.name!r} is on the meta device and has no values; build the model under "
                "deepspeed.zero.Init, or materialise it (model.to_empty(device=...) and load weights) before "
                "deepspeed.initialize"
            )
        with torch.no_grad():
            view = Unit.view(values, segment).copy_(_part(param, unit.mesh, device, alike=source is not None))
        if source is not None:
            source.forget(param)
        elif beside:
            collectives.broadcast(view, unit.mesh.zero)
        expose([param], [torch.empty(0, dtype=dtype, device=device)])
        param.grad = None
    for source in sources.values():
        if all(getattr(p, "_ds_unit", None) is not source for p in source.params):
            source.drop()
    if not sources:
        collectives.broadcast(values, unit.mesh.zero)
    return values


def _part(param: nn.Parameter, mesh: Mesh, device: torch.device, *, alike: bool) -> torch.Tensor:
    """Return this rank's part of a parameter, cut from the first rank's values unless ranks have them ``alike``."""
    local = local_of(param)
    if mesh.tp.size == 1:
        return local
    place = place_of(param, "", mesh.tp)
    if tuple(local.shape) != place.shape:  # cut already
        return local
    if not alike:
        local = local.to(device).contiguous()
        collectives.broadcast(local, mesh.tp)
    if hasattr(param, "tp_place"):
        param.tp_was_whole = place  # type: ignore[attr-defined]
    return part_of(local, place)


def _move_buffers(model: nn.Module, mesh: Mesh, rules: BuildRules) -> None:
    """Move buffers (floating: to ``buffer_dtype``) and opaque parameters' pieces to the device, as on rank 0."""
    for path, module in model.named_modules():
        for param in module.parameters(recurse=False):
            move_composed(param, rules.device)
        buffers: list[Piece] = [("", *piece[1:]) for p in module.parameters(recurse=False) for piece in pieces_of(p)]
        buffers += [(n, b, partial(module._buffers.__setitem__, n)) for n, b in module.named_buffers(recurse=False)]
        for name, buffer, put in buffers:
            if buffer is None or buffer.is_meta:
                continue
            cast = bool(name) and castable(buffer.dtype) and not rules.kept(f"{path}.{name}")
            moved = buffer.to(device=rules.device, dtype=(rules.buffer_dtype if cast else None) or buffer.dtype)
            if moved is not buffer:
                put(moved)
            if moved.numel() and moved.layout is torch.strided:
                whole = moved.contiguous()
                for group in (mesh.tp, mesh.zero):
                    collectives.broadcast(whole, group)
                if whole is not moved:
                    moved.copy_(whole)


def dismantle(parts: ZeroParts, *, together: bool) -> None:
    """End an engine: give back the parameters and free every buffer. Collective when sharded and ``together``.

    A model that was whole becomes whole again. Units stay behind as bare shards where the model was born sharded, as it
    may not fit whole, or where other ranks did not come. ``GatheredParameters`` and another ``build`` understand those.
    """
    if not (together or parts.born_sharded) and any(
        unit.movable or unit.mesh.tp.size > 1 for unit in parts.runtime.units
    ):
        logger.warning(
            "some rank did not come to destroy(): the model stays in shards, for GatheredParameters or another "
            "engine to gather"
        )
    for param in parts.shared:
        param._ds_readers.discard(parts.runtime)  # type: ignore[attr-defined]
    for unit in parts.runtime.units:
        if unit.movable and (parts.born_sharded or not together):
            unit.strip()
            continue
        unit.fetch_whole()
        for param, segment in zip(unit.params, unit.layout.segments, strict=True):
            part, place = Unit.view(unit.buffer.full, segment), vars(param).pop("tp_was_whole", None)
            place = place if together else None  # it stays a part
            expose([param], [whole_of(part, place, unit.mesh.tp).clone()])
            if place is not None:
                del param.tp_place  # type: ignore[attr-defined]
            unit.forget(param)
        unit.drop()
    parts.runtime.gradients.close()
    parts.tiers.close(params=not any(unit.drives for unit in parts.runtime.units))
