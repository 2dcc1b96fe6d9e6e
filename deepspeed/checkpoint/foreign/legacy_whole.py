"""Unsharded optimizer state of the reference: it numbers parameters, and their names must be found.

Names follow from the groups that the caller gives, from names that torch stored, from values (fp32 masters rounded are
the weights of the module), or from shapes where these leave no choice. State that none of these names is kept under a
name that says so.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch

from deepspeed.checkpoint.foreign.legacy_pieces import Pieces, Segment
from deepspeed.checkpoint.foreign.legacy_shards import group_options, is_number
from deepspeed.checkpoint.foreign.unpickle import Stored, materialize
from deepspeed.checkpoint.load.source import Key
from deepspeed.errors import CheckpointError

_SCALER_KEYS = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")


@dataclass
class _Member:
    """A parameter of a group. ``at``: where it begins in flat tensors of the group. ``shape`` is None when nothing
    tells it.
    """

    group: int
    position: int
    slots: Mapping[str, Any]
    master: Stored | None = None
    at: int = 0
    shape: tuple[int, ...] | None = None
    name: str | None = None
    flat: bool = False

    @property
    def label(self) -> str:
        return self.name or f"unnamed parameter {self.position} of group {self.group}"


@dataclass
class _Module:
    """Weights by name, each once, in the module's order."""

    weights: dict[str, Stored]
    unused: list[str] = field(default_factory=list)


def unsharded(
    pieces: dict[Key, Pieces], model: Mapping[str, Any], *, groups: Sequence[Sequence[str]] | None, where: Path
) -> dict[str, Any]:
    """Add masters and slots to ``pieces``; returns facts. Raises CheckpointError naming the tensor."""
    state = model.get("optimizer")
    module = _weights(model)
    facts: dict[str, Any] = {"optimizer": {"groups": [], "scalars": {}}}
    if state is None:
        return facts
    inner = state.get("optimizer_state_dict", state)
    members = _members(state, inner, module, groups)
    for member in members:
        _add(pieces, member, module, facts["optimizer"]["scalars"], where)
    listed = [[m.label for m in members if m.group == g] for g in range(len(inner["param_groups"]))]
    facts["optimizer"]["groups"] = [
        {"names": names, "options": group_options(group)}
        for names, group in zip(listed, inner["param_groups"], strict=True)
    ]
    if "cur_scale" in state:
        dynamic = {"dynamic": bool(state.get("dynamic_loss_scale"))}
        facts["loss_scaler"] = dynamic | {key: materialize(state[key]) for key in _SCALER_KEYS if key in state}
    return facts


def _weights(model: Mapping[str, Any]) -> _Module:
    buffers, seen, found = set(model.get("buffer_names") or ()), set(), {}
    for name, stored in model["module"].items():
        if (
            isinstance(stored, Stored)
            and name not in buffers
            and stored.dtype.is_floating_point
            and stored.place not in seen
        ):
            seen.add(stored.place)
            found[name] = stored
    return _Module(found, list(found))


def _members(
    state: Mapping[str, Any], inner: Mapping[str, Any], module: _Module, groups: Sequence[Sequence[str]] | None
) -> list[_Member]:
    """All parameters of the optimizer, named where that is possible."""
    if "fp32_groups_flat" in state:
        return _flat_members(state["fp32_groups_flat"], inner, module, groups)
    masters = state.get("fp32_groups") or [[None] * len(g["params"]) for g in inner["param_groups"]]
    members = []
    for g, (group, own) in enumerate(zip(inner["param_groups"], masters, strict=True)):
        given = group.get("param_names") or [None] * len(group["params"])
        for position, (number, master, name) in enumerate(zip(group["params"], own, given, strict=True)):
            slots = inner["state"].get(number, {})
            tensors = [master, *slots.values()]
            shape = next((t.shape for t in tensors if isinstance(t, Stored) and t.shape), None)
            members.append(_Member(g, position, slots, master, 0, shape, name))
    if groups is not None:
        _name_by_groups(members, groups, module)
    elif not all(m.name for m in members):
        _name_by_values(members, module) if state.get("fp32_groups") else _name_by_shapes(members, module)
    return members


def _name_by_groups(members: list[_Member], groups: Sequence[Sequence[str]], module: _Module) -> None:
    counts = [len([m for m in members if m.group == g]) for g in range(max((m.group for m in members), default=-1) + 1)]
    if counts != [len(group) for group in groups]:
        raise CheckpointError(
            f"the checkpoint has optimizer groups of {counts} parameters, this optimizer of {[len(g) for g in groups]}"
        )
    for member, name in zip(members, (n for group in groups for n in group), strict=True):
        weight = module.weights.get(name)
        if weight is not None and member.shape is not None and prod(member.shape) != weight.numel:
            raise CheckpointError(
                f"{name} is {weight.shape}, and parameter {member.position} of optimizer group {member.group} "
                f"is {member.shape}"
            )
        member.name = name


def _name_by_values(members: list[_Member], module: _Module) -> None:
    """A master rounded to the module's type is the module's weight."""
    for member in members:
        if member.name is None and member.master is not None:
            member.name = _take(module, member.master, 0, member.shape)


def _take(module: _Module, master: Stored, at: int, shape: tuple[int, ...] | None) -> str | None:
    """The first unused weight (of ``shape``, when given) whose values are those of ``master`` from ``at`` on."""
    for name in module.unused:
        weight = module.weights[name]
        if (shape is not None and weight.shape != shape) or at + weight.numel > master.numel:
            continue
        mine = torch.empty(weight.numel, dtype=weight.dtype, device="cpu")
        master.read(mine, start=at)
        if torch.equal(mine, weight.tensor().view(-1)):
            module.unused.remove(name)
            return name
    return None


def _name_by_shapes(members: list[_Member], module: _Module) -> None:
    """Every parameter of the module in one group: by order. Else by order among those of one shape, where one group has
    all of them.
    """
    names = list(module.weights)
    shapes = [module.weights[n].shape for n in names]
    if len(members) == len(names) and {m.group for m in members} == {0}:
        if all(m.shape in (None, s) for m, s in zip(members, shapes, strict=True)):
            for member, name in zip(members, names, strict=True):
                member.name = name
        return
    for shape in set(shapes):
        same = [n for n, s in zip(names, shapes, strict=True) if s == shape]
        holders = [m for m in members if m.shape == shape]
        if len(same) == len(holders) and len({m.group for m in holders}) == 1 and all(m.shape for m in members):
            for member, name in zip(holders, same, strict=True):
                member.name = name


def _flat_members(
    flats: Sequence[Stored], inner: Mapping[str, Any], module: _Module, groups: Sequence[Sequence[str]] | None
) -> list[_Member]:
    """One flat tensor per group: parameters follow one another in it."""
    members = []
    for g, (flat, group) in enumerate(zip(flats, inner["param_groups"], strict=True)):
        slots = inner["state"].get(group["params"][0], {}) if group["params"] else {}
        wanted = list(groups[g]) if groups is not None else None
        at = position = 0
        while at < flat.numel and (wanted is None or position < len(wanted)):
            name = wanted[position] if wanted is not None else _take(module, flat, at, None)
            if name is None or name not in module.weights:
                break
            weight = module.weights[name]
            members.append(_Member(g, position, slots, flat, at, weight.shape, name, flat=True))
            at, position = at + weight.numel, position + 1
        rest = torch.ones(flat.numel - at, dtype=flat.dtype, device="cpu")
        flat.read(rest, start=at)
        if rest.any():  # not padding
            members.append(_Member(g, position, slots, flat, at, (flat.numel - at,), flat=True))
    return members


def _add(
    pieces: dict[Key, Pieces], member: _Member, module: _Module, scalars: dict[str, dict[str, Any]], where: Path
) -> None:
    name = member.label
    numbers = {
        slot: materialize(value) for slot, value in member.slots.items() if is_number(value) and value is not None
    }
    if numbers:
        scalars[name] = numbers
    weight = module.weights.get(name)
    master = member.master
    if master is None and weight is not None and weight.dtype == torch.float32:
        master = weight
    stored = {"master": master} | {
        f"optim.{slot}": value for slot, value in member.slots.items() if not is_number(value)
    }
    for state, value in stored.items():
        if isinstance(value, Stored):
            # State of another shape than the parameter's (factored moments) keeps its own.
            shape = (
                member.shape
                if member.shape is not None and (member.flat or value.numel == prod(member.shape))
                else value.shape
            )
            found = Pieces(value.dtype, shape, (Segment(0, prod(shape), value, member.at),))
            pieces[state, name] = found.check(f"{state} of {name}", where)
