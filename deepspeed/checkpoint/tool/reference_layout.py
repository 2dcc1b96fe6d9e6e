"""``export --format deepspeed``: DeepSpeed's own layout, for going back to it. Holds one of its files at a time.

A level is DeepSpeed's number for what is sharded: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too.
"""

import pickle
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from deepspeed.checkpoint.foreign import cuts
from deepspeed.checkpoint.foreign.cuts import Slice
from deepspeed.checkpoint.format import names
from deepspeed.checkpoint.format.folders import check_tag, finished, write_latest
from deepspeed.checkpoint.load.source import Source, whole
from deepspeed.checkpoint.save.client_files import write_script
from deepspeed.checkpoint.save.writer import progress
from deepspeed.checkpoint.weights.weights import (
    block_of,
    compute_dtype,
    shared_names,
    stream,
    weight_keys,
    with_aliases,
)
from deepspeed.errors import CheckpointError
from deepspeed.version import __version__

_SUB_GROUP = 1_000_000_000


class _Stored(Namespace):
    """Pickles as an instance of the class of DeepSpeed that its subclass stands for."""


def _stand_in(module: str, name: str, **members: Any) -> Any:
    return type(name, (_Stored,), {"__module__": module, **members})


_LossScaler = _stand_in("deepspeed.runtime.fp16.loss_scaler", "LossScaler")
_DynamicLossScaler = _stand_in("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler")
_FragmentAddress = _stand_in("deepspeed.utils.tensor_fragment", "fragment_address")
_Level = _stand_in(
    "deepspeed.runtime.zero.config", "ZeroStageEnum", __reduce__=lambda self: (type(self), (self.number,))
)


class _Pickler(pickle._Pickler):
    """The Python pickler: the compiled one insists on importing every class under the name it writes."""

    def save_global(self, obj: Any, name: str | None = None) -> None:
        if not (isinstance(obj, type) and issubclass(obj, _Stored)):
            super().save_global(obj, name)  # type: ignore[misc]
            return
        self.write(pickle.GLOBAL + f"{obj.__module__}\n{obj.__name__}\n".encode())  # type: ignore[attr-defined]
        self.memoize(obj)  # type: ignore[attr-defined]


class Layout:
    """What is to be written, and for how many ranks."""

    def __init__(self, source: Source, level: int | None, world: int, *, exclude_frozen: bool) -> None:
        facts, entries = source.facts, source.entries
        self.source, self.world, self.facts = source, world, facts
        self.dtype, self.config = compute_dtype(facts), dict(facts.get("config") or {})
        self.zero, self.scaler = block_of(self.config, "zero_optimization"), facts.get("loss_scaler") or {}
        self.level = int(self.zero.get("stage") or 0) if level is None else level
        self.scalars: dict[str, dict[str, Any]] = facts["optimizer"].get("scalars") or {}
        self.options = [dict(group["options"]) for group in facts["optimizer"]["groups"]]
        self.listed = [list(group["names"]) for group in facts["optimizer"]["groups"]]
        self.keys = weight_keys(source, exclude_frozen=exclude_frozen)
        self.frozen = {name: torch.Size(entries[s, name].shape) for s, name in self.keys if s == "param"}
        self.exclude_frozen = exclude_frozen
        self.shapes = {key[1]: torch.Size(d.shape) for key, d in entries.items() if key[0] == "master"}
        # In flattening order, less the frozen ones, which an optimizer of the user may list.
        self.groups = [[(n, prod(self.shapes[n])) for n in group if n in self.shapes] for group in self.listed]
        self.slots = list(dict.fromkeys(k[0].removeprefix("optim.") for k in entries if k[0].startswith("optim.")))
        self._cut()

    def _cut(self) -> None:
        """``slices``: what lies in the flat tensors, by rank and part, and ``lengths``: how long each is. There is one
        per group (levels 1, 2) or ``runs``, sub-groups of each group (3).
        """
        limit = int(float(self.zero.get("sub_group_size") or _SUB_GROUP))
        self.runs = [cuts.sub_groups(g, self.world, limit) if self.level == 3 else [g] for g in self.groups]
        self.slices: dict[tuple[int, int], list[Slice]] = {}
        self.lengths: list[int] = []
        for part, run in enumerate(run for runs in self.runs for run in runs):
            if self.level == 3:
                self.lengths.append(sum(cuts.row_width(numel, self.world) for _, numel in run))
                slices = cuts.rows(run, part, self.world)
            else:
                self.lengths.append(cuts.column_width(run, self.world))
                slices = cuts.columns(run, part, width=self.lengths[part], world=self.world)
            for s in slices:
                self.slices.setdefault((s.rank, part), []).append(s)

    def refuse(self) -> None:
        """Raise CheckpointError for what DeepSpeed's sharded files cannot hold."""
        entries = self.source.entries
        odd = [k for k in entries if k[0].startswith(("opaque.", "part."))]
        odd += [k for k, d in entries.items() if k[0].startswith("optim.") and d.shape != entries["master", k[1]].shape]
        if odd and self.level:
            raise CheckpointError(
                f"{odd[0][0]} of {odd[0][1]} (and {len(odd) - 1} more) has not the shape of its parameter, which "
                "DeepSpeed's sharded layout cannot hold; export with --stage 0"
            )
        if self.level in (1, 2) and self.zero.get("round_robin_gradients"):
            # Weights in the wrong order would load without a word.
            raise CheckpointError(
                "under round_robin_gradients DeepSpeed's order of parameters depends on the machine; export with "
                "--stage 3 or 0"
            )

    def values(self, state: str, rank: int, part: int, *, padding: int = 0) -> torch.Tensor:
        """A flat tensor of ``state`` without its last ``padding`` elements, zeros where nothing is stored."""
        out = torch.zeros(self.lengths[part] - padding, dtype=torch.float32)
        for s in self.slices.get((rank, part), []):
            if (state, s.name) in self.source.entries:
                values = stream(self.source, (state, s.name), dtype=torch.float32)
                values.read(s.lo, out[s.at : s.at + s.hi - s.lo])
        return out


def _scaler(layout: Layout) -> Any:
    state, block = layout.scaler, block_of(layout.config, "fp16")
    scale, hysteresis = float(state.get("cur_scale", 1.0)), int(block.get("hysteresis", 2))
    if not state.get("dynamic"):
        return _LossScaler(cur_scale=scale, dynamic=False)
    return _DynamicLossScaler(
        cur_scale=scale,
        cur_iter=int(state.get("cur_iter", 0)),
        last_overflow_iter=int(state.get("last_overflow_iter", -1)),
        scale_factor=2.0,
        scale_window=int(block.get("loss_scale_window", 1000)),
        min_scale=block.get("min_loss_scale", 1),
        delayed_shift=hysteresis,
        cur_hysteresis=int(state.get("cur_hysteresis", hysteresis)),
        consecutive_hysteresis=bool(block.get("consecutive_hysteresis", False)),
        raise_error_at_min_scale=True,
        dynamic=True,
        dtype=torch.float16,
    )


def _flat_state(layout: Layout, rank: int) -> dict[str, Any]:
    """The optimizer's own state dict over flat tensors."""
    any_scalars = next((layout.scalars.get(name, {}) for group in layout.groups for name, _ in group), {})
    state: dict[int, dict[str, Any]] = {}
    for part in range(len(layout.lengths)):
        slices = layout.slices.get((rank, part))
        state[part] = dict(layout.scalars.get(slices[0].name, {}) if slices else any_scalars)
        state[part] |= {slot: layout.values(f"optim.{slot}", rank, part) for slot in layout.slots}
    numbers = iter(state)
    pairs = zip(layout.options, layout.runs, strict=True)
    return {"state": state, "param_groups": [{**o, "params": [next(numbers) for _ in runs]} for o, runs in pairs]}


def _optim_file(layout: Layout, rank: int) -> dict[str, Any]:
    """Contents of a rank's optimizer-state file."""
    state, parts, world = _flat_state(layout, rank), range(len(layout.lengths)), layout.world
    inner: dict[str, Any] = {
        "zero_stage": _Level(number=layout.level),
        "loss_scaler": _scaler(layout),
        "overflow": False,
        "dynamic_loss_scale": bool(layout.scaler.get("dynamic")),
    }
    if layout.level == 3:
        masters = [layout.values("master", rank, part) for part in parts]
        inner |= {"partition_count": world, "optimizer_state_dict": state, "fp32_flat_groups": masters}
    else:
        # DeepSpeed has a wrapper for this, whose files differ.
        accumulation = block_of(layout.config, "data_types").get("grad_accum_dtype")
        wrapper = layout.level == 1 and layout.dtype == torch.bfloat16 and accumulation in ("fp32", "float32")
        # Elements at the end of a column that are none of the group's.
        ends = zip(layout.lengths, layout.groups, strict=True)
        paddings = [max(0, min(width, (rank + 1) * width - sum(n for _, n in group))) for width, group in ends]
        masters = [layout.values("master", rank, p, padding=0 if wrapper else paddings[p]) for p in parts]
        gaps = {"param_alignment_paddings": [[0] * len(group) for group in layout.groups]}
        inner = {} if wrapper else {**inner, **gaps}
        slices = [layout.slices.get((rank, part), []) for part in parts]
        inner |= {
            "clip_grad": float(layout.config.get("gradient_clipping") or 1.0),
            "base_optimizer_state": state,
            "single_partition_of_fp32_groups": masters,
            "group_paddings": paddings,
            "partition_count": [world] * len(parts),
            "ds_version": __version__,
            "param_slice_mappings": [
                OrderedDict((s.name, _FragmentAddress(numel=s.hi - s.lo, start=s.at)) for s in of_part)
                for of_part in slices
            ],
        }
    return {"optimizer_state_dict": inner, "ds_config": layout.config, "ds_version": __version__}


def _module(layout: Layout) -> dict[str, torch.Tensor]:
    """The model's state dict; without values at level 3, buffers excepted."""
    state: dict[str, torch.Tensor] = OrderedDict()
    for key in layout.keys:
        dtype = layout.dtype if key[0] == "master" else layout.source.entries[key].dtype
        empty = layout.level == 3 and key[0] != "buffer"
        state[key[1]] = torch.empty(0, dtype=dtype) if empty else stream(layout.source, key, dtype=dtype).whole()
    return with_aliases(state, shared_names(layout.source))


def _fragment(layout: Layout, name: str, rank: int) -> torch.Tensor:
    """What a rank holds of a frozen parameter."""
    key, numel = ("param", name), prod(layout.frozen[name])
    if layout.level < 3:
        return whole(layout.source, key)
    out = torch.zeros(cuts.row_width(numel, layout.world), dtype=layout.source.entries[key].dtype)
    for s in cuts.rows([(name, numel)], 0, layout.world):
        if s.rank == rank:
            layout.source.read(key, out[: s.hi - s.lo], start=s.lo)
    return out


def _whole_state(layout: Layout) -> dict[str, Any]:
    """Level 0: state over whole parameters, wrapped where DeepSpeed keeps fp32 copies of a low-precision model."""
    source = layout.source
    trained = [[name for name, _ in group] for group in layout.groups]
    # torch's own state dict counts frozen ones too
    members = layout.listed if layout.dtype == torch.float32 else trained
    number = {name: i for i, name in enumerate(name for group in members for name in group)}
    state = {}
    for name in (name for group in trained for name in group):
        slots = [slot for slot in layout.slots if (f"optim.{slot}", name) in source.entries]
        tensors = {slot: whole(source, (f"optim.{slot}", name)) for slot in slots}
        state[number[name]] = {**layout.scalars.get(name, {}), **tensors}
    # torch keeps the names beside the numbers; readers that must name the state find them there.
    pairs = zip(layout.options, members, strict=True)
    groups = [{**options, "params": [number[n] for n in group], "param_names": group} for options, group in pairs]
    inner = {"state": state, "param_groups": groups}
    if layout.dtype == torch.float32:
        return inner
    steps = (layout.facts.get("engine") or {}).get("global_steps", 0)
    known = {**vars(_scaler(layout)), "cur_iter": int(layout.scaler.get("cur_iter", steps))}
    kept = ("last_overflow_iter", "scale_factor", "scale_window") if known["dynamic"] else ()
    return {
        "dynamic_loss_scale": known["dynamic"],
        **{name: known[name] for name in ("cur_scale", "cur_iter", *kept)},
        "optimizer_state_dict": inner,
        "fp32_groups": [[whole(source, ("master", name)) for name in group] for group in members],
    }


def _model_file(layout: Layout, rank: int) -> dict[str, Any]:
    """Contents of a rank's model-state file."""
    facts, sharded = layout.facts, layout.level > 0
    engine, frozen = facts.get("engine") or {}, layout.level >= 2 and not layout.exclude_frozen
    shapes = [OrderedDict((n, layout.shapes[n]) for n, _ in group) for group in layout.groups]
    fragments = OrderedDict((name, _fragment(layout, name, rank)) for name in (layout.frozen if frozen else ()))
    return {
        **(facts.get("client_state") or {}),
        "module": _module(layout),
        "buffer_names": [name for state, name in layout.source.entries if state == "buffer"],
        "optimizer": None if sharded else _whole_state(layout),
        "param_shapes": shapes if sharded else None,
        "frozen_param_shapes": OrderedDict(layout.frozen) if frozen else None,
        "shared_params": (shared_names(layout.source) if rank == 0 else {}) if sharded else None,
        "frozen_param_fragments": fragments if frozen else None,
        "lr_scheduler": facts.get("lr_scheduler"),
        "data_sampler": None,
        "random_ltd": None,
        **{name: int(engine.get(name) or 0) for name in ("skipped_steps", "global_steps", "global_samples")},
        "dp_world_size": layout.world,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": layout.config,
        "ds_version": __version__,
    }


def _files(layout: Layout) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Names, and functions that make the contents."""
    for rank in range(layout.world if layout.level == 3 else 1):
        prefix = f"{names.ZERO_FILE_PREFIX}{rank}_" if layout.level == 3 else ""
        yield f"{prefix}{names.MODEL_FILE_PREFIX}00{names.MODEL_FILE_SUFFIX}", partial(_model_file, layout, rank)
    start = names.BF16_ZERO_FILE_PREFIX if layout.dtype == torch.bfloat16 else names.ZERO_FILE_PREFIX
    for rank in range(layout.world if layout.level else 0):
        name = f"{start}{rank}_{names.MODEL_FILE_PREFIX}00{names.OPTIM_FILE_SUFFIX}"
        yield name, partial(_optim_file, layout, rank)


def write(source: Source, out: Path, *, level: int | None, world: int, exclude_frozen: bool) -> Path:
    """Write ``source`` into ``out`` as DeepSpeed would with ``world`` ranks, ``level`` None: its own; the tag's folder.

    Raises CheckpointError when there is no optimizer, or state that the layout cannot hold; OSError.
    """
    if not (source.facts.get("optimizer") or {}).get("groups"):
        raise CheckpointError(
            f"{source.path} holds no optimizer, which DeepSpeed's layout needs; export the weights with --format torch"
        )
    layout = Layout(source, level, world, exclude_frozen=exclude_frozen)
    layout.refuse()
    folder = out / check_tag(source.path.name)
    folder.mkdir(parents=True, exist_ok=True)
    files = dict(_files(layout))
    with progress("export", len(files)) as advance:
        for name, make in files.items():
            with finished(folder / name) as path:
                torch.save(make(), path, pickle_module=SimpleNamespace(__name__="pickle", Pickler=_Pickler))
            advance(1)
    write_script(out)
    write_latest(out, folder.name)
    return folder
