"""Optimizer state of DeepSpeed's levels 1 to 3, and of its universal folders, by parameter name again."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from deepspeed.checkpoint.foreign import cuts
from deepspeed.checkpoint.foreign.cuts import Piece, Pieces, Slice
from deepspeed.checkpoint.foreign.unpickle import FileTensor, load_restricted, materialize
from deepspeed.checkpoint.load.source import Key
from deepspeed.errors import CheckpointError

Shapes = Sequence[Mapping[str, Sequence[int]]]  # per optimizer group, in flattening order


class Shard(NamedTuple):
    """One flat fp32 tensor of a rank and the optimizer's state of it, which may be longer by ``padding``."""

    master: FileTensor
    slots: Mapping[str, Any]
    padding: int


class CutState(NamedTuple):
    """``slices`` of parameters in ``shards``, by rank and part; ``groups``: names and options."""

    slices: list[Slice]
    shards: list[list[Shard]]
    groups: list[dict[str, Any]]


def in_columns(states: Sequence[Mapping[str, Any]], shapes: Shapes, where: Sequence[Path]) -> CutState:
    """Levels 1 and 2. ``shapes`` gives the order; ``param_slice_mappings`` has it wrong with round_robin_gradients."""
    base = states[0]["base_optimizer_state"]
    listed = base["param_groups"] if isinstance(base, dict) else [{} for _ in shapes]
    shards = []
    for state in states:
        flats, base = state["single_partition_of_fp32_groups"], state["base_optimizer_state"]
        # A list when it was saved for another number of ranks ("elastic"): the padding is gone, the groups too.
        slots = base if isinstance(base, list) else [base["state"].get(g, {}) for g in range(len(flats))]
        shards.append([Shard(f, s, int(p)) for f, s, p in zip(flats, slots, state["group_paddings"], strict=True)])
    slices: list[Slice] = []
    for g, group in enumerate(shapes):
        members, flats = _members(group), [shards_of_rank[g].master.numel for shards_of_rank in shards]
        gaps = (states[0].get("param_alignment_paddings") or [[0] * len(group)] * len(shapes))[g]
        # What the first rank has is as long as a column, or all there is.
        slices += cuts.columns(members, g, width=flats[0], world=len(flats), gaps=gaps)
        end, have = sum(numel for _, numel in members), sum(flats)
        if not end + sum(gaps[:-1]) <= have < end + sum(gaps) + 2 * len(flats):
            raise CheckpointError(
                f"{where[0].parent}: group {g} has {have} elements in its optimizer state files, its parameters {end}"
            )
    return CutState(slices, shards, named_groups(shapes, listed))


def in_rows(states: Sequence[Mapping[str, Any]], shapes: Shapes, where: Sequence[Path]) -> CutState:
    """Level 3."""
    shards = []
    for state in states:
        slots = state["optimizer_state_dict"]["state"]
        shards.append([Shard(flat, slots.get(i, {}), 0) for i, flat in enumerate(state["fp32_flat_groups"])])
    sizes = [[shard.master.numel for shard in of_rank] for of_rank in shards]
    members = [member for group in shapes for member in _members(group)]
    runs = _runs(members, sizes[0], len(states))
    if runs is None or any(row != sizes[0] for row in sizes):
        odd = next((at for at, row in enumerate(sizes) if row != sizes[0]), 0)
        raise CheckpointError(
            f"{where[odd]} has flat groups of {sizes[odd]} elements, {where[0].name} of {sizes[0]}, and these do not "
            "fit each other and the parameters that the model state file lists"
        )
    slices = [s for part, run in enumerate(runs) for s in cuts.rows(run, part, len(states))]
    groups = [  # "params" are the sub-groups, which are what ``shapes`` lists here
        {"names": [name for i in group["params"] for name, _ in runs[i]], "options": group_options(group)}
        for group in states[0]["optimizer_state_dict"]["param_groups"]
    ]
    return CutState(slices, shards, groups)


def _members(group: Mapping[str, Sequence[int]]) -> list[tuple[str, int]]:
    return [(name, prod(shape)) for name, shape in group.items()]


def _runs(members: cuts.Members, sizes: Sequence[int], world: int) -> list[list[tuple[str, int]]] | None:
    """``members`` by the sub-group whose flat tensor (of ``sizes``) has their rows; None when they do not fit."""
    ends, runs, filled = list(accumulate(sizes)) or [0], [list[tuple[str, int]]() for _ in sizes or [0]], 0
    for member in members:
        at = min(bisect_right(ends, filled), len(runs) - 1)
        filled += cuts.row_width(member[1], world)
        if filled > ends[at]:
            return None
        runs[at].append(member)
    return runs if filled == ends[-1] else None


def named_groups(shapes: Shapes, listed: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Names and options of the optimizer's groups."""
    pairs = zip(shapes, listed, strict=True)
    return [{"names": list(group), "options": group_options(options)} for group, options in pairs]


def group_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """A torch parameter group without its parameters."""
    return {key: materialize(value) for key, value in group.items() if key not in ("params", "param_names")}


def scaler_state(state: Mapping[str, Any]) -> dict[str, Any] | None:
    """Attributes of the loss scaler that an optimizer state holds."""
    scaler = state.get("loss_scaler")
    return None if scaler is None else dict(vars(materialize(scaler)))


def sharded(pieces: dict[Key, Pieces], state: CutState, shapes: Shapes, *, where: Sequence[Path]) -> dict[str, Any]:
    """Add masters and slots to ``pieces``; the optimizer's facts. Raises CheckpointError naming the tensor."""
    scalars: dict[str, dict[str, Any]] = {}
    slices: dict[str, list[Slice]] = {}
    for s in state.slices:
        slices.setdefault(s.name, []).append(s)
    for name, shape in ((n, tuple(s)) for group in shapes for n, s in group.items()):
        homes = [(s, state.shards[s.rank][s.part]) for s in slices.get(name, [])]
        master = Pieces(torch.float32, shape, tuple(Piece(s.lo, s.hi, shard.master, s.at) for s, shard in homes))
        pieces["master", name] = master.check(f"master of {name}", where[0].parent)
        for slot in dict.fromkeys(slot for _, shard in homes for slot in shard.slots):
            if all(is_number(shard.slots.get(slot)) for _, shard in homes):
                scalars.setdefault(name, {}).update(numbers({slot: homes[0][1].slots.get(slot)}))
                continue
            what = f"optim.{slot} of {name}"
            parts = [
                Piece(s.lo, s.hi, _elementwise(shard, slot, f"{where[s.rank]} has {what}"), s.at) for s, shard in homes
            ]
            pieces[f"optim.{slot}", name] = Pieces(parts[0].stored.dtype, shape, tuple(parts)).check(
                what, where[0].parent
            )
    return {"groups": state.groups, "scalars": scalars}


def is_number(value: Any) -> bool:
    """Whether a slot is one value for a whole tensor (a step count), or nothing."""
    return value is None or isinstance(value, bool | int | float) or (isinstance(value, FileTensor) and not value.shape)


def numbers(slots: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the slots that are one value."""
    return {slot: materialize(value) for slot, value in slots.items() if is_number(value) and value is not None}


def _elementwise(shard: Shard, slot: str, what: str) -> FileTensor:
    value, length = shard.slots.get(slot), shard.master.numel
    if isinstance(value, FileTensor) and len(value.shape) == 1 and length <= value.numel <= length + shard.padding:
        return value
    shape = getattr(value, "shape", value)
    raise CheckpointError(f"{what} of shape {shape} for {length} elements; state of such a shape is not read")


def add_universal(
    pieces: dict[Key, Pieces], shapes: Shapes, *, model: Mapping[str, Any], folder: Path
) -> dict[str, Any]:
    """Add masters and slots to ``pieces``; the facts they come with. Raises CheckpointError naming the tensor."""
    zero = (materialize(model.get("ds_config")) or {}).get("zero_optimization")
    if isinstance(zero, dict) and zero.get("round_robin_gradients") and int(model.get("dp_world_size", 1)) > 1:
        raise CheckpointError(  # it goes by a record that has the wrong order with this setting
            f"{folder} was converted from a run with round_robin_gradients, and the converter of DeepSpeed 0.19 mixes "
            "parameters up there; load the folder that it was converted from instead, without conversion"
        )
    common = load_restricted(folder / "zero" / "optimizer_state.pt")
    scalars, groups = _groups(common, shapes, folder)
    states: dict[str, set[str]] = {}
    for name, shape in ((n, tuple(s)) for group in shapes for n, s in group.items()):
        home = folder / "zero" / name
        if not (home / "fp32.pt").is_file():
            raise CheckpointError(f"{home} lacks fp32.pt: the trained parameter {name} is missing from the checkpoint")
        states[name] = set()
        for path in sorted(home.glob("*.pt")):
            value = load_restricted(path)
            value = value["param"] if isinstance(value, dict) else value
            state = "master" if path.stem == "fp32" else f"optim.{path.stem}"
            if is_number(value) and state != "master":
                scalars.setdefault(name, {})[path.stem] = materialize(value)
                continue
            what = f"{state} of {name}"
            if not isinstance(value, FileTensor) or value.numel != prod(shape):
                shown = getattr(value, "shape", type(value).__name__)
                raise CheckpointError(f"{path} holds {what} as {shown}, and the model state file says {shape}")
            pieces[state, name] = Pieces.of(value, shape).check(what, path)
            states[name].add(state)
    every = set().union(*states.values())
    for name, present in states.items():
        if present != every and present != {"master"}:
            lacking = ", ".join(sorted(every - present))
            raise CheckpointError(f"{folder / 'zero' / name} lacks {lacking} of {name}, which other parameters have")
    return {"optimizer": {"groups": groups, "scalars": scalars}, "loss_scaler": scaler_state(common)}


def _groups(
    common: Mapping[str, Any], shapes: Shapes, folder: Path
) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """Numbers per parameter that do not lie with it (level 3: in the first rank's state), and the groups."""
    if "fp32_flat_groups" not in common:
        return {}, named_groups(shapes, common.get("param_groups") or [{} for _ in shapes])
    world = int(common["partition_count"])
    state = in_rows([common] * world, shapes, [folder / "zero" / "optimizer_state.pt"] * world)
    scalars = {s.name: numbers(state.shards[0][s.part].slots) for s in state.slices if s.rank == 0}
    return {name: row for name, row in scalars.items() if row}, state.groups
