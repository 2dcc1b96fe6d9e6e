"""Universal folders of DeepSpeed: one folder of whole tensors per parameter."""

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from deepspeed.checkpoint.foreign.pieces import Pieces
from deepspeed.checkpoint.foreign.sharded import Shapes, in_rows, is_number, named_groups, numbers, scaler_state
from deepspeed.checkpoint.foreign.unpickle import FileTensor, load_restricted, materialize
from deepspeed.checkpoint.load.source import Key
from deepspeed.errors import CheckpointError


def add_universal(
    pieces: dict[Key, Pieces], shapes: Shapes, *, model: Mapping[str, Any], folder: Path
) -> dict[str, Any]:
    """Add masters and slots to ``pieces``; the facts they come with. Raises CheckpointError naming the tensor."""
    zero = (materialize(model.get("ds_config")) or {}).get("zero_optimization")
    if isinstance(zero, dict) and zero.get("round_robin_gradients") and int(model.get("dp_world_size", 1)) > 1:
        raise CheckpointError(  # it goes by a record that has the wrong order with this setting
            f"{folder} was converted from a run with round_robin_gradients, and the converter of DeepSpeed 0.19 mixes "
            "parameters up there; load the folder that it was converted from instead, without conversion"
        )
    common = load_restricted(folder / "zero" / "optimizer_state.pt")
    scalars, groups = _groups(common, shapes, folder)
    states: dict[str, set[str]] = {}
    for name, shape in ((n, tuple(s)) for group in shapes for n, s in group.items()):
        home = folder / "zero" / name
        if not (home / "fp32.pt").is_file():
            raise CheckpointError(f"{home} lacks fp32.pt: the trained parameter {name} is missing from the checkpoint")
        states[name] = set()
        for path in sorted(home.glob("*.pt")):
            value = load_restricted(path)
            value = value["param"] if isinstance(value, dict) else value
            state = "master" if path.stem == "fp32" else f"optim.{path.stem}"
            if is_number(value) and state != "master":
                scalars.setdefault(name, {})[path.stem] = materialize(value)
                continue
            what = f"{state} of {name}"
            if not isinstance(value, FileTensor) or value.numel != prod(shape):
                shown = getattr(value, "shape", type(value).__name__)
                raise CheckpointError(f"{path} holds {what} as {shown}, and the model state file says {shape}")
            pieces[state, name] = Pieces.of(value, shape).check(what, path)
            states[name].add(state)
    every = set().union(*states.values())
    for name, present in states.items():
        if present != every and present != {"master"}:
            lacking = ", ".join(sorted(every - present))
            raise CheckpointError(f"{folder / 'zero' / name} lacks {lacking} of {name}, which other parameters have")
    return {"optimizer": {"groups": groups, "scalars": scalars}, "loss_scaler": scaler_state(common)}


def _groups(
    common: Mapping[str, Any], shapes: Shapes, folder: Path
) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """Numbers per parameter that do not lie with it (level 3: in the first rank's state), and the groups."""
    if "fp32_flat_groups" not in common:
        return {}, named_groups(shapes, common.get("param_groups") or [{} for _ in shapes])
    world = int(common["partition_count"])
    state = in_rows([common] * world, shapes, [folder / "zero" / "optimizer_state.pt"] * world)
    found = {s.name: numbers(state.shards[0][s.part].slots) for s in state.slices if s.rank == 0}
    return {name: row for name, row in found.items() if row}, state.groups
