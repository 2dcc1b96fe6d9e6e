"""How the reference cuts parameters over ranks, and optimizer state by parameter name again.

Levels 1 and 2 flatten a whole group, pad it at the end and cut it into columns, one per rank. Level 3 cuts every
parameter into rows of equal length, one per rank, and joins a rank's rows into sub-groups. Either way a parameter is
spans of what some (rank, part) holds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from deepspeed.checkpoint.foreign.legacy_pieces import Pieces, Segment
from deepspeed.checkpoint.foreign.unpickle import Record, Stored, materialize
from deepspeed.checkpoint.load.source import Key
from deepspeed.errors import CheckpointError

Shapes = Sequence[Mapping[str, Sequence[int]]]  # per optimizer group, in flattening order


class Span(NamedTuple):
    """Elements [lo, hi) of a parameter lie from ``at`` on in shard ``part`` of ``rank``."""

    lo: int
    hi: int
    rank: int
    part: int
    at: int


class Shard(NamedTuple):
    """One flat fp32 tensor of a rank and the optimizer's state of it. ``padding``: by how much the latter may be
    longer.
    """

    master: Stored
    slots: Mapping[str, Any]
    padding: int


@dataclass
class Cut:
    """``spans`` by parameter name, ``shards`` by rank and part; ``groups``: names and options of the optimizer's
    groups.
    """

    spans: dict[str, list[Span]]
    shards: list[list[Shard]]
    groups: list[dict[str, Any]]


def columns(states: Sequence[Mapping[str, Any]], shapes: Shapes, where: Sequence[Path]) -> Cut:
    """Levels 1 and 2. ``param_shapes`` gives the order; ``param_slice_mappings`` has a wrong one with
    round_robin_gradients.
    """
    base = states[0]["base_optimizer_state"]
    listed = base["param_groups"] if isinstance(base, dict) else [{} for _ in shapes]
    groups = [{"names": list(group), "options": group_options(own)} for group, own in zip(shapes, listed, strict=True)]
    found = Cut({}, [], groups)
    for state in states:
        flats, pads, base = (
            state["single_partition_of_fp32_groups"],
            state["group_paddings"],
            state["base_optimizer_state"],
        )
        # A list when it was saved for another number of ranks ("elastic"): the padding is gone, the groups too.
        slots = base if isinstance(base, list) else [base["state"].get(g, {}) for g in range(len(flats))]
        found.shards.append([Shard(f, s, int(p)) for f, s, p in zip(flats, slots, pads, strict=True)])
    for g, group in enumerate(shapes):
        flats = [shards[g].master for shards in found.shards]
        gaps = (states[0].get("param_alignment_paddings") or [[0] * len(group)] * len(shapes))[g]
        # What the first rank holds is as long as a column, or all there is.
        width, offset, end = flats[0].numel, 0, 0
        for (name, shape), gap in zip(group.items(), gaps, strict=True):
            numel = prod(shape)
            edges = [(r, max(offset, r * width), min(offset + numel, r * width + f.numel)) for r, f in enumerate(flats)]
            found.spans[name] = [Span(lo - offset, hi - offset, r, g, lo - r * width) for r, lo, hi in edges if lo < hi]
            end, offset = offset + numel, offset + numel + int(gap)
        have = sum(f.numel for f in flats)
        if not end <= have < offset + 2 * len(flats):
            raise CheckpointError(
                f"{where[0].parent}: group {g} has {have} elements in its optimizer state files, its parameters {end}"
            )
    return found


def rows(states: Sequence[Mapping[str, Any]], shapes: Shapes, where: Sequence[Path]) -> Cut:
    """Level 3."""
    base = states[0]["optimizer_state_dict"]
    found = Cut({}, [], [])
    for state in states:
        slots = state["optimizer_state_dict"]["state"]
        found.shards.append([Shard(flat, slots.get(i, {}), 0) for i, flat in enumerate(state["fp32_flat_groups"])])
    world, index, at = len(states), 0, 0
    names: list[list[str]] = [[] for _ in found.shards[0]]
    sizes = [shard.master.numel for shard in found.shards[0]]
    for name, shape in ((n, s) for group in shapes for n, s in group.items()):
        numel = prod(shape)
        width = -(-numel // world)
        while index < len(sizes) and at == sizes[index]:
            index, at = index + 1, 0
        if index == len(sizes) or at + width > sizes[index]:
            raise CheckpointError(
                f"{where[0]} has no room for {name} of shape {tuple(shape)} in its flat groups of {sizes} elements"
            )
        edges = [(r, r * width, min(numel, (r + 1) * width)) for r in range(world)]
        found.spans[name] = [Span(lo, hi, r, index, at) for r, lo, hi in edges if lo < hi]
        names[index].append(name)
        at += width
    if sizes and (index, at) != (len(sizes) - 1, sizes[-1]):
        raise CheckpointError(
            f"{where[0]} has flat groups of {sizes} elements, more than the parameters of the model state file need"
        )
    for path, shards in zip(where, found.shards, strict=True):
        if [s.master.numel for s in shards] != sizes:
            raise CheckpointError(
                f"{path} has flat groups of {[s.master.numel for s in shards]} elements, {where[0].name} of {sizes}"
            )
    for group in base["param_groups"]:  # "params" are the sub-groups, which are what ``shapes`` lists here
        found.groups.append({"names": [n for i in group["params"] for n in names[i]], "options": group_options(group)})
    return found


def group_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """A torch parameter group without its parameters."""
    return {key: materialize(value) for key, value in group.items() if key not in ("params", "param_names")}


def scaler_state(state: Mapping[str, Any]) -> dict[str, Any] | None:
    """Attributes of the loss scaler that an optimizer state holds."""
    found = state.get("loss_scaler")
    return dict(materialize(found.state)) if isinstance(found, Record) else None


def sharded(pieces: dict[Key, Pieces], cut: Cut, shapes: Shapes, *, where: Sequence[Path]) -> dict[str, Any]:
    """Add masters and elementwise slots to ``pieces``; returns the facts of the optimizer. Raises CheckpointError
    naming the tensor.
    """
    scalars: dict[str, dict[str, Any]] = {}
    folder = where[0].parent
    for name, shape in ((n, tuple(s)) for group in shapes for n, s in group.items()):
        spans = cut.spans[name]
        held = [cut.shards[s.rank][s.part] for s in spans]
        master = Pieces(
            torch.float32, shape, tuple(Segment(s.lo, s.hi, h.master, s.at) for s, h in zip(spans, held, strict=True))
        )
        pieces["master", name] = master.check(f"master of {name}", folder)
        for slot in dict.fromkeys(slot for shard in held for slot in shard.slots):
            values = [shard.slots.get(slot) for shard in held]
            if all(is_number(v) for v in values):
                if values[0] is not None:
                    scalars.setdefault(name, {})[slot] = materialize(values[0])
                continue
            what = f"optim.{slot} of {name}"
            segments = []
            for span, shard, value in zip(spans, held, values, strict=True):
                segments.append(Segment(span.lo, span.hi, _elementwise(value, shard, what, where[span.rank]), span.at))
            pieces[f"optim.{slot}", name] = Pieces(segments[0].stored.dtype, shape, tuple(segments)).check(what, folder)
    return {"optimizer": {"groups": cut.groups, "scalars": scalars}}


def is_number(value: Any) -> bool:
    """Whether a slot is one value for a whole tensor (a step count), or nothing."""
    return value is None or isinstance(value, bool | int | float) or (isinstance(value, Stored) and not value.shape)


def _elementwise(value: Any, shard: Shard, what: str, where: Path) -> Stored:
    length = shard.master.numel
    if isinstance(value, Stored) and len(value.shape) == 1 and length <= value.numel <= length + shard.padding:
        return value
    if value is None:
        raise CheckpointError(f"{where} has no {what}, which other ranks have")
    found = value.shape if isinstance(value, Stored) else type(value).__name__
    raise CheckpointError(
        f"{where} has {what} of shape {found} for {length} elements; state of such a shape is not read"
    )
