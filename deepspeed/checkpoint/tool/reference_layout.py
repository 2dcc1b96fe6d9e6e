"""``export --format deepspeed``: DeepSpeed's own layout, for going back to it. Holds one of its files at a time.

A level is DeepSpeed's number for what is sharded: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too.
"""

import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from deepspeed.checkpoint.foreign import cuts
from deepspeed.checkpoint.foreign.cuts import Slice
from deepspeed.checkpoint.format import names
from deepspeed.checkpoint.format.folders import check_tag, write_latest
from deepspeed.checkpoint.load.source import Source, whole
from deepspeed.checkpoint.save.client_files import write_script
from deepspeed.checkpoint.save.writer import progress
from deepspeed.checkpoint.weights.weights import (
    block_of,
    compute_dtype,
    finished,
    shared_names,
    stream,
    weight_keys,
    with_aliases,
)
from deepspeed.errors import CheckpointError
from deepspeed.version import __version__

_SUB_GROUP = 1_000_000_000


class _Named:
    """An instance of the class of DeepSpeed that ``name`` names: pickles as that with these attributes."""

    name = ""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class ConstantScale(_Named):
    name = "deepspeed.runtime.fp16.loss_scaler LossScaler"


class OverflowScale(_Named):
    name = "deepspeed.runtime.fp16.loss_scaler DynamicLossScaler"


class FragmentAddress(_Named):
    name = "deepspeed.utils.tensor_fragment fragment_address"


class Level(_Named):
    name = "deepspeed.runtime.zero.config ZeroStageEnum"
    number = 0

    def __reduce__(self) -> tuple[type, tuple[int]]:
        return (Level, (self.number,))


class _Pickler(pickle._Pickler):
    """The Python pickler: the compiled one insists on importing every class under the name it writes."""

    def save_global(self, obj: Any, name: str | None = None) -> None:
        if not (isinstance(obj, type) and issubclass(obj, _Named)):
            super().save_global(obj, name)  # type: ignore[misc]
            return
        self.write(pickle.GLOBAL + obj.name.replace(" ", "\n").encode() + b"\n")  # type: ignore[attr-defined]
        self.memoize(obj)  # type: ignore[attr-defined]


@dataclass
class Layout:
    """What is to be written, and for how many ranks."""

    source: Source
    level: int
    world: int
    exclude_frozen: bool = False

    def __post_init__(self) -> None:
        facts = self.source.facts
        self.dtype, self.config = compute_dtype(facts), dict(facts.get("config") or {})
        self.zero, self.scaler = block_of(self.config, "zero_optimization"), facts.get("loss_scaler") or {}
        self.scalars: dict[str, dict[str, Any]] = facts["optimizer"].get("scalars") or {}
        self.options = [dict(group["options"]) for group in facts["optimizer"]["groups"]]
        self.listed = [list(group["names"]) for group in facts["optimizer"]["groups"]]
        self.shapes = {key[1]: torch.Size(d.shape) for key, d in self.source.entries.items() if key[0] == "master"}
        # In flattening order, less the frozen ones, which an optimizer of the user may list.
        self.groups = [[(n, prod(self.shapes[n])) for n in group if n in self.shapes] for group in self.listed]
        limit = int(float(self.zero.get("sub_group_size") or _SUB_GROUP))
        self.runs = [cuts.sub_groups(group, self.world, limit) for group in self.groups]
        keys = weight_keys(self.source, exclude_frozen=self.exclude_frozen)
        self.frozen = [key for key in keys if key[0] == "param"]

    @cached_property
    def slots(self) -> list[str]:
        """Optimizer slots. Raises CheckpointError for those of another shape than their parameter's."""
        entries = self.source.entries
        odd = [k for k in entries if k[0].startswith(("opaque.", "part."))]
        odd += [k for k, d in entries.items() if k[0].startswith("optim.") and d.shape != entries["master", k[1]].shape]
        if odd and self.level:
            raise CheckpointError(
                f"{odd[0][0]} of {odd[0][1]} (and {len(odd) - 1} more) has not the shape of its parameter, which "
                "DeepSpeed's sharded layout cannot hold; export with --stage 0"
            )
        return list(dict.fromkeys(k[0].removeprefix("optim.") for k in entries if k[0].startswith("optim.")))

    @cached_property
    def lengths(self) -> list[int]:
        """Elements of every flat tensor of a rank: one per group (levels 1, 2) or sub-group (3)."""
        if self.level < 3:
            return [cuts.column_width(group, self.world) for group in self.groups]
        return [sum(cuts.row_width(n, self.world) for _, n in run) for runs in self.runs for run in runs]

    @cached_property
    def slices(self) -> dict[tuple[int, int], list[Slice]]:
        """What lies in the flat tensors, by rank and part."""
        slices: list[Slice] = []
        if self.level < 3:
            for part, (group, width) in enumerate(zip(self.groups, self.lengths, strict=True)):
                slices += cuts.columns(group, part, width=width, world=self.world)
        else:
            for part, run in enumerate(run for runs in self.runs for run in runs):
                slices += cuts.rows(run, part, self.world)
        by_part: dict[tuple[int, int], list[Slice]] = {}
        for s in slices:
            by_part.setdefault((s.rank, s.part), []).append(s)
        return by_part

    def padding(self, rank: int, part: int) -> int:
        """How many of the last elements of a column are none of the group's."""
        width = self.lengths[part]
        return max(0, min(width, (rank + 1) * width - sum(numel for _, numel in self.groups[part])))

    def values(self, state: str, rank: int, part: int, *, padding: int = 0) -> torch.Tensor:
        """A flat tensor of ``state`` without its last ``padding`` elements, zeros where nothing is stored."""
        out = torch.zeros(self.lengths[part] - padding, dtype=torch.float32)
        for name, lo, hi, _, _, at in self.slices.get((rank, part), []):
            if (state, name) in self.source.entries:
                stream(self.source, (state, name), dtype=torch.float32).read(lo, out[at : at + hi - lo])
        return out


def _scaler(layout: Layout) -> _Named:
    state, block = layout.scaler, block_of(layout.config, "fp16")
    scale, hysteresis = float(state.get("cur_scale", 1.0)), int(block.get("hysteresis", 2))
    if not state.get("dynamic"):
        return ConstantScale(cur_scale=scale, dynamic=False)
    return OverflowScale(
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
    groups: list[dict[str, Any]] = []
    first = 0
    for options, runs in zip(layout.options, layout.runs, strict=True):
        count = len(runs) if layout.level == 3 else 1
        groups.append({**options, "params": list(range(first, first + count))})
        first += count
    return {"state": state, "param_groups": groups}


def _optim_file(layout: Layout, rank: int) -> dict[str, Any]:
    """Contents of a rank's optimizer-state file."""
    state, parts = _flat_state(layout, rank), range(len(layout.lengths))
    inner: dict[str, Any] = {
        "zero_stage": Level(number=layout.level),
        "loss_scaler": _scaler(layout),
        "overflow": False,
    }
    inner["dynamic_loss_scale"] = bool(layout.scaler.get("dynamic"))
    if layout.level == 3:
        masters = [layout.values("master", rank, part) for part in parts]
        inner |= {"partition_count": layout.world, "optimizer_state_dict": state, "fp32_flat_groups": masters}
    else:
        # DeepSpeed has a wrapper for this, whose files differ.
        accumulation = block_of(layout.config, "data_types").get("grad_accum_dtype")
        wrapper = layout.level == 1 and layout.dtype == torch.bfloat16 and accumulation in ("fp32", "float32")
        paddings = [layout.padding(rank, part) for part in parts]
        masters = [layout.values("master", rank, p, padding=0 if wrapper else paddings[p]) for p in parts]
        gaps = {"param_alignment_paddings": [[0] * len(group) for group in layout.groups]}
        inner = {} if wrapper else {**inner, **gaps}
        inner |= {
            "clip_grad": float(layout.config.get("gradient_clipping") or 1.0),
            "base_optimizer_state": state,
            "single_partition_of_fp32_groups": masters,
            "group_paddings": paddings,
            "partition_count": [layout.world] * len(parts),
            "ds_version": __version__,
            "param_slice_mappings": [
                OrderedDict(
                    (s.name, FragmentAddress(numel=s.hi - s.lo, start=s.at)) for s in layout.slices.get((rank, p), [])
                )
                for p in parts
            ],
        }
    return {"optimizer_state_dict": inner, "ds_config": layout.config, "ds_version": __version__}


def _module(layout: Layout) -> dict[str, torch.Tensor]:
    """The model's state dict; without values at level 3, buffers excepted."""
    state: dict[str, torch.Tensor] = OrderedDict()
    for key in weight_keys(layout.source, exclude_frozen=layout.exclude_frozen):
        dtype = layout.dtype if key[0] == "master" else layout.source.entries[key].dtype
        empty = layout.level == 3 and key[0] != "buffer"
        state[key[1]] = torch.empty(0, dtype=dtype) if empty else stream(layout.source, key, dtype=dtype).whole()
    return with_aliases(state, shared_names(layout.source))


def _fragment(layout: Layout, name: str, rank: int) -> torch.Tensor:
    """What a rank holds of a frozen parameter."""
    key = ("param", name)
    described = layout.source.entries[key]
    if layout.level < 3:
        return whole(layout.source, key)
    numel = prod(described.shape)
    out = torch.zeros(cuts.row_width(numel, layout.world), dtype=described.dtype)
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
        state[number[name]] = {
            **layout.scalars.get(name, {}),
            **{slot: whole(source, (f"optim.{slot}", name)) for slot in slots},
        }
    # torch keeps the names beside the numbers; readers that must name the state find them there.
    pairs = zip(layout.options, members, strict=True)
    groups = [{**options, "params": [number[n] for n in group], "param_names": group} for options, group in pairs]
    inner = {"state": state, "param_groups": groups}
    if layout.dtype == torch.float32:
        return inner
    steps = (source.facts.get("engine") or {}).get("global_steps", 0)
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
    facts, sharded, source = layout.source.facts, layout.level > 0, layout.source
    engine = facts.get("engine") or {}
    shapes = [OrderedDict((n, layout.shapes[n]) for n, _ in group) for group in layout.groups]
    frozen_shapes = fragments = None
    if layout.level >= 2 and not layout.exclude_frozen:
        frozen_shapes = OrderedDict((key[1], torch.Size(source.entries[key].shape)) for key in layout.frozen)
        fragments = OrderedDict((name, _fragment(layout, name, rank)) for _, name in layout.frozen)
    return {
        **(facts.get("client_state") or {}),
        "module": _module(layout),
        "buffer_names": [k[1] for k in source.entries if k[0] == "buffer"],
        "optimizer": None if sharded else _whole_state(layout),
        "param_shapes": shapes if sharded else None,
        "frozen_param_shapes": frozen_shapes,
        "shared_params": (shared_names(source) if rank == 0 else {}) if sharded else None,
        "frozen_param_fragments": fragments,
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
    facts = source.facts
    if not (facts.get("optimizer") or {}).get("groups"):
        raise CheckpointError(
            f"{source.path} holds no optimizer, which DeepSpeed's layout needs; export the weights with --format torch"
        )
    saved = int(block_of(facts.get("config"), "zero_optimization").get("stage") or 0)
    layout = Layout(source, saved if level is None else level, world, exclude_frozen)
    _ = layout.slots  # refuse before anything is written
    if layout.level in (1, 2) and layout.zero.get("round_robin_gradients"):
        # Weights in the wrong order would load without a word.
        raise CheckpointError(
            "under round_robin_gradients DeepSpeed's order of parameters depends on the machine; export with "
            "--stage 3 or 0"
        )
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
