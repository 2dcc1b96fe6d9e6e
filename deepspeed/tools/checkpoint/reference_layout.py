"""``export --format deepspeed``: DeepSpeed's own layout, for going back to it. Holds one of its files at a time.

A level is DeepSpeed's number for what is sharded: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too.
"""

import pickle
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from deepspeed.checkpoint import constants
from deepspeed.checkpoint.foreign.optimizer_state import Slice, column_width, columns, row_width, rows, sub_groups
from deepspeed.checkpoint.foreign.weights import (
    block_of,
    compute_dtype,
    shared_names,
    stream,
    weight_keys,
    with_aliases,
)
from deepspeed.checkpoint.format.folders import check_tag, finished, write_latest
from deepspeed.checkpoint.load.source import Source, Wish, fill, whole
from deepspeed.checkpoint.save.client_files import write_script
from deepspeed.checkpoint.save.writer import progress
from deepspeed.errors import CheckpointError
from deepspeed.version import __version__

_SUB_GROUP = 1_000_000_000


class _Stored(Namespace):
    """Pickle as an instance of the class of DeepSpeed that the subclass stands for."""


def _stand_in(module: str, name: str, **members: Any) -> Any:
    return type(name, (_Stored,), {"__module__": module, **members})


_LossScaler = _stand_in("deepspeed.runtime.fp16.loss_scaler", "LossScaler")
_DynamicLossScaler = _stand_in("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler")
_FragmentAddress = _stand_in("deepspeed.utils.tensor_fragment", "fragment_address")
_Level = _stand_in(
    "deepspeed.runtime.zero.config", "ZeroStageEnum", __reduce__=lambda self: (type(self), (self.number,))
)


class _Pickler(pickle._Pickler):
    """Pickle in Python: the compiled pickler insists on importing every class under the name it writes."""

    def save_global(self, obj: Any, name: str | None = None) -> None:
        if not (isinstance(obj, type) and issubclass(obj, _Stored)):
            super().save_global(obj, name)  # type: ignore[misc]
            return
        self.write(pickle.GLOBAL + f"{obj.__module__}\n{obj.__name__}\n".encode())  # type: ignore[attr-defined]
        self.memoize(obj)  # type: ignore[attr-defined]


class _Layout:
    """Plan the files of a checkpoint for ``world`` ranks, and make the contents of each."""

    def __init__(self, source: Source, level: int | None, world: int, *, exclude_frozen: bool) -> None:
        facts, entries = source.facts, source.entries
        self.source, self.world, self.facts = source, world, facts
        self.dtype, self.config = compute_dtype(facts), dict(facts.get("config") or {})
        self.zero, self.scaler = block_of(self.config, "zero_optimization"), facts.get("loss_scaler") or {}
        self.level = int(self.zero.get("stage") or 0) if level is None else level
        self.scalars: dict[str, dict[str, Any]] = facts["optimizer"].get("scalars") or {}
        self.options = [dict(group["options"]) for group in facts["optimizer"]["groups"]]
        self.listed = [list(group["names"]) for group in facts["optimizer"]["groups"]]
        self.exclude_frozen = exclude_frozen
        self.keys = weight_keys(source, exclude_frozen=exclude_frozen)
        self.frozen = {name: torch.Size(entries[s, name].shape) for s, name in self.keys if s == "param"}
        self.shapes = {key[1]: torch.Size(d.shape) for key, d in entries.items() if key[0] == "master"}
        # In flattening order, less the frozen ones, which an optimizer of the user may list.
        self.groups = [[(n, prod(self.shapes[n])) for n in group if n in self.shapes] for group in self.listed]
        self.slots = list(dict.fromkeys(k[0].removeprefix("optim.") for k in entries if k[0].startswith("optim.")))
        limit = int(float(self.zero.get("sub_group_size") or _SUB_GROUP))
        # A flat tensor per group (levels 1, 2) or sub-group (3): what lies in it, by rank and part; how long it is.
        self.runs = [sub_groups(g, world, limit) if self.level == 3 else [g] for g in self.groups]
        self.slices: dict[tuple[int, int], list[Slice]] = {}
        self.lengths: list[int] = []
        for part, run in enumerate(run for runs in self.runs for run in runs):
            if self.level == 3:
                self.lengths.append(sum(row_width(numel, world) for _, numel in run))
                slices = rows(run, part, world)
            else:
                self.lengths.append(column_width(run, world))
                slices = columns(run, part, width=self.lengths[part], world=world)
            for s in slices:
                self.slices.setdefault((s.rank, part), []).append(s)

    def _values(self, state: str, rank: int, part: int, *, padding: int = 0) -> torch.Tensor:
        """Return a flat tensor of ``state`` without its last ``padding`` elements, zeros where nothing is stored."""
        out = torch.zeros(self.lengths[part] - padding, dtype=torch.float32)
        for s in self.slices.get((rank, part), []):
            if (state, s.name) in self.source.entries:  # one by one: no more than one is held in the stored dtype
                fill(self.source, [Wish((state, s.name), out[s.at : s.at + s.hi - s.lo], s.lo)])
        return out

    def _scaler(self) -> Any:
        state, block = self.scaler, block_of(self.config, "fp16")
        scale, hysteresis = float(state.get("cur_scale", 1.0)), int(block.get("hysteresis", 2))
        if not state.get("dynamic"):
            return _LossScaler(cur_scale=scale, dynamic=False)
        counters = {"cur_iter": 0, "last_overflow_iter": -1, "cur_hysteresis": hysteresis}
        settings = {
            "scale_window": int(block.get("loss_scale_window", 1000)),
            "min_scale": block.get("min_loss_scale", 1),
            "delayed_shift": hysteresis,
            "consecutive_hysteresis": bool(block.get("consecutive_hysteresis", False)),
        }
        values = {name: int(state.get(name, start)) for name, start in counters.items()} | settings
        fixed = {"scale_factor": 2.0, "raise_error_at_min_scale": True, "dynamic": True, "dtype": torch.float16}
        return _DynamicLossScaler(cur_scale=scale, **values, **fixed)

    def optim_file(self, rank: int) -> dict[str, Any]:
        """Return the contents of a rank's optimizer-state file."""
        parts, world, state = range(len(self.lengths)), self.world, dict[int, dict[str, Any]]()
        slices, numbers = [self.slices.get((rank, part), []) for part in parts], iter(parts)
        for part in parts:
            named = slices[part][0].name if slices[part] else next((n for g in self.groups for n, _ in g), "")
            slots = {slot: self._values(f"optim.{slot}", rank, part) for slot in self.slots}
            state[part] = {**self.scalars.get(named, {}), **slots}
        pairs = zip(self.options, self.runs, strict=True)
        groups = [{**options, "params": [next(numbers) for _ in runs]} for options, runs in pairs]
        base = {"state": state, "param_groups": groups}
        inner: dict[str, Any] = {
            "zero_stage": _Level(number=self.level),
            "loss_scaler": self._scaler(),
            "overflow": False,
            "dynamic_loss_scale": bool(self.scaler.get("dynamic")),
        }
        if self.level == 3:
            masters = [self._values("master", rank, part) for part in parts]
            inner |= {"partition_count": world, "optimizer_state_dict": base, "fp32_flat_groups": masters}
        else:
            # DeepSpeed has a wrapper for this, whose files differ.
            accumulation = block_of(self.config, "data_types").get("grad_accum_dtype")
            wrapper = self.level == 1 and self.dtype == torch.bfloat16 and accumulation in ("fp32", "float32")
            # Elements at the end of a column that are none of the group's.
            ends = zip(self.lengths, self.groups, strict=True)
            paddings = [max(0, min(width, (rank + 1) * width - sum(n for _, n in group))) for width, group in ends]
            gaps = {"param_alignment_paddings": [[0] * len(group) for group in self.groups]}
            inner = {} if wrapper else {**inner, **gaps}
            inner |= {
                "clip_grad": float(self.config.get("gradient_clipping", 1.0)),  # 0: none
                "base_optimizer_state": base,
                "single_partition_of_fp32_groups": [
                    self._values("master", rank, p, padding=0 if wrapper else paddings[p]) for p in parts
                ],
                "group_paddings": paddings,
                "partition_count": [world] * len(parts),
                "ds_version": __version__,
                "param_slice_mappings": [
                    OrderedDict((s.name, _FragmentAddress(numel=s.hi - s.lo, start=s.at)) for s in of_part)
                    for of_part in slices
                ],
            }
        return {"optimizer_state_dict": inner, "ds_config": self.config, "ds_version": __version__}

    def _fragment(self, name: str, rank: int) -> torch.Tensor:
        """Return the part of a frozen parameter that a rank holds."""
        key, numel = ("param", name), prod(self.frozen[name])
        if self.level < 3:
            return whole(self.source, key)
        out = torch.zeros(row_width(numel, self.world), dtype=self.source.entries[key].dtype)
        local = (s for s in rows([(name, numel)], 0, self.world) if s.rank == rank)
        fill(self.source, [Wish(key, out[: s.hi - s.lo], s.lo) for s in local])
        return out

    def _whole_state(self) -> dict[str, Any]:
        """Return level 0's state of whole parameters, wrapped if DeepSpeed keeps fp32 copies of a 16-bit model."""
        source, state = self.source, dict[int, dict[str, Any]]()
        trained = [[name for name, _ in group] for group in self.groups]
        # torch's own state dict counts frozen ones too
        members = self.listed if self.dtype == torch.float32 else trained
        number = {name: i for i, name in enumerate(name for group in members for name in group)}
        for name in (name for group in trained for name in group):
            slots = [slot for slot in self.slots if (f"optim.{slot}", name) in source.entries]
            tensors = {slot: whole(source, (f"optim.{slot}", name)) for slot in slots}
            state[number[name]] = {**self.scalars.get(name, {}), **tensors}
        # torch keeps the names beside the numbers; readers that must name the state find them there.
        pairs = zip(self.options, members, strict=True)
        groups = [{**options, "params": [number[n] for n in group], "param_names": group} for options, group in pairs]
        inner = {"state": state, "param_groups": groups}
        if self.dtype == torch.float32:
            return inner
        steps = (self.facts.get("engine") or {}).get("global_steps", 0)
        scaler = {**vars(self._scaler()), "cur_iter": int(self.scaler.get("cur_iter", steps))}
        kept = ("last_overflow_iter", "scale_factor", "scale_window") if scaler["dynamic"] else ()
        return {
            "dynamic_loss_scale": scaler["dynamic"],
            **{name: scaler[name] for name in ("cur_scale", "cur_iter", *kept)},
            "optimizer_state_dict": inner,
            "fp32_groups": [[whole(source, ("master", name)) for name in group] for group in members],
        }

    def model_file(self, rank: int) -> dict[str, Any]:
        """Return the contents of a rank's model-state file."""
        facts, sharded = self.facts, self.level > 0
        frozen = None if self.level < 2 or self.exclude_frozen else self.frozen
        engine, shared = facts.get("engine") or {}, shared_names(self.source)
        extra = {f"{path}._extra_state".lstrip("."): state for path, state in (facts.get("extra_state") or {}).items()}
        shapes = [OrderedDict((n, self.shapes[n]) for n, _ in group) for group in self.groups]
        fragments = OrderedDict((name, self._fragment(name, rank)) for name in frozen or ())
        module: dict[str, torch.Tensor] = OrderedDict()  # without values at level 3, buffers excepted
        for key in self.keys:
            dtype = self.dtype if key[0] == "master" else self.source.entries[key].dtype
            empty = self.level == 3 and key[0] != "buffer"
            module[key[1]] = torch.empty(0, dtype=dtype) if empty else stream(self.source, key, dtype=dtype).whole()
        return {
            **(facts.get("client_state") or {}),
            "module": with_aliases(module, shared) | extra,
            "buffer_names": [name for state, name in self.source.entries if state == "buffer"],
            "optimizer": None if sharded else self._whole_state(),
            "param_shapes": shapes if sharded else None,
            "frozen_param_shapes": None if frozen is None else OrderedDict(frozen),
            "shared_params": (shared if rank == 0 else {}) if sharded else None,
            "frozen_param_fragments": None if frozen is None else fragments,
            "lr_scheduler": facts.get("lr_scheduler"),
            "data_sampler": None,
            "random_ltd": None,
            **{name: int(engine.get(name) or 0) for name in ("skipped_steps", "global_steps", "global_samples")},
            "dp_world_size": self.world,
            "mp_world_size": 1,
            "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
            "ds_config": self.config,
            "ds_version": __version__,
        }


def write(source: Source, out: Path, *, level: int | None, world: int, exclude_frozen: bool) -> Path:
    """Write ``source`` into ``out`` as DeepSpeed would with ``world`` ranks (``level`` None: its own); return the tag's
    folder. Raises CheckpointError when there is no optimizer, or state that the layout cannot hold; OSError.
    """
    if not (source.facts.get("optimizer") or {}).get("groups"):
        raise CheckpointError(f"{source.path} has no optimizer, which this layout needs; export with --format torch")
    layout, entries = _Layout(source, level, world, exclude_frozen=exclude_frozen), source.entries
    odd = [k for k in entries if k[0].startswith(("opaque.", "part."))]
    flat = [k for k, d in entries.items() if k[0].startswith("optim.") and d.shape != entries["master", k[1]].shape]
    groups = [[name for name, numel in group if numel] for group in layout.groups]
    numbers = {name: {k: float(v) for k, v in values.items()} for name, values in layout.scalars.items()}
    flat += [("step", n) for group in groups for n in group if numbers.get(n) != numbers.get(group[0])]
    if odd or flat and layout.level:
        (state, name), advice = (odd or flat)[0], "--format torch" if odd else "--stage 0"
        reason = f"DeepSpeed's layout has no place for {state} of {name} (and {len(odd or flat) - 1} more)"
        raise CheckpointError(f"{reason}, which is unlike its parameter or group; export with {advice}")
    if layout.level in (1, 2) and layout.zero.get("round_robin_gradients"):
        # Weights in the wrong order would load without a word.
        reason = "under round_robin_gradients DeepSpeed's order of parameters depends on the machine"
        raise CheckpointError(f"{reason}; export with --stage 3 or 0")
    folder = out / check_tag(source.path.name)
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, Callable[[], dict[str, Any]]] = {}
    for rank in range(world if layout.level == 3 else 1):
        prefix = f"{constants.ZERO_FILE_PREFIX}{rank}_" if layout.level == 3 else ""
        name = f"{prefix}{constants.MODEL_FILE_PREFIX}00{constants.MODEL_FILE_SUFFIX}"
        files[name] = partial(layout.model_file, rank)
    start = constants.BF16_ZERO_FILE_PREFIX if layout.dtype == torch.bfloat16 else constants.ZERO_FILE_PREFIX
    for rank in range(world if layout.level else 0):
        name = f"{start}{rank}_{constants.MODEL_FILE_PREFIX}00{constants.OPTIM_FILE_SUFFIX}"
        files[name] = partial(layout.optim_file, rank)
    with progress("export", len(files)) as advance:
        for name, make in files.items():
            with finished(folder / name) as path:
                torch.save(make(), path, pickle_module=SimpleNamespace(__name__="pickle", Pickler=_Pickler))
            advance(1)
    write_script(out)
    write_latest(out, folder.name)
    return folder
