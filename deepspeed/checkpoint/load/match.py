"""What a checkpoint has for an engine: names, shapes and slots of both sides; all of it, or an error with names."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from deepspeed.checkpoint.load.source import Described, Key, Source
from deepspeed.checkpoint.save.collect import States, names_of
from deepspeed.errors import CheckpointError
from deepspeed.mesh.groups import Mesh
from deepspeed.observe.log import logger
from deepspeed.zero.layout import Granularity
from deepspeed.zero.module.state import persistent_buffers

WEIGHTS = ("master", "param")
_LISTED = 12
# Tensor slots that the common methods keep, for checkpoints that do not say by whom their state is.
_SLOTS = {
    "adagrad": {"sum"},
    "adamax": {"exp_avg", "exp_inf"},
    "adam": {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"},
    "lion": {"exp_avg"},
}


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
    matched = {*keys.values(), *(("buffer", name) for name in buffers)}
    for name in buffers:
        keys[name] = next((key for key in ((prefer, name), ("buffer", name)) if key in entries), None)
    return keys, [n for s, n in entries if s in (*WEIGHTS, "buffer") and (s, n) not in matched]


def buffer_state(facts: Mapping[str, Any], mesh: Mesh) -> str:
    """Return the preferred state of this rank's buffers: its own, which may differ, if as many ranks saved."""
    same = int((facts.get("world") or {}).get("size") or 0) == mesh.job.size
    return f"buffer@{mesh.job.index}" if same else "buffer"


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
    saved: dict[str, dict[str, Key]] = {}
    for state, name in source.entries:
        kind, _, slot = state.partition(".")
        if kind == "optim":
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
        match.slots[name], match.scalars[name] = saved.get(stored, {}), dict(scalars.get(stored, {}))
        # what an optimizer of whole tensors keeps of one without dimensions is a number
        lacking = slot_names - match.slots[name].keys()
        if (uniform or not (match.slots[name] or match.scalars[name])) and not match.opaque:
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


def check_optimizer(states: States, source: Source) -> None:
    """Raise CheckpointError when this optimizer cannot continue from the saved state; warn for another class."""
    saved = source.facts.get("optimizer") or {}
    if not saved:
        raise CheckpointError(f"{source.path} has no optimizer state; pass load_optimizer_states=False")
    assert states.optimizer is not None
    groups, saved_groups = len(states.optimizer.param_groups), len(saved["groups"])
    advice = "or load with load_optimizer_states=False"
    if groups != saved_groups:
        text = f"{saved_groups} optimizer parameter groups, this optimizer has {groups}; build them as they were"
        raise CheckpointError(f"the checkpoint has {text}, {advice}")
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
