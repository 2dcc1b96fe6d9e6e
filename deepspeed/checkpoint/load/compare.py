"""Tensors side by side: of two checkpoints, and of a checkpoint and a model, by the names that loading goes by."""

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepspeed.checkpoint.agree import in_no_model, through, together
from deepspeed.checkpoint.load.match import buffer_state, paired
from deepspeed.checkpoint.load.restore import open_everywhere
from deepspeed.checkpoint.load.source import Key, Source
from deepspeed.checkpoint.weights.weights import Stream, open_facts, shared_names, stream
from deepspeed.errors import CheckpointError
from deepspeed.zero.module.state import state_names, whole_weights

_CHUNK_BYTES = 16 << 20


@dataclass(frozen=True)
class TensorRow:
    """Result for one tensor: "equal", "fits" (shapes only), "different", "missing" (only in the first) or "extra"."""

    name: str
    verdict: str
    detail: str = ""


def in_memory(name: str, value: torch.Tensor) -> Stream:
    flat = value.detach().reshape(-1)

    def read(start: int, out: torch.Tensor) -> None:
        out.copy_(flat[start : start + out.numel()])

    return Stream(name, value.dtype, tuple(value.shape), read)


def compare(a: Stream, b: Stream) -> TensorRow:
    """Compare two tensors, in the narrower dtype of both; the row has the first one's name."""
    if a.shape != b.shape:
        return TensorRow(a.name, "different", f"shape {list(a.shape)} and {list(b.shape)}")
    worst, count, at, start = 0.0, 0, 0, 0
    narrow = a.dtype if a.dtype.itemsize < b.dtype.itemsize else b.dtype
    step = _CHUNK_BYTES // max(a.dtype.itemsize, b.dtype.itemsize)
    for lhs, rhs in zip(a.chunks(step * a.dtype.itemsize), b.chunks(step * b.dtype.itemsize), strict=True):
        if a.dtype != b.dtype:
            lhs, rhs = lhs.to(narrow), rhs.to(narrow)
        if not torch.equal(lhs.view(torch.uint8), rhs.view(torch.uint8)):
            apart = ~((lhs == rhs) | ((lhs != lhs) & (rhs != rhs)))
            if bool(apart.any()):
                gaps = (lhs[apart].double() - rhs[apart].double()).abs().nan_to_num(nan=float("inf"))
                at = at if count else start + int(apart.int().argmax())
                worst, count = max(worst, float(gaps.max())), count + gaps.numel()
        start += lhs.numel()
    if count:
        detail = f"{count} of {a.numel} elements, max abs diff {worst:.6g}, first at {at}"
        return TensorRow(a.name, "different", detail)
    detail = f"after rounding {a.dtype} and {b.dtype} to the narrower".replace("torch.", "")
    return TensorRow(a.name, "equal", detail if a.dtype != b.dtype else "")


@dataclass(frozen=True)
class Match:
    """Checkpoint keys of a model's weights and persistent buffers, each once, and rows of its other tensors."""

    tensors: dict[str, torch.Tensor]
    keys: dict[str, Key | None]
    extra: list[TensorRow]


def match(model: nn.Module, source: Source, *, buffers: str = "buffer") -> Match:
    """Pair a model with a checkpoint as loading does. ``buffers``: the state to prefer for buffers."""
    tensors, aliases = state_names(model, exclude_frozen=False)
    weights = [name for name, tensor in tensors.items() if isinstance(tensor, nn.Parameter)]
    rest = [name for name in tensors if not isinstance(tensors[name], nn.Parameter)]
    keys, extra = paired(source.entries, shared_names(source), weights, rest, aliases=aliases, prefer=buffers)
    return Match(tensors, keys, [TensorRow(name, "extra", "only in the checkpoint") for name in extra])


def compared(pairs: Match, source: Source, name: str, values: torch.Tensor | None) -> TensorRow:
    """Compare one tensor of the model with the checkpoint; without ``values`` only its shape. Return the row."""
    key = pairs.keys[name]
    if key is None:
        return TensorRow(name, "missing", "only in the model")
    saved = stream(source, key)
    if values is not None:
        return compare(in_memory(name, values), saved)
    return shape_row(name, tuple(pairs.tensors[name].shape), saved.shape)


def shape_row(name: str, shape: tuple[int, ...], saved: tuple[int, ...]) -> TensorRow:
    """Return the row of a tensor of which only shapes are compared."""
    detail = "" if shape == saved else f"shape {list(shape)} and {list(saved)}"
    return TensorRow(name, "different" if detail else "fits", detail)


def diff_live(engine: Any, folder: Any, tag: str | None = None) -> list[TensorRow]:
    """Compare an engine's weights and persistent buffers with the checkpoint ``folder/tag`` (default: the latest).

    Returns one row per tensor on every rank: "equal", "different", "missing" (only in the engine) or "extra" (only in
    the checkpoint). Values are compared in the narrower dtype: those a bf16 engine computes with are bf16. Collective;
    whole weights are gathered a unit at a time, and the ranks share the reading. Raises CheckpointError on every rank
    when there is no checkpoint or bytes of it are damaged.
    """
    engine.wait_for_checkpoint()
    mesh, model = engine.mesh, engine.module
    source = open_everywhere(mesh, Path(folder), tag, allow_pickle=False)
    if source is None:
        raise CheckpointError(f"there is no checkpoint in {folder}")
    try:
        pairs = match(model, source, buffers=buffer_state(open_facts(source), mesh))
        rows: dict[str, TensorRow] = {}
        turns = itertools.cycle(range(mesh.zero.size))

        def take(name: str, values: torch.Tensor) -> None:
            turn = next(turns)  # every rank has its own buffers
            if not isinstance(values, nn.Parameter) or turn == mesh.zero.index:
                rows[name] = compared(pairs, source, name, values)

        with together(mesh, f"comparing with {source.path}") as shared:
            through(whole_weights(model, pairs.tensors), take)
            shared.mine = (rows, pairs.extra)
        of_ranks, extra = zip(*shared.all, strict=True)
        by_name = {
            name: [of_rank[name] for of_rank in of_ranks if name in of_rank]
            for name in (*pairs.tensors, *itertools.chain.from_iterable(of_ranks))
        }
        # In the model's order, then what others have: the first row that is not "equal", else any.
        joined = [next((row for row in of_name if row.verdict != "equal"), of_name[0]) for of_name in by_name.values()]
        return joined + in_no_model(extra)
    finally:
        source.close()
