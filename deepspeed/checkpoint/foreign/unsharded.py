"""Unsharded optimizer state of DeepSpeed, which numbers parameters: their names must come from elsewhere.

They come from the groups that the caller gives, from names that torch stored, from values (fp32 masters rounded are the
weights of the module), or from the module's order where one group has all of it. Other state is kept as "unnamed ...".
"""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from deepspeed.checkpoint.foreign.sharded import Pieces, group_options, is_number, numbers
from deepspeed.checkpoint.foreign.unpickle import FileTensor, materialize
from deepspeed.checkpoint.load.source import Key
from deepspeed.errors import CheckpointError

UNNAMED = "unnamed parameter "
_SCALER_KEYS = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")
_Names = Sequence[Sequence[str | None]]  # of the parameters of each group
_Weights = Mapping[str, FileTensor]


class _Optimized(NamedTuple):
    """Parameter with optimizer state; tensors of its shape, or flat ones of the group, in which it begins at ``at``."""

    name: str | None
    master: FileTensor | None
    slots: Mapping[str, Any]
    at: int = 0


def add_unsharded(
    pieces: dict[Key, Pieces], model: Mapping[str, Any], *, groups: _Names | None, where: Path
) -> dict[str, Any]:
    """Add masters and slots to ``pieces``; return their facts. Raises CheckpointError naming the tensor."""
    state = model.get("optimizer")
    if state is None:
        return {"optimizer": {"groups": [], "scalars": {}}}
    inner, flat = state.get("optimizer_state_dict", state), "fp32_groups_flat" in state
    buffers, once = set(model.get("buffer_names") or ()), dict[Any, tuple[str, FileTensor]]()
    for name, tensor in model["module"].items():
        if isinstance(tensor, FileTensor) and name not in buffers and tensor.dtype.is_floating_point:
            once.setdefault(tensor.place, (name, tensor))  # tied ones once
    weights, listed, scalars = dict(once.values()), [], {}
    for g, members in enumerate((_flat if flat else _numbered)(state, inner, weights, groups)):
        names = [m.name or f"{UNNAMED}{i} of group {g}" for i, m in enumerate(members)]
        listed.append({"names": names, "options": group_options(inner["param_groups"][g])})
        for name, (_, master, slots, at) in zip(names, members, strict=True):
            weight = weights.get(name)
            if master is None and weight is not None and weight.dtype == torch.float32:
                master = weight
            tensors = {f"optim.{slot}": value for slot, value in slots.items() if not is_number(value)}
            for kind, value in {"master": master, **tensors}.items():
                if isinstance(value, FileTensor):
                    # State of another shape than the parameter's (factored moments) keeps its own.
                    shape = (value.numel - at,) if flat else value.shape
                    if weight is not None and (flat or value.numel == weight.numel):
                        shape = weight.shape
                    pieces[kind, name] = Pieces.of(value, shape, at=at).check(f"{kind} of {name}", where)
            if values := numbers(slots):
                scalars[name] = values
    facts: dict[str, Any] = {"optimizer": {"groups": listed, "scalars": scalars}}
    if "cur_scale" in state:
        facts["loss_scaler"] = {key: materialize(state[key]) for key in _SCALER_KEYS if key in state}
        facts["loss_scaler"]["dynamic"] = bool(state.get("dynamic_loss_scale"))
    return facts


def _numbered(
    state: Mapping[str, Any], inner: Mapping[str, Any], weights: _Weights, groups: _Names | None
) -> Iterator[list[_Optimized]]:
    """Read tensors in the shapes of their parameters."""
    slots = [[inner["state"].get(number, {}) for number in group["params"]] for group in inner["param_groups"]]
    masters = state.get("fp32_groups") or [[None] * len(group) for group in slots]
    names = groups or [g.get("param_names") or [None] * len(g["params"]) for g in inner["param_groups"]]
    counts, expected = [len(group) for group in slots], [len(group) for group in names]
    if counts != expected:
        raise CheckpointError(f"the checkpoint has groups of {counts} parameters, this optimizer of {expected}")
    shapes = [[_shape(m, s) for m, s in zip(*pair, strict=True)] for pair in zip(masters, slots, strict=True)]
    # Masters are in an order of their own, which may fit by shape and be wrong: their values tell.
    nameless = len(names) == 1 and not any(names[0]) and not state.get("fp32_groups")
    if nameless and len(names[0]) == len(weights):
        pairs = zip(shapes[0], weights.values(), strict=True)
        names = [list(weights)] if all(shape in (None, w.shape) for shape, w in pairs) else names
    unmatched = dict(weights)
    for g, group in enumerate(zip(names, masters, slots, shapes, strict=True)):
        members = []
        for i, (given, master, values, shape) in enumerate(zip(*group, strict=True)):
            name = given if given or master is None else _by_values(unmatched, master, 0, master.shape)
            if name and name in weights and shape is not None and prod(shape) != weights[name].numel:
                where = f"parameter {i} of optimizer group {g}"
                raise CheckpointError(f"{name} is {weights[name].shape}, and {where} is {shape}")
            members.append(_Optimized(name, master, values))
        yield members


def _shape(master: FileTensor | None, slots: Mapping[str, Any]) -> tuple[int, ...] | None:
    tensors = (t for t in (master, *slots.values()) if isinstance(t, FileTensor) and t.shape)
    return next((t.shape for t in tensors), None)


def _flat(
    state: Mapping[str, Any], inner: Mapping[str, Any], weights: _Weights, groups: _Names | None
) -> Iterator[list[_Optimized]]:
    """Read one flat tensor per group, in which parameters follow one another."""
    unmatched = dict(weights)
    for g, (flat, group) in enumerate(zip(state["fp32_groups_flat"], inner["param_groups"], strict=True)):
        slots = inner["state"].get(group["params"][0], {}) if group["params"] else {}
        given, at, members = iter(groups[g]) if groups is not None else None, 0, list[_Optimized]()
        while name := next(given, None) if given is not None else _by_values(unmatched, flat, at, None):
            if name not in weights:
                raise CheckpointError(f"optimizer group {g} has {name}, and the checkpoint no weight of that name")
            members.append(_Optimized(name, flat, slots, at))
            at += weights[name].numel
        rest = torch.ones(max(0, flat.numel - at), dtype=flat.dtype, device="cpu")
        flat.read(rest, start=at)
        if rest.any():  # not padding
            members.append(_Optimized(None, flat, slots, at))
        yield members


def _by_values(unmatched: dict[str, FileTensor], master: FileTensor, at: int, shape: Any) -> str | None:
    """Pop from ``unmatched`` the weight (of ``shape``) equal to ``master`` from ``at`` on, rounded; return its name."""
    for name, weight in unmatched.items():
        if shape in (None, weight.shape) and at + weight.numel <= master.numel and weight.numel:
            values = torch.empty(weight.numel, dtype=weight.dtype, device="cpu")
            master.read(values, start=at)
            if torch.equal(values, weight.tensor().view(-1)):
                del unmatched[name]
                return name
    return None
