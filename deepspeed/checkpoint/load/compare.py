"""A checkpoint beside an engine, a model or another checkpoint: names, shapes, slots and values of both sides."""

import itertools
import re
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from deepspeed.checkpoint.foreign.weights import Stream, open_facts, shared_names, stream
from deepspeed.checkpoint.load.reader import open_everywhere
from deepspeed.checkpoint.load.source import Described, Key, Source
from deepspeed.checkpoint.save.collect import States, names_of
from deepspeed.comm.mesh.groups import Mesh
from deepspeed.errors import CheckpointError
from deepspeed.monitor.log import logger
from deepspeed.zero.layout import Granularity
from deepspeed.zero.module.state import persistent_buffers, segment_of, state_names
from deepspeed.zero.param import local_of, whole_of
from deepspeed.zero.sync.failures import together
from deepspeed.zero.unit import Unit

_Named = TypeVar("_Named", bound=Hashable)
WEIGHTS = ("master", "param")
_LISTED = 12
# Tensor slots that the common methods keep, for checkpoints that do not say by whom their state is.
_SLOTS = {
    "adagrad": {"sum"},
    "adamax": {"exp_avg", "exp_inf"},
    "adam": {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"},
    "lion": {"exp_avg"},
}
_CHUNK_BYTES = 16 << 20
_ZENFLOW = "zenflow_"  # what the names of ZenFlow's slots begin with in every checkpoint


@dataclass
class Comparison:
    """Checkpoint keys for an engine's state. ``opaque``, ``parts``: slots that fit only the same layout, or part."""

    keys: dict[str, Key] = field(default_factory=dict)  # by parameter or buffer
    slots: dict[str, dict[str, Key]] = field(default_factory=dict)  # by parameter and slot
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)
    opaque: set[str] = field(default_factory=set)
    parts: dict[str, set[str]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def paired(
    entries: Mapping[Key, Described],
    stored: Mapping[str, str],
    weights: Iterable[str],
    buffers: Iterable[str],
    *,
    aliases: Mapping[str, str],
    prefer: str,
) -> tuple[dict[str, Key | None], list[str]]:
    """Find the key of each weight and buffer in ``entries``; list the others. ``aliases``, ``stored``: tied ones."""
    keys: dict[str, Key | None] = {}
    for name in weights:
        names = [name, *(alias for alias, real in aliases.items() if real == name)]
        names += [stored[n] for n in names if n in stored]
        keys[name] = next(((state, n) for n in names for state in WEIGHTS if (state, n) in entries), None)
    states = prefer, "buffer", "param"  # the files of a pipeline's layers do not tell buffers from weights
    matched = {*keys.values(), *((state, name) for name in buffers for state in states)}
    for name in buffers:
        keys[name] = next(((state, name) for state in states if (state, name) in entries), None)
    return keys, [n for s, n in entries if s in (*WEIGHTS, "buffer") and (s, n) not in matched]


def in_no_model(extra: Sequence[Sequence[_Named]]) -> list[_Named]:
    """Return the names that are extra on every rank of the job; others belong to parameters of other ranks."""
    peers = [set(names) for names in extra[1:]]
    return [name for name in extra[0] if all(name in names for names in peers)]


def same_ranks(facts: Mapping[str, Any], mesh: Mesh) -> bool:
    """Return whether as many ranks saved as load now, along the same axes: each then has what it saved itself."""
    world, size = facts.get("world") or {}, mesh.job.size
    axes = (("size", 0, size), ("data", size, mesh.data.size), ("pp", 1, mesh.pp.size), ("tp", 1, mesh.tp.size))
    return all(int(world.get(name) or default) == now for name, default, now in axes)


def buffer_state(facts: Mapping[str, Any], mesh: Mesh) -> str:
    """Return the preferred state of this rank's buffers: its own, which may differ, if the same ranks saved."""
    return f"buffer@{mesh.job.index}" if same_ranks(facts, mesh) else "buffer"


def compare(states: States, source: Source, *, module: bool, optimizer: bool) -> Comparison:
    """Compare names, shapes and slots of both sides; equal on ranks with the same parameters. Raises nothing."""
    match = Comparison()
    if module:
        (shapes, aliases), facts = names_of(states), source.facts
        buffers = {name: tuple(buffer.shape) for name, buffer in persistent_buffers(states.module).items()}
        prefer, stored = buffer_state(facts, states.mesh), facts.get("shared", {})
        keys, match.extra = paired(source.entries, stored, shapes, buffers, aliases=aliases, prefer=prefer)
        for name, shape in (shapes | buffers).items():
            key = keys[name]
            if key is None:
                match.missing.append(name)
            elif (saved := source.entries[key].shape) != shape:
                match.wrong.append(f"{name} is {saved} there and {shape} here")
            else:
                match.keys[name] = key
    if optimizer and states.optimizer is not None:
        _compare_slots(states, states.optimizer, source, match)
    return match


def _compare_slots(states: States, optimizer: torch.optim.Optimizer, source: Source, match: Comparison) -> None:
    # Without ZenFlow every column has the host's count.
    left_out = () if states.update.further_slots == _ZENFLOW else (_ZENFLOW,)
    saved: dict[str, dict[str, Key]] = {}
    for state, name in source.entries:
        kind, _, slot = state.partition(".")
        if kind == "optim" and not slot.startswith(left_out):
            saved.setdefault(name, {})[slot] = (state, name)
        elif kind == "part":
            match.parts.setdefault(name.rpartition("@")[0], set()).add(slot)
        elif kind == "opaque":
            match.opaque.add(slot)
    scalars = source.facts.get("optimizer", {}).get("scalars", {})
    units, count = [u for u in states.units if u.master is not None], len(optimizer.param_groups)
    # then all parameters have the same slots, as one view may cover several
    uniform = all(u.layout.granularity is Granularity.ELEMENT for u in units)
    slot_names, used = {slot for slots in saved.values() for slot in slots}, set()
    for name in (s.name for u in units for s in u.layout.segments if 0 <= s.group < count and s.numel):
        stored = match.keys[name][1] if name in match.keys else name
        used.add(stored)
        numbers = {k: v for k, v in scalars.get(stored, {}).items() if not k.startswith(left_out)}
        match.slots[name], match.scalars[name] = saved.get(stored, {}), numbers
        # what an optimizer of whole tensors keeps of one without dimensions is a number, and of a frozen one nothing
        lacking = slot_names - match.slots[name].keys()
        kept = match.slots[name] or match.scalars[name] or ("master", stored) in source.entries
        if (uniform or not kept) and not match.opaque:
            match.missing += [f"optimizer state {slot!r} of {name}" for slot in sorted(lacking)]
    match.extra += [f"optimizer state {s!r} of {n}" for n, slots in saved.items() if n not in used for s in slots]


def verdict(match: Comparison, where: str, *, strict: bool) -> list[str]:
    """Describe what was skipped. Raises CheckpointError when the checkpoint does not fit."""
    other = {"missing there": match.missing, "there but not in this model": match.extra}
    lines: dict[str, str] = {}
    for label, names in {"other shapes": match.wrong, **other}.items():
        more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
        lines |= {label: f"{label}: {', '.join(names[:_LISTED])}{more}"} if names else {}
    if match.wrong or strict and lines:
        raise CheckpointError(
            f"checkpoint {where} does not fit this engine, and nothing was loaded; {'; '.join(lines.values())}. It may "
            "be of another model; load_module_strict=False loads what fits (other shapes never do), "
            "load_optimizer_states=False leaves the optimizer out"
        )
    return list(lines.values())


def optimizer_kind(name: str) -> str:
    """Return the kind of an optimizer class: ``adam`` for AdamW, FusedAdam and DeepSpeedCPUAdam."""
    word = re.sub(r"^(fused|deepspeedcpu|deepspeed|torch)|withauxadam$", "", name.lower())
    return "adam" if word == "adamw" else word


def own_facts(states: States, source: Source) -> dict[str, Any]:
    """Return ``groups`` and ``lr_scheduler`` of the pipeline stage with groups of these names, else those of all."""
    facts = source.facts
    of_all = {"groups": (facts.get("optimizer") or {}).get("groups", []), "lr_scheduler": facts.get("lr_scheduler")}
    return next((s for s in facts.get("stages") or () if [g["names"] for g in s["groups"]] == states.groups), of_all)


def check_optimizer(states: States, source: Source) -> None:
    """Raise CheckpointError when this engine cannot continue from the saved optimizer state; warn for another class."""
    saved = source.facts.get("optimizer") or {}
    if not saved:
        raise CheckpointError(f"{source.path} has no optimizer state; pass load_optimizer_states=False")
    assert states.optimizer is not None
    groups, saved_groups = len(states.optimizer.param_groups), own_facts(states, source)["groups"]
    first = (source.facts.get("stages") or [saved])[0]["groups"]
    # Where stages had different groups all are listed, in an order that fits no other cut.
    mixed = saved_groups is saved["groups"] and len(saved_groups) > len(first)
    advice = "or load with load_optimizer_states=False"
    if mixed or groups != len(saved_groups):
        text = f"{len(saved_groups)} optimizer parameter groups, this optimizer has {groups}"
        raise CheckpointError(f"the checkpoint has {text}; build them, and pipeline stages, as they were, {advice}")
    summed = any(state == f"optim.{_ZENFLOW}sum" for state, _ in source.entries)
    if summed and states.update.further_slots != _ZENFLOW:
        raise CheckpointError(
            f"checkpoint {source.path} was saved in the middle of a window of zero_optimization.zenflow, with sums of "
            f"gradients that this engine cannot use; load it with that block, save at the end of a window, {advice}"
        )
    stored = {s.removeprefix("optim.") for s, _ in source.entries if s.startswith("optim.")}
    slots = ((k, v) for view in states.views for k, v in states.state_of(view).items())
    live = {k for k, v in slots if isinstance(v, torch.Tensor) and v.dim()}
    kind, saved_kind = type(states.optimizer).__name__, saved.get("type") or ""
    expected = _SLOTS.get(optimizer_kind(kind))
    other = bool(saved_kind) and optimizer_kind(saved_kind) != optimizer_kind(kind)
    if saved_kind:
        wrong = other and (not live or live != stored)
    else:
        wrong = bool(live and stored and not live <= stored) or expected is not None and not stored <= expected
    if wrong:
        keeps = ", ".join(sorted(live or expected or ()))
        text = f"{', '.join(sorted(stored)) or 'no tensors'}; {saved_kind or 'unknown class'}"
        detail = f"{kind} keeps{f' ({keeps})' if keeps else ''}; use the same optimizer, {advice}"
        raise CheckpointError(f"the checkpoint's optimizer state ({text}) is not what {detail}")
    if other:
        logger.warning("optimizer state of %s is loaded into %s", saved_kind, kind)


# -- value by value --------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class TensorRow:
    """Result for one tensor: "equal", "fits" (shapes only), "different", "missing" (only in the first) or "extra"."""

    name: str
    verdict: str
    detail: str = ""


def in_memory(name: str, value: torch.Tensor) -> Stream:
    flat = value.detach().reshape(-1)

    def read(start: int, out: torch.Tensor) -> None:
        out.copy_(flat[start : start + out.numel()])

    return Stream(name, value.dtype, tuple(value.shape), read)


def compare_tensors(a: Stream, b: Stream) -> TensorRow:
    """Compare two tensors, in the narrower dtype of both; the row has the first one's name."""
    if a.shape != b.shape:
        return TensorRow(a.name, "different", f"shape {list(a.shape)} and {list(b.shape)}")
    worst, count, at, start = 0.0, 0, 0, 0
    narrow = a.dtype if a.dtype.itemsize < b.dtype.itemsize else b.dtype
    step = _CHUNK_BYTES // max(a.dtype.itemsize, b.dtype.itemsize)
    for lhs, rhs in zip(a.chunks(step * a.dtype.itemsize), b.chunks(step * b.dtype.itemsize), strict=True):
        if a.dtype != b.dtype:
            lhs, rhs = lhs.to(narrow), rhs.to(narrow)
        if not torch.equal(lhs.view(torch.uint8), rhs.view(torch.uint8)):
            apart = ~((lhs == rhs) | ((lhs != lhs) & (rhs != rhs)))
            if bool(apart.any()):
                gaps = (lhs[apart].double() - rhs[apart].double()).abs().nan_to_num(nan=float("inf"))
                at = at if count else start + int(apart.int().argmax())
                worst, count = max(worst, float(gaps.max())), count + gaps.numel()
        start += lhs.numel()
    if count:
        detail = f"{count} of {a.numel} elements, max abs diff {worst:.6g}, first at {at}"
        return TensorRow(a.name, "different", detail)
    detail = f"after rounding {a.dtype} and {b.dtype} to the narrower".replace("torch.", "")
    return TensorRow(a.name, "equal", detail if a.dtype != b.dtype else "")


@dataclass(frozen=True)
class Match:
    """Checkpoint keys of a model's weights and persistent buffers, each once, and rows of its other tensors."""

    tensors: dict[str, torch.Tensor]
    keys: dict[str, Key | None]
    extra: list[TensorRow]


def match(model: nn.Module, source: Source, *, buffers: str = "buffer") -> Match:
    """Pair a model with a checkpoint as loading does. ``buffers``: the state to prefer for buffers."""
    tensors, aliases = state_names(model, exclude_frozen=False)
    weights = [name for name, tensor in tensors.items() if isinstance(tensor, nn.Parameter)]
    rest = [name for name in tensors if not isinstance(tensors[name], nn.Parameter)]
    keys, extra = paired(source.entries, shared_names(source), weights, rest, aliases=aliases, prefer=buffers)
    return Match(tensors, keys, [TensorRow(name, "extra", "only in the checkpoint") for name in extra])


def compared(pairs: Match, source: Source, name: str, values: torch.Tensor | None) -> TensorRow:
    """Compare one tensor of the model with the checkpoint; without ``values`` only its shape. Return the row."""
    key = pairs.keys[name]
    if key is None:
        return TensorRow(name, "missing", "only in the model")
    saved = stream(source, key)
    if values is not None:
        return compare_tensors(in_memory(name, values), saved)
    return shape_row(name, tuple(pairs.tensors[name].shape), saved.shape)


def shape_row(name: str, shape: tuple[int, ...], saved: tuple[int, ...]) -> TensorRow:
    """Return the row of a tensor of which only shapes are compared."""
    detail = "" if shape == saved else f"shape {list(shape)} and {list(saved)}"
    return TensorRow(name, "different" if detail else "fits", detail)


def through(items: Iterable[tuple[Any, ...]], fn: Callable[..., None]) -> None:
    """Call ``fn`` for every item; raise an error only after the last item, as other ranks take part in each."""
    rest = iter(items)
    try:
        for item in rest:
            fn(*item)
    except Exception:
        deque(rest, maxlen=0)
        raise


def diff_live(engine: Any, folder: Any, tag: str | None = None) -> list[TensorRow]:
    """Compare an engine's weights and persistent buffers with the checkpoint ``folder/tag`` (default: the latest).

    Returns one row per tensor on every rank: "equal", "different", "missing" (only in the engine) or "extra" (only in
    the checkpoint). Values are compared in the narrower dtype: those a bf16 engine computes with are bf16. Collective;
    whole weights are gathered a unit at a time, and the ranks share the reading. Raises CheckpointError on every rank
    when there is no checkpoint or bytes of it are damaged.
    """
    engine.wait_for_checkpoint()
    mesh, model = engine.mesh, engine.module
    source = open_everywhere(mesh, Path(folder), tag, allow_pickle=False)
    if source is None:
        raise CheckpointError(f"there is no checkpoint in {folder}")
    try:
        pairs = match(model, source, buffers=buffer_state(open_facts(source), mesh))
        rows: dict[str, TensorRow] = {}
        turns = itertools.cycle(range(mesh.zero.size))

        def take(name: str, values: torch.Tensor) -> None:
            turn = next(turns)  # every rank has its own buffers
            if not isinstance(values, nn.Parameter) or turn == mesh.zero.index:
                rows[name] = compared(pairs, source, name, values)

        with together(mesh, f"comparing with {source.path}") as shared:
            through(_whole_weights(model, pairs.tensors), take)
            shared.mine = (rows, pairs.extra)
        of_ranks, extra = zip(*shared.all, strict=True)
        by_name = {
            name: [of_rank[name] for of_rank in of_ranks if name in of_rank]
            for name in (*pairs.tensors, *itertools.chain.from_iterable(of_ranks))
        }
        # In the model's order, then what others have: the first row that is not "equal", else any.
        joined = [next((row for row in of_name if row.verdict != "equal"), of_name[0]) for of_name in by_name.values()]
        return joined + in_no_model(extra)
    finally:
        source.close()


def _whole_weights(module: nn.Module, tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each of ``tensors`` (of ``state_names``) with whole values, valid until the next unit's. Collective."""
    names = {id(t): n for n, t in tensors.items()}
    units: dict[Unit, None] = dict.fromkeys(p._ds_unit for p in module.parameters() if hasattr(p, "_ds_unit"))
    for unit in sorted(units, key=lambda unit: unit.index):
        unit.pin()
        try:
            for param in unit.params:
                if id(param) in names:
                    place = segment_of(param).place
                    whole = param if place is None else whole_of(local_of(param).detach(), place, unit.mesh.tp)
                    yield names.pop(id(param)), whole
        finally:
            unit.unpin()
    for name in names.values():
        yield name, tensors[name]
