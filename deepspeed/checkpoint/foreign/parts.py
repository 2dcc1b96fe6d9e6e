"""Parameters of which DeepSpeed's ranks had parts, whole again: experts, stages of pipelines, tensor parallelism.

Each rank's files are read on their own. A rule then tells where a parameter of a rank lies in the model: the maps that
DeepSpeed 0.19 writes, the patterns of ``universal_checkpoint_info``, or the numbers of experts in names.
"""

import re
from collections.abc import Callable, Container, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from deepspeed.checkpoint.load.source import Key
from deepspeed.errors import CheckpointError
from deepspeed.zero.regions import Region, Span, runs, uncovered

_EXPERT = re.compile(r"(.*deepspeed_experts\.)(\d+)(\..*)")
Facts = dict[str, Any]


class Patch(NamedTuple):
    """Region ``inside`` of a rank's part, which lies at ``where`` in the whole tensor; both of one shape."""

    where: Region
    inside: Region


class Placed(NamedTuple):
    """Name of a parameter in the model, its whole ``shape``, and ``boxes`` of this rank's part; None: it is whole."""

    name: str
    shape: tuple[int, ...] = ()
    boxes: Sequence[Patch] | None = None


Place = Callable[[str, int, tuple[int, ...]], Placed]
"""Rule: (name, number of the rank among those with parts, shape of its part) -> place."""


class JoinedTensor(NamedTuple):
    """Tensor of ``dtype`` and ``shape``, made of ``boxes`` of other tensors."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: list[tuple[Patch, Any]]

    def check(self, label: str, where: Path) -> "JoinedTensor":
        """Return self; CheckpointError when elements are missing or come from several parts."""
        if gaps := uncovered(self.shape, [Span(0, prod(box.where.shape), box.where) for box, _ in self.boxes]):
            fault = "several parts" if gaps[0].times else "no part"
            raise CheckpointError(f"{where} has {fault} for elements {gaps[0].lo} to {gaps[0].hi} of {label}")
        return self

    def read(self, out: torch.Tensor, start: int) -> None:
        """Fill the flat host tensor ``out`` with elements from ``start`` on."""
        wanted = Span(start, start + out.numel())
        for (where, inside), part in self.boxes:
            everything = Span(0, prod(part.shape))
            for at, first, numel in runs(self.shape, wanted, Span(0, prod(where.shape), where)):
                for position, stored, length in runs(part.shape, Span(first, first + numel, inside), everything):
                    lo = at - start + position - first
                    part.read(out[lo : lo + length], stored)


Tensors = dict[Key, Any]  # Pieces, or JoinedTensor ones


class Half(NamedTuple):
    """Tensors of one rank, or of several joined, and facts of their optimizer state."""

    tensors: Tensors
    facts: Facts


def join(halves: Sequence[Half], place: Place, where: Path) -> Half:
    """Return what ranks hold as a whole; options and numbers are the first's. CheckpointError names a tensor."""
    tensors, cuts, scalars, groups = Tensors(), dict[Key, JoinedTensor](), dict[str, Any](), list[dict[str, Any]]()
    for rank, half in enumerate(halves):
        for (state, name), value in half.tensors.items():
            placed = Placed(name) if state == "buffer" else place(name, rank, value.shape)
            key = state, placed.name
            if placed.boxes is None:
                tensors.setdefault(key, value)
                continue
            whole = cuts.setdefault(key, JoinedTensor(value.dtype, placed.shape, []))
            whole.boxes.extend((box, value) for box in placed.boxes)
        optimizer = half.facts["optimizer"]
        for name, values in optimizer.get("scalars", {}).items():
            scalars.setdefault(place(name, rank, ()).name, values)
        for number, group in enumerate(optimizer.get("groups", ())):
            names = [place(name, rank, ()).name for name in group["names"]]
            if number == len(groups):
                groups.append({**group, "names": []})
            groups[number]["names"] = list(dict.fromkeys([*groups[number]["names"], *names]))
    tensors |= {key: whole.check(f"{key[0]} of {key[1]}", where) for key, whole in cuts.items()}
    shared = {alias: name for half in halves for alias, name in half.facts.get("shared", {}).items()}
    optimizer = {"groups": groups, "scalars": scalars} if groups else {}
    return Half(tensors, {**halves[0].facts, "optimizer": optimizer, "shared": shared})


def as_it_is(name: str, rank: int, shape: tuple[int, ...]) -> Placed:
    """Rule for parameters that each rank has whole, under the names of the model."""
    return Placed(name)


def unless(whole: Container[str], place: Place) -> Place:
    """Return the rule ``place`` for parameters that are not among the ``whole`` ones."""
    return lambda name, rank, shape: Placed(name) if name in whole else place(name, rank, shape)


def whole_box(shape: tuple[int, ...], at: tuple[int, ...] | None = None) -> Patch:
    """Return the box of a part of ``shape`` that lies as a whole at ``at`` (None: at the beginning)."""
    origin = (0,) * len(shape)
    return Patch(Region(origin if at is None else at, shape), Region(origin, shape))


# -- experts ---------------------------------------------------------------------------------------------------------
def number_experts(names: Sequence[str]) -> Place:
    """Return the rule for experts of ``MoE`` layers, which each rank numbers from 0. ``names``: those of a rank."""
    layers = layers_of(names)

    def place(name: str, rank: int, shape: tuple[int, ...]) -> Placed:
        match = _EXPERT.fullmatch(name)
        return Placed(name if match is None else f"{match[1]}{rank * layers[match[1]] + int(match[2])}{match[3]}")

    return place


def layers_of(names: Sequence[str]) -> dict[str, int]:
    """Return how many experts of each ``MoE`` layer are in ``names``, by the prefix of their names."""
    experts = {(match[1], match[2]) for match in map(_EXPERT.fullmatch, names) if match is not None}
    return {prefix: sum(one == prefix for one, _ in experts) for prefix, _ in sorted(experts)}


def own_experts(names: Sequence[str], local: Mapping[str, int], rank: int) -> list[str]:
    """Return ``names`` with their experts numbered as those of ``rank``, which has ``local`` ones of each layer."""
    numbered: dict[str, None] = {}
    for name in names:
        match = _EXPERT.fullmatch(name)
        count = 0 if match is None else local.get(match[1], 0)
        numbered[f"{match[1]}{rank * count + int(match[2]) % count}{match[3]}" if match and count else name] = None
    return list(numbered)


def by_maps(maps: Mapping[str, Any]) -> Place:
    """Return the rule that ``maps`` tell: the parts of each parameter, by name and rank."""

    def place(name: str, rank: int, shape: tuple[int, ...]) -> Placed:
        entry = maps.get(name)
        if entry is None:
            return Placed(name)
        logical, of_rank = tuple(entry["logical_shape"]), entry["ranks"][rank]
        part = tuple(of_rank["shard_shape"])
        if shape and part == logical:
            return Placed(name)
        pieces = [(tuple(p["shape"]), p["source"], p["dest"]) for p in of_rank["pieces"]]
        boxes = [Patch(_region(logical, s, where, name), _region(part, s, inside, name)) for s, where, inside in pieces]
        return Placed(name, logical, boxes)

    return place


def _region(of: tuple[int, ...], shape: tuple[int, ...], at: Sequence[Any], name: str) -> Region:
    """Return the region of a tensor of shape ``of`` that (offset, strides) ``at`` and ``shape`` describe."""
    rest, strides = int(at[0]), [prod(of[dim + 1 :]) for dim in range(len(of))]
    if list(at[1]) != strides or len(shape) != len(of):
        raise CheckpointError(f"the part of {name} has strides {list(at[1])} in a tensor of {list(of)}; not read")
    start = []
    for stride in strides:
        first, rest = divmod(rest, stride)
        start.append(first)
    return Region(tuple(start), shape)


def stack_experts(
    tensors: Tensors, names: Sequence[str], layers: Sequence[Mapping[str, Any]], where: Path
) -> tuple[Tensors, dict[str, str]]:
    """Return ``tensors`` of AutoEP layers as the models of Transformers 5 name and stack them, and the names that
    became others.

    ``w1`` and ``w3`` are the halves of ``gate_up_proj``, ``w2`` is ``down_proj``; weights without optimizer state are
    in a file for each expert. ``names``: all in the module; the router's in the model is there beside ``router``.
    """
    renamed: dict[str, str] = {}
    whole = dict(tensors)
    for layer in layers:
        path, prefix, number = layer["module_path"], layer["expert_key_prefix"], int(layer["num_experts"])
        router = f"{path}.router.gate.weight"
        alias = re.compile(rf"{re.escape(path)}\.(?!router\.)(\w+)\.gate\.weight")
        for match in filter(None, map(alias.fullmatch, names)):
            renamed |= {router: f"{path}.{match[1]}.weight", match.string: f"{path}.{match[1]}.weight"}
        for state in {state for state, name in tensors if name.startswith(f"{prefix}.w")}:
            w1, w2, w3 = (_stacked(whole, state, f"{prefix}.w{i}", number, where) for i in (1, 2, 3))
            if w1 is None or w2 is None:
                continue
            down, up = f"{prefix}.down_proj", f"{prefix}.gate_up_proj"
            whole[state, down] = w2
            whole[state, up] = w1
            if w3 is not None:
                rows = w1.shape[1]
                boxes = [(whole_box(w1.shape), w1), (whole_box(w3.shape, (0, rows, 0)), w3)]
                shape = number, rows + w3.shape[1], w1.shape[2]
                whole[state, up] = JoinedTensor(w1.dtype, shape, boxes).check(f"{state} of {up}", where)
            renamed |= {f"{prefix}.w1": up, f"{prefix}.w2": down, f"{prefix}.w3": up}
    whole = {(state, renamed.get(name, name)): value for (state, name), value in whole.items()}
    return {key: v for key, v in whole.items() if key[0] != "param" or ("master", key[1]) not in whole}, renamed


def _stacked(tensors: Tensors, state: str, name: str, number: int, where: Path) -> Any:
    """Take ``name`` out of ``tensors``: it, or the stack of ``number`` tensors for each expert; None without any."""
    each = [tensors.pop((state, f"{name}.{expert}"), None) for expert in range(number)]
    if not any(each):
        return tensors.pop((state, name), None)
    boxes = []
    for expert, value in enumerate(each):
        if value is None:
            raise CheckpointError(f"{where} lacks expert {expert} of {number} as {state} of {name}")
        one = (1, *value.shape)
        boxes.append((whole_box(one, (expert, *(0 for _ in value.shape))), value._replace(shape=one)))
    first = boxes[0][1]
    return JoinedTensor(first.dtype, (number, *first.shape[1:]), boxes).check(f"{state} of {name}", where)


# -- tensor parallelism ----------------------------------------------------------------------------------------------
def by_patterns(info: Mapping[str, Any], ways: int, where: Path) -> Place:
    """Return the rule that ``universal_checkpoint_info`` tells for ``ways`` tensor-parallel ranks.

    What no pattern matches is joined along the first dimension. Raises CheckpointError where it says nothing.
    """
    maps = [(re.compile(p), entry) for p, entry in ((info.get("affine_map") or {}).get("params") or {}).items()]

    def matches(key: str, name: str) -> bool:
        return any(re.match(pattern, name) for pattern in info.get(key) or ())

    def place(name: str, rank: int, shape: tuple[int, ...]) -> Placed:
        for pattern, entry in maps:
            if pattern.match(name):
                return by_maps({name: entry})(name, rank, shape)
        kinds = ("tp_replicated_parameter_patterns", "pipeline_replicated_parameter_patterns")
        if not shape or any(matches(key, name) for key in (*kinds, "parameter_to_average_patterns")):
            return Placed(name)
        if any(re.match(p, name) for some in info.get("parameter_with_sub_params") or () for p in some["patterns"]):
            raise CheckpointError(
                f"{where} has several weights in {name}, cut one by one, and no map of them; not read"
            )
        dim = 1 if matches("parameter_with_row_parallelism_patterns", name) else 0
        count = 2 if matches("parameter_with_2_sub_params_cat_dim_0", name) else 1
        whole, rows = [*shape], shape[dim] // count
        whole[dim] *= ways
        if matches("vocabulary_parameter_patterns", name):
            whole[dim] = min(whole[dim], int(info.get("original_vocab_size") or whole[dim]))
        boxes = []
        for half in range(count):
            inside, at, size = [0] * len(shape), [0] * len(shape), [*shape]
            inside[dim], at[dim] = half * rows, (half * ways + rank) * rows
            size[dim] = max(0, min(rows, whole[dim] - at[dim]))
            boxes.append(Patch(Region(tuple(at), tuple(size)), Region(tuple(inside), tuple(size))))
        return Placed(name, tuple(whole), boxes)

    return place
