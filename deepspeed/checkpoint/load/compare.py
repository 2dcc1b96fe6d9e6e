"""Tensors side by side: of two checkpoints, and of a checkpoint and a model, by the names that loading goes by."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepspeed.checkpoint.agree import in_no_model, through, together
from deepspeed.checkpoint.load.loader import open_everywhere
from deepspeed.checkpoint.load.source import Key, Source
from deepspeed.checkpoint.weights.weights import Stream, open_facts, shared_names, stream
from deepspeed.errors import CheckpointError
from deepspeed.zero.client.consolidate import state_names, whole_weights

_CHUNK_BYTES = 16 << 20
_WEIGHTS = ("master", "param")


@dataclass(frozen=True)
class Row:
    """One tensor. ``verdict``: "equal", "fits" (the same shape, values not compared), "different", "missing" (only in
    the first) or
    "extra" (only in the second)."""

    name: str
    verdict: str
    detail: str = ""


def held(name: str, value: torch.Tensor) -> Stream:
    """A tensor in memory as a stream."""
    flat = value.detach().reshape(-1)

    def read(start: int, out: torch.Tensor) -> None:
        out.copy_(flat[start : start + out.numel()])

    return Stream(name, value.dtype, tuple(value.shape), read)


def compare(a: Stream, b: Stream) -> Row:
    """One tensor of each side, under the first's name. Values are compared in the narrower dtype of the two."""
    if a.shape != b.shape:
        return Row(a.name, "different", f"shape {list(a.shape)} and {list(b.shape)}")
    rounded = a.dtype != b.dtype
    worst, count, at = 0.0, 0, 0
    step = _CHUNK_BYTES // max(a.dtype.itemsize, b.dtype.itemsize)
    for start in range(0, a.numel, step):
        size = min(step, a.numel - start)
        left, right = torch.empty(size, dtype=a.dtype), torch.empty(size, dtype=b.dtype)
        a.read(start, left)
        b.read(start, right)
        if rounded:
            narrow = a.dtype if a.dtype.itemsize < b.dtype.itemsize else b.dtype
            left, right = left.to(narrow), right.to(narrow)
        if torch.equal(left.view(torch.uint8), right.view(torch.uint8)):
            continue
        apart = ~((left == right) | ((left != left) & (right != right)))
        found = int(apart.sum())
        if found:
            gaps = (left[apart].double() - right[apart].double()).abs().nan_to_num(nan=float("inf"))
            at = at if count else start + int(apart.int().argmax())
            worst, count = max(worst, float(gaps.max())), count + found
    if count:
        return Row(a.name, "different", f"{count} of {a.numel} elements, max abs diff {worst:.6g}, first at {at}")
    return Row(
        a.name,
        "equal",
        f"after rounding {a.dtype} and {b.dtype} to the narrower".replace("torch.", "") if rounded else "",
    )


@dataclass(frozen=True)
class Match:
    """Weights and persistent buffers of a model, each once, with what a checkpoint has for them; ``extra``: what else
    it has.

    ``shared``: the further names of tied weights.
    """

    tensors: dict[str, torch.Tensor]
    shared: dict[str, str]
    keys: dict[str, Key | None]
    extra: list[Row]


def match(model: nn.Module, source: Source, *, buffers: str = "buffer") -> Match:
    """Pair a model with a checkpoint as loading does. ``buffers``: the state to prefer for buffers (those of one
    rank).
    """
    tensors, aliases = state_names(model, exclude_frozen=False)
    stored = shared_names(source)
    keys: dict[str, Key | None] = {}
    for name, tensor in tensors.items():
        candidates: list[Key] = [(buffers, name), ("buffer", name)]
        if isinstance(tensor, nn.Parameter):
            names = [name, *(alias for alias, real in aliases.items() if real == name)]
            names += [stored[n] for n in names if n in stored]
            candidates = [(state, n) for n in names for state in _WEIGHTS]
        keys[name] = next((key for key in candidates if key in source.entries), None)
    taken = {
        *keys.values(),
        *(("buffer", name) for name, tensor in tensors.items() if not isinstance(tensor, nn.Parameter)),
    }
    rest = [key for key in source.entries if key[0] in (*_WEIGHTS, "buffer") and key not in taken]
    return Match(tensors, aliases, keys, [Row(name, "extra", "only in the checkpoint") for _, name in rest])


def compared(found: Match, source: Source, name: str, values: torch.Tensor | None) -> Row:
    """The row of one tensor of the model; without ``values`` only its shape is compared. Raises CheckpointError for
    damaged bytes.
    """
    key = found.keys[name]
    if key is None:
        return Row(name, "missing", "only in the model")
    there = stream(source, key)
    if values is not None:
        return compare(held(name, values), there)
    return shape_row(name, tuple(found.tensors[name].shape), there.shape)


def shape_row(name: str, here: tuple[int, ...], there: tuple[int, ...]) -> Row:
    """The row of a tensor of which only shapes are known."""
    return Row(name, "fits") if here == there else Row(name, "different", f"shape {list(here)} and {list(there)}")


def diff_live(engine: Any, folder: Any, tag: str | None = None) -> list[Row]:
    """Weights and persistent buffers of a running engine against the checkpoint ``folder/tag`` (default: what
    ``latest`` names).

    One row per tensor on every rank, "equal", "different", "missing" (only in the engine) or "extra" (only in the
    checkpoint). Values are compared in the narrower dtype: those a bf16 engine computes with are bf16. Collective;
    whole weights are gathered a unit at a time, and the ranks share the reading. Raises CheckpointError on every rank
    when there is no checkpoint or bytes of it are damaged.
    """
    engine.wait_for_checkpoint()
    mesh, model = engine.mesh, engine.module
    source = open_everywhere(mesh, Path(folder), tag, allow_pickle=False)
    if source is None:
        raise CheckpointError(f"there is no checkpoint in {folder}")
    try:
        same = int((open_facts(source).get("world") or {}).get("size") or 0) == mesh.job.size
        found = match(model, source, buffers=f"buffer@{mesh.job.index}" if same else "buffer")
        rows: dict[str, Row] = {}
        turns = itertools.cycle(range(mesh.zero.size))

        def take(name: str, values: torch.Tensor) -> None:
            turn = next(turns)  # every rank has its own buffers
            if not isinstance(values, nn.Parameter) or turn == mesh.zero.index:
                rows[name] = compared(found, source, name, values)

        with together(mesh, f"comparing with {source.path}") as shared:
            through(whole_weights(model, found.tensors), take)
            shared.mine = (rows, found.extra)
        return _joined([each for each, _ in shared.all], found) + in_no_model([extra for _, extra in shared.all])
    finally:
        source.close()


def _joined(said: list[Mapping[str, Row]], found: Match) -> list[Row]:
    """What all ranks found, in the model's order, then what others have: the first row that is not "equal", else
    any.
    """
    each = {
        name: [rows[name] for rows in said if name in rows]
        for name in (*found.tensors, *itertools.chain.from_iterable(said))
    }
    return [next((row for row in rows if row.verdict != "equal"), rows[0]) for rows in each.values()]
