"""Optimizer state in DeepSpeed's files, by parameter names again: sharded, universal and unsharded.

Levels 1 and 2 lay a whole optimizer group end to end, pad it and cut it into columns, one per rank. Level 3 cuts every
parameter into rows of equal length, one per rank, and joins a rank's rows, in sub-groups.

Unsharded state numbers parameters, so their names come from elsewhere: from the groups that the caller gives, from
names that torch stored, from values (fp32 masters rounded are the weights of the module), or from the module's order
where one group has all of it. Other state is kept as "unnamed ...".
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from deepspeed.checkpoint.foreign.unpickle import FileTensor, load_restricted, materialize
from deepspeed.checkpoint.load.source import Key
from deepspeed.errors import CheckpointError
from deepspeed.zero.regions import faults

Members = Sequence[tuple[str, int]]  # (name, elements) of parameters, in flattening order
Shapes = Sequence[Mapping[str, tuple[int, ...]]]  # per optimizer group, in flattening order
States = Sequence[Mapping[str, Any]]  # what the files of the ranks hold


class Slice(NamedTuple):
    """Elements [lo, hi) of parameter ``name`` lie from ``at`` on in flat tensor ``part`` of ``rank``."""

    name: str
    lo: int
    hi: int
    rank: int
    part: int
    at: int


def column_width(members: Members, world: int) -> int:
    """Return the elements of a column, padded so that all ranks together have a multiple of 2 x ``world``."""
    return -(-sum(numel for _, numel in members) // (2 * world)) * 2


def row_width(numel: int, world: int) -> int:
    """Return the elements of a parameter's row per rank; the last rank's row is padded."""
    return -(-numel // world)


def columns(
    members: Members, part: int, *, width: int, world: int, gaps: Sequence[int] | None = None
) -> Iterator[Slice]:
    """Yield a group's slices at levels 1 and 2, flat tensor ``part`` on all ranks. ``gaps``: padding after each."""
    offset = 0
    for (name, numel), gap in zip(members, gaps or [0] * len(members), strict=True):
        for rank in range(world):
            lo, hi = max(offset, rank * width), min(offset + numel, (rank + 1) * width)
            if lo < hi:
                yield Slice(name, lo - offset, hi - offset, rank, part, lo - rank * width)
        offset += numel + int(gap)


def rows(members: Members, part: int, world: int) -> Iterator[Slice]:
    """Yield the slices of a sub-group at level 3: flat tensor ``part`` of every rank."""
    at = 0
    for name, numel in members:
        width = row_width(numel, world)
        for rank, lo in enumerate(range(0, numel, width or 1)):
            yield Slice(name, lo, min(numel, lo + width), rank, part, at)
        at += width


def sub_groups(members: Members, world: int, limit: int) -> list[list[tuple[str, int]]]:
    """Split a group's parameters, at level 3, into runs whose rows together reach ``limit`` elements."""
    runs, filled = list[list[tuple[str, int]]](), limit
    for member in members:
        if filled >= limit:
            runs.append([])
            filled = 0
        runs[-1].append(member)
        filled += row_width(member[1], world)
    return runs


class Piece(NamedTuple):
    """Part of a tensor: elements [lo, hi), in row-major order, are those of ``stored`` from ``at`` on."""

    lo: int
    hi: int
    stored: FileTensor
    at: int = 0


class Pieces(NamedTuple):
    """Tensor of ``dtype`` and ``shape``, made of ``parts``."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: Sequence[Piece]

    @classmethod
    def of(cls, stored: FileTensor, shape: tuple[int, ...] | None = None, *, at: int = 0) -> "Pieces":
        """Wrap a stored tensor, whole or as the tensor of ``shape`` that begins at its element ``at``."""
        shape = stored.shape if shape is None else shape
        return cls(stored.dtype, shape, [Piece(0, prod(shape), stored, at)])

    def check(self, label: str, where: Path) -> "Pieces":
        """Return self; CheckpointError when elements are missing or stored twice, or a stored tensor is too short."""
        if faults(prod(self.shape), [(lo, hi) for lo, hi, _, _ in self.parts]):
            have = sum(hi - lo for lo, hi, _, _ in self.parts)
            raise CheckpointError(f"{where} has {have} of the {prod(self.shape)} elements of {label}; files do not fit")
        for lo, hi, stored, at in self.parts:
            if at + hi - lo > stored.numel:
                raise CheckpointError(f"{stored.path} has {stored.numel} elements where {label} needs {at + hi - lo}")
        return self

    def read(self, out: torch.Tensor, start: int) -> None:
        """Fill the flat host tensor ``out`` with elements from ``start`` on."""
        for lo, hi, stored, at in self.parts:
            first, last = max(lo, start), min(hi, start + out.numel())
            if first < last:
                stored.read(out[first - start : last - start], start=at + first - lo)


class _Shard(NamedTuple):
    """Flat fp32 tensor of a rank, and its optimizer state, which may be longer by ``padding``."""

    master: FileTensor
    slots: Mapping[str, Any]
    padding: int = 0


# Slices of parameters; the tensors they are in, by rank and part; names and options of the optimizer's groups.
_Cut = tuple[list[Slice], list[list[_Shard]], list[dict[str, Any]]]


def _in_columns(states: States, shapes: Shapes, where: Sequence[Path]) -> _Cut:
    """Cut levels 1 and 2 in ``shapes``' order; ``param_slice_mappings`` has it wrong with round_robin_gradients."""
    shards: list[list[_Shard]] = []
    for state in states:
        flats, base = state["single_partition_of_fp32_groups"], state["base_optimizer_state"]
        # A list when it was saved for another number of ranks ("elastic"): the padding is gone, the groups too.
        slots = base if isinstance(base, list) else [base["state"].get(g, {}) for g in range(len(flats))]
        shards.append([_Shard(f, s, int(p)) for f, s, p in zip(flats, slots, state["group_paddings"], strict=True)])
    slices: list[Slice] = []
    for g, group in enumerate(shapes):
        members, flats = _members(group), [of_rank[g].master.numel for of_rank in shards]
        gaps = (states[0].get("param_alignment_paddings") or [[0] * len(group)] * len(shapes))[g]
        # What the first rank has is as long as a column, or all there is.
        slices += columns(members, g, width=flats[0], world=len(flats), gaps=gaps)
        end, have = sum(numel for _, numel in members), sum(flats)
        if not end + sum(gaps[:-1]) <= have < end + sum(gaps) + 2 * len(flats):
            raise CheckpointError(
                f"{where[0].parent}: group {g} has {have} elements in its optimizer state files, its parameters {end}"
            )
    base = states[0]["base_optimizer_state"]
    return slices, shards, _named_groups(shapes, base["param_groups"] if isinstance(base, dict) else None)


def _in_rows(states: States, shapes: Shapes, where: Sequence[Path]) -> _Cut:
    """Cut level 3: return slices, shards and optimizer groups. Raises CheckpointError when sizes do not fit."""
    shards, world = [], len(states)
    for state in states:
        slots = state["optimizer_state_dict"]["state"]
        shards.append([_Shard(flat, slots.get(i, {})) for i, flat in enumerate(state["fp32_flat_groups"])])
    sizes = [[shard.master.numel for shard in of_rank] for of_rank in shards]
    # Sub-groups are runs of parameters: those whose rows fill one flat tensor.
    ends, runs, filled = list(accumulate(sizes[0])) or [0], [list[tuple[str, int]]() for _ in sizes[0] or [0]], 0
    for member in (member for group in shapes for member in _members(group)):
        at = min(bisect_right(ends, filled), len(runs) - 1)
        filled += row_width(member[1], world)
        runs[at].append(member)
    fit = all(sum(row_width(n, world) for _, n in run) == size for run, size in zip(runs, sizes[0], strict=False))
    if not fit or filled != ends[-1] or any(row != sizes[0] for row in sizes):
        odd = next((at for at, row in enumerate(sizes) if row != sizes[0]), 0)
        detail = f"flat groups of {sizes[odd]} elements, {where[0].name} of {sizes[0]}"
        raise CheckpointError(f"{where[odd]} has {detail}; these do not fit each other and the model's parameters")
    slices = [s for part, run in enumerate(runs) for s in rows(run, part, world)]
    groups = [  # "params" are the sub-groups, which are what ``shapes`` lists here
        {"names": [name for i in group["params"] for name, _ in runs[i]], "options": group_options(group)}
        for group in states[0]["optimizer_state_dict"]["param_groups"]
    ]
    return slices, shards, groups


def _members(group: Mapping[str, tuple[int, ...]]) -> list[tuple[str, int]]:
    return [(name, prod(shape)) for name, shape in group.items()]


def _named_groups(shapes: Shapes, listed: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    pairs = zip(shapes, listed or [{} for _ in shapes], strict=True)
    return [{"names": list(group), "options": group_options(options)} for group, options in pairs]


def group_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a torch parameter group, without its parameters."""
    return {key: materialize(value) for key, value in group.items() if key not in ("params", "param_names")}


def _scaler(state: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the attributes of the loss scaler in an optimizer state; None without one."""
    scaler = state.get("loss_scaler")
    return None if scaler is None else dict(vars(materialize(scaler)))


def is_number(value: Any) -> bool:
    """Tell whether a slot is one value for a whole tensor (a step count), or None."""
    return value is None or isinstance(value, bool | int | float) or (isinstance(value, FileTensor) and not value.shape)


def numbers(slots: Mapping[str, Any]) -> dict[str, Any]:
    """Return the slots that are one value for the whole tensor, None left out."""
    return {slot: materialize(value) for slot, value in slots.items() if is_number(value) and value is not None}


def shard_counts(state: Mapping[str, Any], parts: int) -> list[int]:
    """Return over how many ranks each flat tensor of ``state`` is sharded; experts over those that hold the same."""
    counts = state["partition_count"]
    if isinstance(counts, list):
        return [int(count) for count in counts]
    known = {part["sub_group"]: int(part["partition_count"]) for part in state.get("ds_zero_partition_groups") or ()}
    return [known.get(part, int(counts)) for part in range(parts)]


def groups_of(state: Mapping[str, Any], numbers: Sequence[int]) -> list[int]:
    """Return the numbers of the optimizer groups that the flat tensors ``numbers`` belong to."""
    if "fp32_flat_groups" not in state:
        return [*numbers]
    groups = state["optimizer_state_dict"]["param_groups"]
    return [number for number, group in enumerate(groups) if set(group["params"]) & set(numbers)]


def with_parts(state: Mapping[str, Any], numbers: Sequence[int]) -> Mapping[str, Any]:
    """Return ``state`` with only the flat tensors ``numbers``, and their optimizer groups."""
    if "fp32_flat_groups" in state:
        inner = state["optimizer_state_dict"]
        groups = [inner["param_groups"][n] for n in groups_of(state, numbers)]
        slots = {i: inner["state"].get(n, {}) for i, n in enumerate(numbers)}
        anew = [{**g, "params": [numbers.index(n) for n in g["params"] if n in numbers]} for g in groups]
        flats = [state["fp32_flat_groups"][n] for n in numbers]
        return {**state, "fp32_flat_groups": flats, "optimizer_state_dict": {"state": slots, "param_groups": anew}}
    lists = ("single_partition_of_fp32_groups", "group_paddings", "param_alignment_paddings")
    some = {key: [state[key][n] for n in numbers] for key in lists if state.get(key)}
    base = state["base_optimizer_state"]
    if isinstance(base, list):
        return {**state, **some, "base_optimizer_state": [base[n] for n in numbers]}
    of_base = {"state": {i: base["state"].get(n, {}) for i, n in enumerate(numbers)}}
    return {
        **state,
        **some,
        "base_optimizer_state": {**of_base, "param_groups": [base["param_groups"][n] for n in numbers]},
    }


def add_sharded(pieces: dict[Key, Any], states: States, shapes: Shapes, *, where: Sequence[Path]) -> dict[str, Any]:
    """Add masters and slots to ``pieces``; return their facts. Raises CheckpointError naming the tensor."""
    cut = _in_rows if "fp32_flat_groups" in states[0] else _in_columns
    slices, shards, groups = cut(states, shapes, where)
    scalars: dict[str, dict[str, Any]] = {}
    homes: dict[str, list[tuple[Slice, _Shard]]] = {}
    for s in slices:
        homes.setdefault(s.name, []).append((s, shards[s.rank][s.part]))
    for name, shape in (item for group in shapes for item in group.items()):
        parts = homes.get(name, [])
        values: dict[str, list[Any]] = {"master": [shard.master for _, shard in parts]}
        for slot in dict.fromkeys(slot for _, shard in parts for slot in shard.slots):
            stored: list[Any] = [shard.slots.get(slot) for _, shard in parts]
            if all(map(is_number, stored)):
                scalars.setdefault(name, {}).update(numbers({slot: stored[0]}))
                continue
            values[f"optim.{slot}"] = stored
            for (s, shard), value in zip(parts, stored, strict=True):
                need, flat = shard.master.numel, isinstance(value, FileTensor) and len(value.shape) == 1
                if not (flat and need <= value.shape[0] <= need + shard.padding):
                    detail = f"optim.{slot} of {name} of shape {getattr(value, 'shape', value)} for {need} elements"
                    raise CheckpointError(f"{where[s.rank]} has {detail}; state of such a shape is not read")
        for kind, tensors in values.items():
            cuts = [Piece(s.lo, s.hi, tensor, s.at) for (s, _), tensor in zip(parts, tensors, strict=True)]
            dtype = torch.float32 if kind == "master" else tensors[0].dtype
            pieces[kind, name] = Pieces(dtype, shape, cuts).check(f"{kind} of {name}", where[0].parent)
    return {"optimizer": {"groups": groups, "scalars": scalars}, "loss_scaler": _scaler(states[0])}


def add_universal(pieces: dict[Key, Any], shapes: Shapes, *, model: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Add masters and slots to ``pieces``; return their facts. Raises CheckpointError naming the tensor."""
    zero = (materialize(model.get("ds_config")) or {}).get("zero_optimization")
    if isinstance(zero, dict) and zero.get("round_robin_gradients") and int(model.get("dp_world_size", 1)) > 1:
        raise CheckpointError(  # it goes by a record that has the wrong order with this setting
            f"{folder} was converted from a run with round_robin_gradients, and the converter of DeepSpeed 0.19 mixes "
            "parameters up there; load the folder that it was converted from instead, without conversion"
        )
    common, scalars = load_restricted(folder / "zero" / "optimizer_state.pt"), dict[str, dict[str, Any]]()
    if "fp32_flat_groups" in common:  # level 3: numbers are in the first rank's state, not with the parameters
        world = int(common["partition_count"])
        slices, shards, groups = _in_rows([common] * world, shapes, [folder / "zero" / "optimizer_state.pt"] * world)
        for s in slices:
            if s.rank == 0 and (row := numbers(shards[0][s.part].slots)):
                scalars[s.name] = row
    else:
        groups = _named_groups(shapes, common.get("param_groups"))
    # The model states have the shapes of a rank's parts.
    joined = int(model.get("mp_world_size", 1)) > 1 or bool(model.get("ds_autoep_layers"))
    states: dict[str, set[str]] = {}
    for name, shape in (item for group in shapes for item in group.items()):
        base, states[name] = folder / "zero" / name, set()
        if not (base / "fp32.pt").is_file():
            raise CheckpointError(f"{base} lacks fp32.pt: the trained parameter {name} is missing from the checkpoint")
        for path in sorted(base.glob("*.pt")):
            value = load_restricted(path)
            value = value["param"] if isinstance(value, dict) else value
            kind = "master" if path.stem == "fp32" else f"optim.{path.stem}"
            if is_number(value) and kind != "master":
                scalars.setdefault(name, {})[path.stem] = materialize(value)
                continue
            label = f"{kind} of {name}"
            if joined and isinstance(value, FileTensor) and len(value.shape) == len(shape):
                shape = value.shape
            if not isinstance(value, FileTensor) or value.numel != prod(shape):
                shown = getattr(value, "shape", type(value).__name__)
                raise CheckpointError(f"{path} holds {label} as {shown}, and the model state file says {shape}")
            pieces[kind, name] = Pieces.of(value, shape).check(label, path)
            states[name].add(kind)
    every = set().union(*states.values())
    for name, present in states.items():
        if present != every and present != {"master"}:
            lacking = ", ".join(sorted(every - present))
            raise CheckpointError(f"{folder / 'zero' / name} lacks {lacking} of {name}, which other parameters have")
    return {"optimizer": {"groups": groups, "scalars": scalars}, "loss_scaler": _scaler(common)}


# -- unsharded -------------------------------------------------------------------------------------------------------
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
    pieces: dict[Key, Any], model: Mapping[str, Any], *, groups: _Names | None, where: Path
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
