"""Checkpoints written by DeepSpeed 0.19, read where they lie: weights, optimizer state by name, counters, client state.

Only the pickle inside each file is held in memory, and that without its tensors; they are read by range.
"""

import re
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from deepspeed.checkpoint.foreign import optimizer_state, parts
from deepspeed.checkpoint.foreign.optimizer_state import UNNAMED, Piece, Pieces, rows
from deepspeed.checkpoint.foreign.parts import Half
from deepspeed.checkpoint.foreign.unpickle import FileTensor, load_restricted, materialize
from deepspeed.checkpoint.load.source import Described, Key, Wish, outside
from deepspeed.errors import CheckpointError
from deepspeed.zero.regions import Region, Span, runs

_KINDS = {
    "model": re.compile(r"(?:zero_pp_rank_(?P<dp>\d+)_)?mp_rank_(?P<mp>\d+)_model_states\.pt"),
    "optimizer": re.compile(r"(?:bf16_)?zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_?optim_states\.pt"),
    "expert optimizer": re.compile(r"expp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt"),
}
_EXPERT = re.compile(r"(?:layer_\d+_)?expert_\d+_mp_rank_(?P<mp>\d+)_model_states\.pt")
_LAYER = re.compile(r"layer_(?P<layer>\d+)(?:-model_(?P<tp>\d+))?-model_states\.pt")
_EXTRA = "_extra_state"  # how state dicts name what Module.get_extra_state() returned
# What is not the user's at the top level of a model-state file.
_ENGINE_KEYS = {
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"),
    *("shared_params", "lr_scheduler", "data_sampler", "random_ltd", "skipped_steps", "global_steps", "global_samples"),
    *("dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_config", "ds_version"),
    *("num_experts", "ds_autoep_layers", "folding", "universal_checkpoint_info"),
}


class ReferenceSource:
    """``Source`` over files of the reference package. ``kind``: "deepspeed-0.19" or "universal"."""

    def __init__(self, path: Path, groups: Sequence[Sequence[str]] | None) -> None:
        self.path = path
        self.kind = "universal" if (path / "zero").is_dir() else "deepspeed-0.19"
        read = [_read_rank(path, files, groups, universal=self.kind == "universal") for files in _files(path)]
        models, halves = [model for model, _ in read], [half for _, half in read]
        model, (self._pieces, facts) = models[0], halves[0]
        if len(halves) != (count := int(model.get("mp_world_size", 1))):
            raise CheckpointError(f"{path} has state of {len(halves)} model-parallel ranks, but was written by {count}")
        if count > 1 and model.get("ds_autoep_layers"):
            raise CheckpointError(f"{path} has experts of AutoEP that are folded over {count} other ranks; not read")
        if len(halves) > 1 or any(map(_LAYER.fullmatch, _names(path))):
            self._pieces, facts = _join_ranks(path, models, halves)
        self.facts = _facts(model, path) | facts
        if layers := model.get("ds_autoep_layers"):
            self._pieces, renamed = parts.stack_experts(self._pieces, [*model["module"]], materialize(layers), path)
            self.facts["optimizer"] = _one_group(self.facts["optimizer"], renamed)
        named = self.facts["config"].get("optimizer")
        if self.facts["optimizer"]:
            self.facts["optimizer"]["type"] = named.get("type") if isinstance(named, dict) else None
        self.entries = {key: Described(p.dtype, p.shape) for key, p in self._pieces.items()}

    def read(self, key: Key, out: torch.Tensor, *, start: int = 0, region: Region | None = None) -> None:
        """Read as ``Source.read``. Values that were stored in a smaller type are cast."""
        label = f"{key[0]} of {key[1]}"
        if key not in self._pieces:
            raise CheckpointError(f"{self.path} has no {label}")
        pieces = self._pieces[key]
        if wrong := outside(Wish(key, out, start, region), pieces.dtype, pieces.shape):
            raise ValueError(wrong)
        try:
            whole = Span(0, prod(pieces.shape))
            for at, inside, numel in runs(pieces.shape, Span(start, start + out.numel(), region), whole):
                pieces.read(out[at - start : at - start + numel], inside)
        except (CheckpointError, OSError) as error:
            raise CheckpointError(f"{label} cannot be read: {error}") from error

    @property
    def unnamed(self) -> list[str]:
        """Return the placeholder names of unsharded optimizer state whose parameters the files do not tell."""
        return sorted({name for _, name in self._pieces if name.startswith(UNNAMED)})

    def close(self) -> None:
        """Do nothing: files are open only while they are read."""

    def with_groups(self, groups: Sequence[Sequence[str]]) -> "ReferenceSource":
        """Reopen the checkpoint with unsharded optimizer state, numbered in the file, named by ``groups``."""
        return open_reference(self.path, groups=groups) if self.unnamed else self


def open_reference(folder: Path, *, groups: Sequence[Sequence[str]] | None = None) -> ReferenceSource:
    """Open the checkpoint of DeepSpeed 0.19 in ``folder``: of any ZeRO stage, or converted to the universal layout.

    ``groups``: names of the trained parameters of each optimizer group, in order, for unsharded state that has none.
    Raises CheckpointError naming the file or tensor when anything is missing, damaged, or of a kind that is not read.
    """
    try:
        return ReferenceSource(folder, groups)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error}") from error
    except (KeyError, TypeError, AttributeError, ValueError, IndexError, RecursionError) as error:
        raise CheckpointError(f"{folder} is not in DeepSpeed's layout: {type(error).__name__}: {error}") from error


class _Files(NamedTuple):
    """Files of one model-parallel rank: by data-parallel rank, by expert-parallel rank, and by expert."""

    models: list[Path]
    optimizers: list[Path]
    of_experts: list[Path]
    experts: list[Path]


def _names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def _files(folder: Path) -> list[_Files]:
    """Return the paths of the files of each model-parallel rank."""
    names, paths = _names(folder), dict[tuple[str, int], dict[int, Path]]()
    if "offloaded_tensors" in names:
        raise CheckpointError(f"{folder / 'offloaded_tensors'} has swap files of NVMe; these are not read")
    for kind, pattern in _KINDS.items():
        for match in filter(None, map(pattern.fullmatch, names)):
            path, rank = folder / match.string, int(match["dp"] or 0)
            by_rank = paths.setdefault((kind, int(match["mp"])), {})
            if by_rank.setdefault(rank, path) != path:
                raise CheckpointError(f"{folder} holds {path.name} and {by_rank[rank].name} for the same rank")
    for (kind, _), by_rank in paths.items():
        if gaps := [str(rank) for rank in range(len(by_rank)) if rank not in by_rank]:
            raise CheckpointError(f"{folder} lacks the {kind} state file of rank(s) {', '.join(gaps)}")
    ranks = sorted({mp for kind, mp in paths if kind == "model"})
    if not ranks or ranks != list(range(len(ranks))):
        lacking = min(set(range(len(ranks) + 1)) - set(ranks))
        raise CheckpointError(
            f"{folder} is no complete checkpoint of DeepSpeed: no file *mp_rank_{lacking:02d}_model_states.pt"
        )
    experts = [match for match in map(_EXPERT.fullmatch, names) if match is not None]

    def in_order(kind: str, mp: int) -> list[Path]:
        return [path for _, path in sorted(paths.get((kind, mp), {}).items())]

    return [
        _Files(
            in_order("model", mp),
            in_order("optimizer", mp),
            in_order("expert optimizer", mp),
            [folder / match.string for match in experts if int(match["mp"]) == mp],
        )
        for mp in ranks
    ]


def _read_rank(
    path: Path, files: _Files, groups: Sequence[Sequence[str]] | None, *, universal: bool
) -> tuple[dict[str, Any], Half]:
    """Read the files of one model-parallel rank: its model state, and what its expert-parallel ranks hold."""
    models = [_load(file) for file in files.models]
    model, where = models[0], files.models[0]
    model["module"] = dict(model.get("module") or {})
    for file in files.experts:
        model["module"] |= _load(file)
    listed = model.get("param_shapes")
    shapes = [{name: tuple(shape) for name, shape in group.items()} for group in listed or ()]
    if listed is None:
        if files.optimizers:
            reason = f"{where} lists no parameters, but there is {files.optimizers[0].name}"
            raise CheckpointError(f"{reason}; the folder is mixed up")
        tensors, facts = _unsharded(model, files, groups)
    elif universal:
        tensors = {}
        facts = optimizer_state.add_universal(tensors, shapes, model=model, folder=path)
    else:
        if not files.optimizers:
            raise CheckpointError(f"{path} has no optimizer state files; the trained weights lie in them")
        states = [_load(file)["optimizer_state_dict"] for file in files.optimizers]
        counts, many = states[0]["partition_count"], "fp32_flat_groups" in states[0]
        world = max(counts) if isinstance(counts, list) else int(counts)
        for some, of in ((files.optimizers, "optimizer"), (files.models if many else files.optimizers, "model")):
            if len(some) != world:
                raise CheckpointError(f"{path} has {len(some)} {of} state files, but was written by {world} ranks")
        tensors, facts = _sharded(model, states, shapes, files.optimizers)
    shared = facts["shared"] = _shared(model, tensors)
    for (state, name), values in _unoptimised(models, where).items():
        if ("master", name) not in tensors and name not in shared:
            tensors[state, name] = values.check(f"{state} of {name}", path)
    return model, Half(tensors, facts)


def _unsharded(model: dict[str, Any], files: _Files, groups: Sequence[Sequence[str]] | None) -> Half:
    """Read unsharded optimizer state, of which each expert-parallel rank has a file with the state of its experts."""
    states = [_load(file)["optimizer"] for file in files.of_experts] or [model.get("optimizer")]
    if files.of_experts and model.get("ds_autoep_layers"):
        return Half({}, {"optimizer": {}})  # numbered in the order of layers that only AutoEP makes
    local = {prefix: count // len(states) for prefix, count in parts.layers_of([*model["module"]]).items()}
    halves = []
    for rank, state in enumerate(states):
        named = None if groups is None else [parts.own_experts(names, local, rank) for names in groups]
        weights = {n: t for n, t in model["module"].items() if [n] == parts.own_experts([n], local, rank)}
        half = Half({}, {})
        known = {**model, "module": weights, "optimizer": state}
        half.facts.update(optimizer_state.add_unsharded(half.tensors, known, groups=named, where=files.models[0]))
        halves.append(half)
    return parts.join(halves, parts.as_it_is, files.models[0])


def _sharded(
    model: dict[str, Any], states: optimizer_state.States, shapes: optimizer_state.Shapes, where: list[Path]
) -> Half:
    """Read sharded optimizer state. Groups of experts are sharded over the ranks that hold the same ones."""
    config, maps = materialize(model.get("ds_config")) or {}, dict[str, Any]()
    for layer in materialize(model.get("ds_autoep_layers")) or ():
        maps |= layer["affine_maps"]["params"]
    world, numbers = len(states), range(len(shapes))
    ways = [world // count for count in optimizer_state.shard_counts(states[0], len(shapes))]
    tensors, scalars, groups, known = parts.Tensors(), dict[str, Any](), dict[int, Any](), dict[str, Any]()
    for way in sorted(set(ways) or {1}):
        some = [number for number in numbers if ways[number] == way]
        halves = []
        for rank in range(way):
            ranks = range(rank, world, way)
            if config.get("use_data_before_expert_parallelism"):
                ranks = range(rank * world // way, (rank + 1) * world // way)
            shards = [states[r] for r in ranks]
            if len(some) < len(shapes):
                shards = [optimizer_state.with_parts(state, some) for state in shards]
            half, files = Half({}, {}), [where[r] for r in ranks]
            half.facts.update(optimizer_state.add_sharded(half.tensors, shards, [shapes[n] for n in some], where=files))
            halves.append(half)
        place = parts.by_maps(maps) if maps else parts.number_experts([name for n in some for name in shapes[n]])
        joined, known = parts.join(halves, place, where[0].parent)
        tensors |= joined
        scalars |= known["optimizer"].get("scalars", {})
        listed = known["optimizer"].get("groups", ())
        of_groups: Sequence[int] = range(len(listed))  # all of them, where nothing is in parts
        if len(some) < len(shapes):
            of_groups = optimizer_state.groups_of(states[0], some)
        groups |= dict(zip(of_groups, listed, strict=False))
    in_order = [group for _, group in sorted(groups.items())]
    return Half(tensors, {**known, "optimizer": {"groups": in_order, "scalars": scalars}})


def _load(path: Path) -> dict[str, Any]:
    if not isinstance(state := load_restricted(path), dict):
        raise CheckpointError(f"{path} holds a {type(state).__name__}, not the state of a model or optimizer")
    return state


def _facts(model: dict[str, Any], where: Path) -> dict[str, Any]:
    """Return the contents of a model-state file besides its tensors, as facts of a ``Source``."""
    if "module" not in model or "global_steps" not in model:
        raise CheckpointError(f"{where} is no model state of DeepSpeed: it lacks its key 'module' or 'global_steps'")
    config = materialize(model.get("ds_config")) or {}
    extra = {n: v for n, v in model["module"].items() if n.endswith(_EXTRA)}
    engine = {name: int(model.get(name) or 0) for name in ("global_steps", "global_samples", "skipped_steps")}
    # Not stored; a save is between two steps, so every one of them had all its micro-steps.
    engine["micro_steps"] = engine["global_steps"] * int(config.get("gradient_accumulation_steps") or 1)
    return {
        "saved": {"deepspeed": str(model.get("ds_version"))},
        "engine": engine,
        "lr_scheduler": materialize(model.get("lr_scheduler")),
        "loss_scaler": None,
        "client_state": {key: materialize(value) for key, value in model.items() if key not in _ENGINE_KEYS},
        "ranks": [],
        "config": config,
        "extra_state": {n.removesuffix(_EXTRA).removesuffix("."): materialize(v) for n, v in extra.items()},
        "world": {"size": int(model.get("dp_world_size", 1)) * int(model.get("mp_world_size", 1))},
    }


def _layers(folder: Path, place: parts.Place) -> parts.Tensors:
    """Read the weights in the files of a pipeline's layers, by the names of ``PipelineModule``."""
    by_rank: dict[int, Half] = {}
    for match in filter(None, map(_LAYER.fullmatch, _names(folder))):
        half = by_rank.setdefault(int(match["tp"] or 0), Half({}, {"optimizer": {}}))
        for name, stored in _load(folder / match.string).items():
            if isinstance(stored, FileTensor):
                half.tensors["param", f"{int(match['layer'])}.{name}"] = Pieces.of(stored)
    return parts.join([by_rank[rank] for rank in sorted(by_rank)], place, folder).tensors if by_rank else {}


def _join_ranks(path: Path, models: list[dict[str, Any]], ranks: list[Half]) -> Half:
    """Join what model-parallel ranks hold: those of a stage have parts of parameters, stages have some each."""
    first, by_names = models[0], dict[Any, list[Half]]()
    ways = int((first.get("checkpoint_parallel_dimensions") or {}).get("tp_degree") or 0)
    for number, (model, rank) in enumerate(zip(models, ranks, strict=True)):
        listed = model.get("param_shapes")
        names = number // ways if listed is None and ways else str([list(group) for group in listed or ()])
        by_names.setdefault(names, []).append(rank)
    ways = max(map(len, by_names.values()))
    info = materialize(first.get("universal_checkpoint_info"))
    if ways > 1 and not info:
        raise CheckpointError(
            f"{path} is of a model that {ways} tensor-parallel ranks cut, and nothing in it tells how (it has no "
            "universal_checkpoint_info); gather the weights with the program that wrote it, or convert it there"
        )
    place = parts.by_patterns(info, ways, path) if ways > 1 else parts.as_it_is
    layers = _layers(path, place)
    if layers and first.get("param_shapes") is None:  # state that is numbered within a stage
        return Half(layers, {"optimizer": {}, "shared": {}})
    if (path / "zero").is_dir():  # optimizer state was joined when it was converted
        place = parts.unless({name for rank in ranks for state, name in rank.tensors if state == "master"}, place)
    whole = parts.join([parts.join(of_one, place, path) for of_one in by_names.values()], parts.as_it_is, path)
    shared = whole.facts["shared"]
    shared |= _tied(layers, whole.tensors)
    for key, value in layers.items():
        if key[1] not in shared and ("master", key[1]) not in whole.tensors:
            whole.tensors[key] = value
    return whole


def _tied(layers: parts.Tensors, joined: parts.Tensors) -> dict[str, str]:
    """Map weights in the files of a pipeline's layers to those of ``tied_modules``, which are written with each use."""
    prefix = re.compile(r"tied_modules\.[^.]+\.")
    tied: dict[str, dict[str, str]] = {}
    for state, name in joined:
        if state == "master" and (match := prefix.match(name)):
            tied.setdefault(match[0], {})[name.removeprefix(match[0])] = name
    aliases: dict[str, str] = {}
    for number in {name.partition(".")[0] for _, name in layers}:
        uses = {n.partition(".")[2]: value for (_, n), value in layers.items() if n.startswith(f"{number}.")}
        for names in tied.values():
            if all(rest in names and _alike(value, joined["master", names[rest]]) for rest, value in uses.items()):
                aliases |= {f"{number}.{rest}": names[rest] for rest in uses}
    return aliases


def _alike(weight: Pieces, master: Pieces) -> bool:
    """Tell whether the first values of ``weight`` are those of ``master``, rounded."""
    if weight.shape != master.shape:
        return False
    one, two = (torch.empty(min(prod(weight.shape), 4096), dtype=weight.dtype, device="cpu") for _ in range(2))
    weight.read(one, 0)
    master.read(two, 0)
    return torch.equal(one, two)


def _one_group(optimizer: dict[str, Any], renamed: Mapping[str, str]) -> dict[str, Any]:
    """Return the facts of AutoEP's optimizer state with the names of the model and without its groups of experts."""
    groups: list[dict[str, Any]] = []
    for group in optimizer.get("groups", ()):
        options = {key: value for key, value in group["options"].items() if key not in ("name", "moe")}
        names = list(dict.fromkeys(renamed.get(name, name) for name in group["names"]))
        same = [other for other in groups if group["options"].get("moe") and other["options"] == options]
        if same:
            same[0]["names"] += names
        else:
            groups.append({"names": names, "options": options})
    scalars = {renamed.get(name, name): values for name, values in optimizer.get("scalars", {}).items()}
    return {"groups": groups, "scalars": scalars} if groups else {}


def _shared(model: dict[str, Any], pieces: Mapping[Key, Any]) -> dict[str, str]:
    """Map each alias to the weight it is tied to: as recorded, else where both are one tensor in the file."""
    shared = {str(alias): str(name) for alias, name in (model.get("shared_params") or {}).items()}
    first: dict[tuple[Any, ...], str] = {}
    buffers = set(model.get("buffer_names") or ())
    weights = {n: t for n, t in model["module"].items() if isinstance(t, FileTensor) and t.numel and n not in buffers}
    # The name that has optimizer state is the real one.
    for name in sorted(weights, key=lambda name: ("master", name) not in pieces):
        real = first.setdefault(weights[name].place, name)
        if real != name:
            shared.setdefault(name, real)
    return shared


def _unoptimised(models: list[dict[str, Any]], where: Path) -> dict[Key, Pieces]:
    """Collect buffers, frozen parameters, and trained ones in the model's dtype (unused where a master exists)."""
    model, values = models[0], dict[Key, Pieces]()
    buffers = set(model.get("buffer_names") or ())
    sliced = where.name.startswith("zero_pp_rank")  # parameters in the module are empty then
    for name, stored in model["module"].items():
        if isinstance(stored, FileTensor) and not name.endswith(_EXTRA) and (name in buffers or not sliced):
            values["buffer" if name in buffers else "param", name] = Pieces.of(stored)
    for name, shape in (model.get("frozen_param_shapes") or {}).items() if sliced else ():
        slices = rows([(name, prod(shape))], 0, len(models))
        stored = [(m.get("frozen_param_fragments") or {}).get(name) for m in models]
        parts = [Piece(s.lo, s.hi, stored[s.rank]) for s in slices if stored[s.rank] is not None]
        values["param", name] = Pieces(parts[0].stored.dtype if parts else torch.float32, tuple(shape), parts)
    return values
