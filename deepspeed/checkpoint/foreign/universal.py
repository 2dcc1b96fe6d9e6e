"""Universal folders of the reference: one folder of whole tensors per parameter."""

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from deepspeed.checkpoint.foreign.legacy_pieces import Pieces, Segment
from deepspeed.checkpoint.foreign.legacy_shards import Shapes, group_options, is_number, rows, scaler_state
from deepspeed.checkpoint.foreign.unpickle import Stored, load_restricted, materialize
from deepspeed.checkpoint.load.source import Key
from deepspeed.errors import CheckpointError

_WEIGHT = "fp32"
_SUFFIX = ".pt"


def add_universal(
    pieces: dict[Key, Pieces], shapes: Shapes, *, model: Mapping[str, Any], folder: Path
) -> dict[str, Any]:
    """Add masters and slots of the parameters in ``shapes`` to ``pieces``; returns facts. Raises CheckpointError naming
    the tensor.
    """
    _refuse_mixed_up(model, folder)
    common = load_restricted(folder / "zero" / "optimizer_state.pt")
    slots: dict[str, set[str]] = {}
    scalars, groups = _groups(common, shapes, folder)
    for name, shape in ((n, tuple(s)) for group in shapes for n, s in group.items()):
        home = folder / "zero" / name
        if not (home / f"{_WEIGHT}{_SUFFIX}").is_file():
            raise CheckpointError(
                f"{home} lacks {_WEIGHT}{_SUFFIX}: the trained parameter {name} is missing from the checkpoint"
            )
        slots[name] = set()
        for path in sorted(home.glob(f"*{_SUFFIX}")):
            slot, value = path.name.removesuffix(_SUFFIX), load_restricted(path)
            value = value["param"] if isinstance(value, dict) else value
            if is_number(value) and slot != _WEIGHT:
                scalars.setdefault(name, {})[slot] = materialize(value)
                continue
            state = "master" if slot == _WEIGHT else f"optim.{slot}"
            pieces[state, name] = _whole(value, shape, f"{state} of {name}", path)
            slots[name].add(state)
    every = set().union(*slots.values())
    for name, own in slots.items():
        if own != every and own != {"master"}:
            raise CheckpointError(
                f"{folder / 'zero' / name} lacks {', '.join(sorted(every - own))} of {name}, which other "
                "parameters have"
            )
    return {"optimizer": {"groups": groups, "scalars": scalars}, "loss_scaler": scaler_state(common)}


def _refuse_mixed_up(model: Mapping[str, Any], folder: Path) -> None:
    """The converter goes by a record that has the wrong order with this setting, so that values are those of other
    parameters.
    """
    zero = (materialize(model.get("ds_config")) or {}).get("zero_optimization")
    if isinstance(zero, dict) and zero.get("round_robin_gradients") and int(model.get("dp_world_size", 1)) > 1:
        raise CheckpointError(
            f"{folder} was converted from a run with round_robin_gradients, and the converter of DeepSpeed "
            "0.19 mixes parameters up there; "
            "load the folder that it was converted from instead, without conversion"
        )


def _whole(value: Any, shape: tuple[int, ...], what: str, path: Path) -> Pieces:
    if not isinstance(value, Stored) or value.numel != prod(shape):
        found = value.shape if isinstance(value, Stored) else type(value).__name__
        raise CheckpointError(f"{path} holds {what} as {found}, and the model state file says {shape}")
    return Pieces(value.dtype, shape, (Segment(0, value.numel, value, 0),)).check(what, path)


def _groups(
    common: Mapping[str, Any], shapes: Shapes, folder: Path
) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """Numbers per parameter that do not lie with the parameters (level 3 keeps them in the first rank's state), and the
    groups.
    """
    if "fp32_flat_groups" not in common:
        listed = common.get("param_groups") or [{} for _ in shapes]
        return {}, [
            {"names": list(group), "options": group_options(own)} for group, own in zip(shapes, listed, strict=True)
        ]
    world = int(common["partition_count"])
    cut = rows([common] * world, shapes, [folder / "zero" / "optimizer_state.pt"] * world)
    found: dict[str, dict[str, Any]] = {}
    for name, spans in cut.spans.items():
        own = cut.shards[0][spans[0].part].slots if spans else {}
        numbers = {slot: materialize(value) for slot, value in own.items() if is_number(value) and value is not None}
        if numbers:
            found[name] = numbers
    return found, cut.groups
