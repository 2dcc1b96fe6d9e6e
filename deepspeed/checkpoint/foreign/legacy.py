"""Checkpoints written by DeepSpeed 0.19, read where they lie: weights, optimizer state by name, counters, client state.

Only the pickle inside each file is held in memory, and that without its tensors; they are read by range.
"""

import re
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch

from deepspeed.checkpoint.foreign import optimizer_state
from deepspeed.checkpoint.foreign.optimizer_state import UNNAMED, Piece, Pieces, rows
from deepspeed.checkpoint.foreign.unpickle import FileTensor, load_restricted, materialize
from deepspeed.checkpoint.load.source import Described, Key, Wish, outside
from deepspeed.errors import CheckpointError
from deepspeed.zero.regions import Region, Span, runs

_KINDS = {
    "model": re.compile(r"(?:zero_pp_rank_(?P<dp>\d+)_)?mp_rank_(?P<mp>\d+)_model_states\.pt"),
    "optimizer": re.compile(r"(?:bf16_)?zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_?optim_states\.pt"),
}
_OTHER = re.compile(
    r"offloaded_tensors"
    r"|(layer_\d+.*-model_states|.*expert_\d+_mp_rank_\d+_model_states|expp_rank_\d+_mp_rank_\d+_optim_states)\.pt"
)
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
        self.path, self._pieces = path, dict[Key, Pieces]()
        self.kind = "universal" if (path / "zero").is_dir() else "deepspeed-0.19"
        model_files, optim_files = _files(path)
        models = [_load(file) for file in model_files]
        self.facts = _facts(models[0], model_files[0])
        listed = models[0].get("param_shapes")
        shapes = [{name: tuple(shape) for name, shape in group.items()} for group in listed or ()]
        if listed is None:
            if optim_files:
                reason = f"{model_files[0]} lists no parameters, but there is {optim_files[0].name}"
                raise CheckpointError(f"{reason}; the folder is mixed up")
            more = optimizer_state.add_unsharded(self._pieces, models[0], groups=groups, where=model_files[0])
        elif self.kind == "universal":
            more = optimizer_state.add_universal(self._pieces, shapes, model=models[0], folder=path)
        else:
            if not optim_files:
                raise CheckpointError(f"{path} has no optimizer state files; the trained weights lie in them")
            states = [_load(file)["optimizer_state_dict"] for file in optim_files]
            counts, many = states[0]["partition_count"], "fp32_flat_groups" in states[0]
            world = max(counts) if isinstance(counts, list) else int(counts)
            for files, of in ((optim_files, "optimizer"), (model_files if many else optim_files, "model")):
                if len(files) != world:
                    raise CheckpointError(f"{path} has {len(files)} {of} state files, but was written by {world} ranks")
            more = optimizer_state.add_sharded(self._pieces, states, shapes, where=optim_files)
        named = self.facts["config"].get("optimizer")
        more["optimizer"]["type"] = named.get("type") if isinstance(named, dict) else None
        self.facts |= more
        shared = self.facts["shared"] = _shared(models[0], self._pieces)
        for (state, name), values in _unoptimised(models, model_files[0]).items():
            if ("master", name) not in self._pieces and name not in shared:
                self._pieces[state, name] = values.check(f"{state} of {name}", path)
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


def _files(folder: Path) -> list[list[Path]]:
    """Return the paths of the model-state files and of the optimizer-state files, each by rank."""
    names, by_kind = sorted(p.name for p in folder.iterdir()), list[list[Path]]()
    if other := next(filter(_OTHER.fullmatch, names), ""):
        raise CheckpointError(f"{folder / other} is of a pipeline or of experts, or swap files of NVMe; not read")
    for kind, pattern in _KINDS.items():
        by_rank: dict[int, Path] = {}
        for match in filter(None, map(pattern.fullmatch, names)):
            path, rank = folder / match.string, int(match["dp"] or 0)
            if int(match["mp"]):
                raise CheckpointError(f"{path} is of a model cut by tensor or pipeline parallelism, which is not read")
            if by_rank.setdefault(rank, path) != path:
                raise CheckpointError(f"{folder} holds {path.name} and {by_rank[rank].name} for the same rank")
        if gaps := [str(rank) for rank in range(len(by_rank)) if rank not in by_rank]:
            raise CheckpointError(f"{folder} lacks the {kind} state file of rank(s) {', '.join(gaps)}")
        by_kind.append([by_rank[rank] for rank in range(len(by_rank))])
    if not by_kind[0]:
        raise CheckpointError(f"{folder} is no complete checkpoint of DeepSpeed: no file *mp_rank_00_model_states.pt")
    return by_kind


def _load(path: Path) -> dict[str, Any]:
    if not isinstance(state := load_restricted(path), dict):
        raise CheckpointError(f"{path} holds a {type(state).__name__}, not the state of a model or optimizer")
    return state


def _facts(model: dict[str, Any], where: Path) -> dict[str, Any]:
    """Return the contents of a model-state file besides its tensors, as facts of a ``Source``."""
    if int(model.get("mp_world_size", 1)) != 1:
        raise CheckpointError(f"{where} is of a model cut over {model['mp_world_size']} ranks, which is not read")
    if model.get("module") is None or "global_steps" not in model:
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
        "world": {"size": int(model.get("dp_world_size", 1))},
    }


def _shared(model: dict[str, Any], pieces: Mapping[Key, Pieces]) -> dict[str, str]:
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
