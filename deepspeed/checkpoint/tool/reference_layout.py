"""``export --format deepspeed``: DeepSpeed's own layout, for going back to it. Holds one of its files at a time.

A level is DeepSpeed's number for what is sharded: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too.
Levels 1 and 2 cut each optimizer group, laid end to end, into one slice per rank; level 3 cuts every parameter for
itself.
"""

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from deepspeed.checkpoint.format import names
from deepspeed.checkpoint.format.folders import check_tag, write_latest
from deepspeed.checkpoint.load.source import Key, Source, whole
from deepspeed.checkpoint.save.client_files import write_script
from deepspeed.checkpoint.save.writer import progress
from deepspeed.checkpoint.tool import reference_pickles
from deepspeed.checkpoint.weights.weight_files import save_file
from deepspeed.checkpoint.weights.weights import compute_dtype, shared_names, stream, weight_keys
from deepspeed.errors import CheckpointError
from deepspeed.version import __version__

_SUB_GROUP = 1_000_000_000
_CLIP = 1.0


@dataclass(frozen=True)
class Cut:
    """Elements of one parameter in one rank's flat tensor: ``numel`` from ``start`` of the parameter on, at ``at`` of
    the flat tensor.
    """

    name: str
    start: int
    at: int
    numel: int


@dataclass(frozen=True)
class Flat:
    """One flat tensor of one rank: its parts, its length, and how many of its last elements are padding."""

    cuts: tuple[Cut, ...]
    numel: int
    padding: int


def whole_group_cuts(members: Sequence[tuple[str, int]], rank: int, world: int) -> Flat:
    """Levels 1 and 2: rank ``rank``'s slice of a group (name, numel) laid end to end and padded to a multiple of 2 x
    world.
    """
    total = sum(numel for _, numel in members)
    part = -(-total // (2 * world)) * 2
    lo, hi = rank * part, (rank + 1) * part
    cuts, offset = [], 0
    for name, numel in members:
        first, last = max(lo, offset), min(hi, offset + numel)
        if first < last:
            cuts.append(Cut(name, first - offset, first - lo, last - first))
        offset += numel
    return Flat(tuple(cuts), part, max(0, min(part, hi - total)))


def each_cuts(members: Sequence[tuple[str, int]], rank: int, world: int) -> Flat:
    """Level 3: rank ``rank``'s slice of every parameter, each padded to a multiple of ``world``, end to end."""
    cuts, at = [], 0
    for name, numel in members:
        part = -(-numel // world)
        start = min(numel, rank * part)
        cuts.append(Cut(name, start, at, min(numel, start + part) - start))
        at += part
    return Flat(tuple(cuts), at, 0)


def sub_groups(members: Sequence[tuple[str, int]], world: int, limit: int) -> list[list[tuple[str, int]]]:
    """Level 3: runs of a group's parameters whose slices together reach ``limit`` elements."""
    found: list[list[tuple[str, int]]] = [[]]
    filled = 0
    for member in members:
        if filled >= limit:
            found.append([])
            filled = 0
        found[-1].append(member)
        filled += -(-member[1] // world)
    return [run for run in found if run]


@dataclass
class Layout:
    """What is to be written, and for how many ranks."""

    source: Source
    level: int
    world: int
    exclude_frozen: bool = False

    @cached_property
    def dtype(self) -> torch.dtype:
        return compute_dtype(self.source.facts)

    @cached_property
    def config(self) -> dict[str, Any]:
        return dict(self.source.facts.get("config") or {})

    @cached_property
    def zero(self) -> dict[str, Any]:
        block = self.config.get("zero_optimization")
        return block if isinstance(block, dict) else {}

    @cached_property
    def options(self) -> list[dict[str, Any]]:
        return [dict(group["options"]) for group in self.source.facts["optimizer"]["groups"]]

    @cached_property
    def groups(self) -> list[list[tuple[str, int]]]:
        """(name, numel) of every optimizer group in flattening order, less the frozen ones, which an optimizer of the
        user may list.
        """
        shapes = {key[1]: d.shape for key, d in self.source.entries.items() if key[0] == "master"}
        return [[(n, prod(shapes[n])) for n in group if n in shapes] for group in self.listed]

    @cached_property
    def listed(self) -> list[list[str]]:
        """Every name of every optimizer group."""
        return [list(group["names"]) for group in self.source.facts["optimizer"]["groups"]]

    @cached_property
    def slots(self) -> list[str]:
        """Optimizer slots, all of their parameter's shape. Raises CheckpointError for others, which that layout cannot
        hold.
        """
        entries = self.source.entries
        odd = [k for k in entries if k[0].startswith(("opaque.", "part."))]
        odd += [k for k, d in entries.items() if k[0].startswith("optim.") and d.shape != entries["master", k[1]].shape]
        if odd and self.level:
            raise CheckpointError(
                f"{odd[0][0]} of {odd[0][1]} (and {len(odd) - 1} more) has not the shape of its parameter, "
                "which DeepSpeed's "
                "sharded layout cannot hold; export with --stage 0"
            )
        return list(dict.fromkeys(k[0].removeprefix("optim.") for k in entries if k[0].startswith("optim.")))

    def scalars(self, name: str) -> dict[str, Any]:
        """Numbers the optimizer keeps for a parameter."""
        return dict((self.source.facts["optimizer"].get("scalars") or {}).get(name) or {})

    def shape(self, name: str) -> torch.Size:
        return torch.Size(self.source.entries["master", name].shape)

    @cached_property
    def frozen(self) -> list[Key]:
        return [k for k in weight_keys(self.source, exclude_frozen=self.exclude_frozen) if k[0] == "param"]

    def flats(self, rank: int) -> list[Flat]:
        """The flat tensors of a rank, one per group (levels 1, 2) or sub-group (3)."""
        if self.level < 3:
            return [whole_group_cuts(group, rank, self.world) for group in self.groups]
        return [each_cuts(run, rank, self.world) for group in self.groups for run in self.runs(group)]

    def runs(self, group: list[tuple[str, int]]) -> list[list[tuple[str, int]]]:
        """The sub-groups of a group."""
        return sub_groups(group, self.world, int(float(self.zero.get("sub_group_size") or _SUB_GROUP)))

    def values(self, state: str, flat: Flat, *, padded: bool) -> torch.Tensor:
        """A flat tensor of ``state``, zeros where nothing is stored."""
        out = torch.zeros(flat.numel - (0 if padded else flat.padding), dtype=torch.float32)
        for cut in flat.cuts:
            key = (state, cut.name)
            if cut.numel and key in self.source.entries:
                target = out[cut.at : cut.at + cut.numel]
                stored = (
                    target
                    if self.source.entries[key].dtype == target.dtype
                    else target.to(self.source.entries[key].dtype)
                )
                self.source.read(key, stored, start=cut.start)
                if stored is not target:
                    target.copy_(stored)
        return out


def _scaler(layout: Layout) -> Any:
    state = layout.source.facts.get("loss_scaler") or {}
    scale = float(state.get("cur_scale", 1.0))
    if not state.get("dynamic"):
        return reference_pickles.LossScaler(cur_scale=scale, dynamic=False)
    fp16 = layout.config.get("fp16")
    block = fp16 if isinstance(fp16, dict) else {}
    hysteresis = int(block.get("hysteresis", 2))
    return reference_pickles.DynamicLossScaler(
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
    state = {}
    for index, flat in enumerate(layout.flats(rank)):
        scalars = layout.scalars(flat.cuts[0].name) if flat.cuts else _first_scalars(layout)
        state[index] = {**scalars, **{slot: layout.values(f"optim.{slot}", flat, padded=True) for slot in layout.slots}}
    groups, first = [], 0
    for options, group in zip(layout.options, layout.groups, strict=True):
        count = len(layout.runs(group)) if layout.level == 3 else 1
        groups.append({**options, "params": list(range(first, first + count))})
        first += count
    return {"state": state, "param_groups": groups}


def _first_scalars(layout: Layout) -> dict[str, Any]:
    return next((layout.scalars(name) for group in layout.groups for name, _ in group), {})


def _wrapped_in_bf16(layout: Layout) -> bool:
    """Whether DeepSpeed would use its bf16 wrapper, whose files differ."""
    types = layout.config.get("data_types")
    accumulation = types.get("grad_accum_dtype") if isinstance(types, dict) else None
    return layout.level == 1 and layout.dtype == torch.bfloat16 and accumulation in ("fp32", "float32")


def optim_file(layout: Layout, rank: int) -> dict[str, Any]:
    """Contents of a rank's optimizer-state file."""
    state = _flat_state(layout, rank)
    flats = layout.flats(rank)
    common = {"loss_scaler": _scaler(layout), "overflow": False}
    common["dynamic_loss_scale"] = bool((layout.source.facts.get("loss_scaler") or {}).get("dynamic"))
    inner: dict[str, Any]
    if layout.level == 3:
        flat_weights = [layout.values("master", flat, padded=True) for flat in flats]
        inner = {"zero_stage": reference_pickles.ZeroEnum(3), **common, "partition_count": layout.world}
        inner |= {"optimizer_state_dict": state, "fp32_flat_groups": flat_weights}
    else:
        wrapper = _wrapped_in_bf16(layout)
        inner = {} if wrapper else {**common, "zero_stage": reference_pickles.ZeroEnum(layout.level)}
        inner |= {
            "clip_grad": float(layout.config.get("gradient_clipping") or _CLIP),
            "base_optimizer_state": state,
            "single_partition_of_fp32_groups": [layout.values("master", flat, padded=wrapper) for flat in flats],
            "group_paddings": [flat.padding for flat in flats],
            "partition_count": [layout.world] * len(flats),
            "ds_version": __version__,
            "param_slice_mappings": [_addresses(flat) for flat in flats],
        }
        if not wrapper:
            inner["param_alignment_paddings"] = [[0] * len(group) for group in layout.groups]
    return {"optimizer_state_dict": inner, "ds_config": layout.config, "ds_version": __version__}


def _addresses(flat: Flat) -> dict[str, Any]:
    return OrderedDict((c.name, reference_pickles.FragmentAddress(numel=c.numel, start=c.at)) for c in flat.cuts)


def _module(layout: Layout) -> dict[str, torch.Tensor]:
    """The model's state dict; without values at level 3, buffers excepted."""
    found: dict[str, torch.Tensor] = OrderedDict()
    for key in weight_keys(layout.source, exclude_frozen=layout.exclude_frozen):
        stored = layout.source.entries[key].dtype
        dtype = layout.dtype if key[0] == "master" else stored
        empty = layout.level == 3 and key[0] != "buffer"
        found[key[1]] = torch.empty(0, dtype=dtype) if empty else stream(layout.source, key, dtype=dtype).whole()
    found.update({alias: found[name] for alias, name in shared_names(layout.source).items() if name in found})
    return found


def _fragment(layout: Layout, key: Key, rank: int) -> torch.Tensor:
    """What a rank holds of a frozen parameter."""
    if layout.level < 3:
        return whole(layout.source, key)
    described = layout.source.entries[key]
    numel = prod(described.shape)
    part = -(-numel // layout.world)
    out, start = torch.zeros(part, dtype=described.dtype), min(numel, rank * part)
    layout.source.read(key, out[: min(numel, start + part) - start], start=start)
    return out


def _whole_state(layout: Layout) -> dict[str, Any]:
    """Level 0: the optimizer's state dict over whole parameters, wrapped where DeepSpeed keeps fp32 copies of a
    low-precision model.
    """
    trained = [[name for name, _ in group] for group in layout.groups]
    members = (
        layout.listed if layout.dtype == torch.float32 else trained
    )  # torch's own state dict counts frozen ones too
    flat = [name for group in members for name in group]
    number = {name: i for i, name in enumerate(flat)}
    entries = layout.source.entries
    state = {}
    for name in (name for group in trained for name in group):
        slots = {s: whole(layout.source, (f"optim.{s}", name)) for s in layout.slots if (f"optim.{s}", name) in entries}
        state[number[name]] = {**layout.scalars(name), **slots}
    # torch keeps the names beside the numbers; readers that must name the state find them there.
    pairs = zip(layout.options, members, strict=True)
    groups = [{**options, "params": [number[n] for n in group], "param_names": list(group)} for options, group in pairs]
    found = {"state": state, "param_groups": groups}
    if layout.dtype == torch.float32:
        return found
    scaler = layout.source.facts.get("loss_scaler") or {}
    head: dict[str, Any] = {
        "dynamic_loss_scale": bool(scaler.get("dynamic")),
        "cur_scale": float(scaler.get("cur_scale", 1.0)),
    }
    head["cur_iter"] = int(scaler.get("cur_iter", (layout.source.facts.get("engine") or {}).get("global_steps", 0)))
    if head["dynamic_loss_scale"]:
        known = vars(_scaler(layout))
        head |= {k: known[k] for k in ("last_overflow_iter", "scale_factor", "scale_window")}
    return {
        **head,
        "optimizer_state_dict": found,
        "fp32_groups": [[whole(layout.source, ("master", n)) for n in g] for g in members],
    }


def model_file(layout: Layout, rank: int) -> dict[str, Any]:
    """Contents of a rank's model-state file."""
    facts, sharded = layout.source.facts, layout.level > 0
    engine = facts.get("engine") or {}
    with_frozen = layout.level >= 2 and not layout.exclude_frozen
    shapes = [OrderedDict((n, layout.shape(n)) for n, _ in group) for group in layout.groups] if sharded else None
    frozen = (
        OrderedDict((k[1], torch.Size(layout.source.entries[k].shape)) for k in layout.frozen) if with_frozen else None
    )
    fragments = OrderedDict((k[1], _fragment(layout, k, rank)) for k in layout.frozen) if with_frozen else None
    return {
        **(facts.get("client_state") or {}),
        "module": _module(layout),
        "buffer_names": [k[1] for k in layout.source.entries if k[0] == "buffer"],
        "optimizer": None if sharded else _whole_state(layout),
        "param_shapes": shapes,
        "frozen_param_shapes": frozen,
        "shared_params": (shared_names(layout.source) if rank == 0 else {}) if sharded else None,
        "frozen_param_fragments": fragments,
        "lr_scheduler": facts.get("lr_scheduler"),
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": int(engine.get("skipped_steps") or 0),
        "global_steps": int(engine.get("global_steps") or 0),
        "global_samples": int(engine.get("global_samples") or 0),
        "dp_world_size": layout.world,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": layout.config,
        "ds_version": __version__,
    }


def _files(layout: Layout) -> Iterator[tuple[str, Callable[[Layout, int], dict[str, Any]], int]]:
    """(name, function that makes the contents, rank)."""
    for rank in range(layout.world if layout.level == 3 else 1):
        prefix = f"{names.ZERO_FILE_PREFIX}{rank}_" if layout.level == 3 else ""
        yield f"{prefix}{names.MODEL_FILE_PREFIX}00{names.MODEL_FILE_SUFFIX}", model_file, rank
    start = names.BF16_ZERO_FILE_PREFIX if layout.dtype == torch.bfloat16 else names.ZERO_FILE_PREFIX
    for rank in range(layout.world if layout.level else 0):
        yield f"{start}{rank}_{names.MODEL_FILE_PREFIX}00{names.OPTIM_FILE_SUFFIX}", optim_file, rank


def write(source: Source, out: Path, *, level: int | None, world: int, exclude_frozen: bool) -> Path:
    """Write ``source`` into ``out`` as DeepSpeed would with ``world`` ranks; the tag's folder. ``level`` None: as it
    was saved.

    Raises CheckpointError when there is no optimizer, or state that the layout cannot hold; OSError.
    """
    facts = source.facts
    if not (facts.get("optimizer") or {}).get("groups"):
        raise CheckpointError(
            f"{source.path} holds no optimizer, which DeepSpeed's layout needs; export the weights with --format torch"
        )
    zero = (facts.get("config") or {}).get("zero_optimization")
    saved = int((zero or {}).get("stage") or 0) if isinstance(zero, dict) else 0
    layout = Layout(source, saved if level is None else level, world, exclude_frozen)
    _ = layout.slots  # refuse before anything is written
    if layout.level in (1, 2) and layout.zero.get("round_robin_gradients"):
        # Weights in the wrong order would load without a word.
        raise CheckpointError(
            "under round_robin_gradients DeepSpeed's order of parameters depends on the machine; export with "
            "--stage 3 or 0"
        )
    tag = check_tag(source.path.name)
    folder = out / tag
    folder.mkdir(parents=True, exist_ok=True)
    planned = list(_files(layout))
    with contextlib.ExitStack() as stack:
        told = stack.enter_context(progress("export", len(planned)))
        for name, make, rank in planned:
            save_file(folder / name, partial(reference_pickles.save, make(layout, rank)))
            told(1)
    write_script(out)
    write_latest(out, tag)
    return folder
