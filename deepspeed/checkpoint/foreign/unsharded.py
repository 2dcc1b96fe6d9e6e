"""Unsharded optimizer state of DeepSpeed, which numbers parameters: their names must come from elsewhere.

They come from the groups that the caller gives, from names that torch stored, from values (fp32 masters rounded are the
weights of the module), or from the module's order where one group has all of it. Other state is kept as "unnamed ...".
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from deepspeed.checkpoint.foreign.cuts import Pieces
from deepspeed.checkpoint.foreign.sharded import group_options, is_number, numbers
from deepspeed.checkpoint.foreign.unpickle import FileTensor, materialize
from deepspeed.checkpoint.load.source import Key
from deepspeed.errors import CheckpointError

UNNAMED = "unnamed parameter "
_SCALER_KEYS = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")
_Names = Sequence[Sequence[str]]  # of the parameters of each group


@dataclass
class _Optimized:
    """A parameter. Its tensors have its shape, or are ``flat`` ones of the whole group, where it begins at ``at``."""

    slots: Mapping[str, Any]
    master: FileTensor | None
    name: str | None
    at: int = 0
    flat: bool = False


def unsharded(
    pieces: dict[Key, Pieces], model: Mapping[str, Any], *, groups: _Names | None, where: Path
) -> dict[str, Any]:
    """Add masters and slots to ``pieces``; the facts they come with. Raises CheckpointError naming the tensor."""
    state = model.get("optimizer")
    if state is None:
        return {"optimizer": {"groups": [], "scalars": {}}}
    inner, weights = state.get("optimizer_state_dict", state), _weights(model)
    read = _flat if "fp32_groups_flat" in state else _numbered
    listed, scalars = [], {}
    for g, members in enumerate(read(state, inner, weights, groups)):
        listed.append([m.name or f"{UNNAMED}{i} of group {g}" for i, m in enumerate(members)])
        for name, member in zip(listed[-1], members, strict=True):
            _add(pieces, name, member, weights.get(name), where)
            if values := numbers(member.slots):
                scalars[name] = values
    options = map(group_options, inner["param_groups"])
    named = [{"names": names, "options": o} for names, o in zip(listed, options, strict=True)]
    facts: dict[str, Any] = {"optimizer": {"groups": named, "scalars": scalars}}
    if "cur_scale" in state:
        facts["loss_scaler"] = {key: materialize(state[key]) for key in _SCALER_KEYS if key in state}
        facts["loss_scaler"]["dynamic"] = bool(state.get("dynamic_loss_scale"))
    return facts


def _weights(model: Mapping[str, Any]) -> dict[str, FileTensor]:
    """Weights by name, tied ones once, in the module's order."""
    buffers, seen = set(model.get("buffer_names") or ()), dict[Any, str]()
    weights = {
        n: t
        for n, t in model["module"].items()
        if isinstance(t, FileTensor) and n not in buffers and t.dtype.is_floating_point
    }
    return {name: t for name, t in weights.items() if seen.setdefault(t.place, name) == name}


def _numbered(
    state: Mapping[str, Any], inner: Mapping[str, Any], weights: Mapping[str, FileTensor], groups: _Names | None
) -> list[list[_Optimized]]:
    """Tensors in the shapes of their parameters."""
    numbers_of = [group["params"] for group in inner["param_groups"]]
    if groups is not None and [len(n) for n in numbers_of] != [len(group) for group in groups]:
        raise CheckpointError(
            f"the checkpoint has optimizer groups of {[len(n) for n in numbers_of]} parameters, this optimizer of "
            f"{[len(group) for group in groups]}"
        )
    masters = state.get("fp32_groups") or [[None] * len(n) for n in numbers_of]
    names = groups or [group.get("param_names") or [None] * len(group["params"]) for group in inner["param_groups"]]
    # Masters are in an order of their own, which may fit by shape and be wrong: their values tell.
    by_order = len(names) == 1 and not any(names[0]) and not state.get("fp32_groups")
    if by_order and len(names[0]) == len(weights):
        shapes = [_shape(None, inner["state"].get(number, {})) for number in numbers_of[0]]
        if all(shape in (None, weight.shape) for shape, weight in zip(shapes, weights.values(), strict=True)):
            names = [list(weights)]
    left, members = dict(weights), list[list[_Optimized]]()
    for row in zip(numbers_of, masters, names, strict=True):
        members.append([])
        for number, master, given in zip(*row, strict=True):
            slots = inner["state"].get(number, {})
            name = given if given or master is None else _by_values(left, master, 0, master.shape)
            shape = _shape(master, slots)
            if name and name in weights and shape is not None and prod(shape) != weights[name].numel:
                where = f"parameter {len(members[-1])} of optimizer group {len(members) - 1}"
                raise CheckpointError(f"{name} is {weights[name].shape}, and {where} is {shape}")
            members[-1].append(_Optimized(slots, master, name))
    return members


def _shape(master: FileTensor | None, slots: Mapping[str, Any]) -> tuple[int, ...] | None:
    tensors = (t for t in (master, *slots.values()) if isinstance(t, FileTensor) and t.shape)
    return next((t.shape for t in tensors), None)


def _flat(
    state: Mapping[str, Any], inner: Mapping[str, Any], weights: Mapping[str, FileTensor], groups: _Names | None
) -> list[list[_Optimized]]:
    """One flat tensor per group: parameters follow one another in it."""
    left, members = dict(weights), list[list[_Optimized]]()
    for g, (flat, group) in enumerate(zip(state["fp32_groups_flat"], inner["param_groups"], strict=True)):
        slots = inner["state"].get(group["params"][0], {}) if group["params"] else {}
        given, at = iter(groups[g]) if groups is not None else None, 0
        members.append([])
        while name := next(given, None) if given is not None else _by_values(left, flat, at, None):
            if name not in weights:
                raise CheckpointError(f"optimizer group {g} has {name}, and the checkpoint no weight of that name")
            members[-1].append(_Optimized(slots, flat, name, at, flat=True))
            at += weights[name].numel
        rest = torch.ones(flat.numel - at, dtype=flat.dtype, device="cpu")
        flat.read(rest, start=at)
        if rest.any():  # not padding
            members[-1].append(_Optimized(slots, flat, None, at, flat=True))
    return members


def _by_values(left: dict[str, FileTensor], master: FileTensor, at: int, shape: Any) -> str | None:
    """Take the weight (of ``shape``) out of ``left`` whose values are those of ``master`` from ``at`` on, rounded."""
    for name, weight in left.items():
        if shape in (None, weight.shape) and at + weight.numel <= master.numel and weight.numel:
            values = torch.empty(weight.numel, dtype=weight.dtype, device="cpu")
            master.read(values, start=at)
            if torch.equal(values, weight.tensor().view(-1)):
                del left[name]
                return name
    return None


def _add(pieces: dict[Key, Pieces], name: str, member: _Optimized, weight: FileTensor | None, where: Path) -> None:
    master = member.master
    if master is None and weight is not None and weight.dtype == torch.float32:
        master = weight
    tensors = {f"optim.{slot}": value for slot, value in member.slots.items() if not is_number(value)}
    for state, value in {"master": master, **tensors}.items():
        if isinstance(value, FileTensor):
            # State of another shape than the parameter's (factored moments) keeps its own.
            shape = (value.numel - member.at,) if member.flat else value.shape
            if weight is not None and (member.flat or value.numel == weight.numel):
                shape = weight.shape
            pieces[state, name] = Pieces.of(value, shape, at=member.at).check(f"{state} of {name}", where)
