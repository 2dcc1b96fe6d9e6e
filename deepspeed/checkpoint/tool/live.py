"""``ds_checkpoint diff live``: would a checkpoint load completely into a model, and into its optimizer?

The model is built in this process, on the meta device where it can be (no memory, no values), and nothing is trained.
What state the optimizer keeps is found by letting the configured one take a step on stand-ins.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from deepspeed.api import choose_optimizer, names_by_group
from deepspeed.checkpoint.foreign.legacy import ReferenceSource
from deepspeed.checkpoint.load.compare import Match, TensorRow, compared, match, shape_row
from deepspeed.checkpoint.load.match import optimizer_kind
from deepspeed.checkpoint.load.source import Key, Source
from deepspeed.checkpoint.save.writer import progress
from deepspeed.checkpoint.tool.common import opened
from deepspeed.checkpoint.tool.diff import tell
from deepspeed.checkpoint.weights.weights import open_facts
from deepspeed.config import load_config, read_config_source
from deepspeed.errors import UsageError
from deepspeed.optim.registry import granularity
from deepspeed.verify.ranks import resolve
from deepspeed.verify.user_model import parts_of

_FLAT = 8  # elements of a stand-in for an optimizer that sees elements only
_BLOCKS = ("optimizer", "zero_optimization")


def run(path: Path, reference: str, *, config: str | None, tag: str | None, values: bool, quiet: bool) -> int:
    """Print a line per tensor; 0 when all fit, else 1. Raises UsageError, DeepSpeedConfigError, CheckpointError."""
    with opened(path, tag) as source:
        model = build(reference, meta=not values)
        wanted, unlike = None, list[TensorRow]()
        if config is not None:
            optimizer = _optimizer(model, config)
            groups = names_by_group(model, optimizer.param_groups)
            wanted, unlike = slots_of(optimizer, groups), list(_optimizer_rows(optimizer, source))
            if isinstance(source, ReferenceSource) and not unlike:
                source = source.with_groups(groups)  # some of its files have numbers instead of names
        found = itertools.chain(_rows(model, source, wanted, values=values), unlike)
        return tell(found, "equal" if values else "fits", quiet=quiet)


def build(reference: str, *, meta: bool) -> nn.Module:
    """The model of ``module:build``; with ``meta`` on the meta device, unless its own code needs values. Raises
    UsageError.
    """
    for device in ("meta", "cpu") if meta else ("cpu",):
        try:
            function = resolve(reference)
            if not callable(function):
                raise ValueError(f"{reference} is a {type(function).__name__}, not a function")
            with torch.device(device):
                model = parts_of(function(), reference)[0]
            break
        except Exception as error:  # it is the user's code: anything
            if device == "cpu":
                said = f"{error}" if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
                raise UsageError(f"no model can be had from {reference}: {said}") from error
    lazy = [
        name for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()) if is_lazy(tensor)
    ]
    if lazy:
        raise UsageError(
            f"tensor {lazy[0]!r} of a lazy module has no shape yet; run one forward of the model in {reference}"
        )
    return model


def _rows(
    model: nn.Module, source: Source, wanted: dict[Key, tuple[int, ...]] | None, *, values: bool
) -> Iterator[TensorRow]:
    found = match(model, source)
    with progress("diff", sum(t.nbytes for t in found.tensors.values()) if values else 0) as told:
        for name, tensor in found.tensors.items():
            yield compared(found, source, name, tensor if values else None)
            told(tensor.nbytes)
    if wanted is not None:
        yield from _slot_rows(found, source, wanted)
    yield from found.extra


def _optimizer(model: nn.Module, config: str) -> torch.optim.Optimizer:
    """What ``deepspeed.initialize`` would build for the configuration; the other blocks of that have no say in it."""
    given = read_config_source(config)
    blocks = {key: dict(given[key]) for key in _BLOCKS if isinstance(given.get(key), dict)}
    if isinstance(
        params := blocks.get("optimizer", {}).get("params"), dict
    ):  # what an integration fills in later are rates and the like
        blocks["optimizer"]["params"] = {key: value for key, value in params.items() if value != "auto"}
    if zero := blocks.get("zero_optimization"):  # nothing that asks for a number of ranks
        blocks["zero_optimization"] = {key: zero[key] for key in ("stage", "offload_optimizer") if key in zero}
    optimizer = choose_optimizer(
        load_config({"train_micro_batch_size_per_gpu": 1, **blocks}, world_size=1), model, None, None
    )
    if optimizer is None:
        raise UsageError(
            f"{config} has no 'optimizer' block, so what state yours keeps is not known; leave --config out"
        )
    return optimizer


def _optimizer_rows(optimizer: torch.optim.Optimizer, source: Source) -> Iterator[TensorRow]:
    """Why loading would refuse the state as a whole, whatever its tensors are."""
    saved = open_facts(source).get("optimizer")
    if not saved:
        yield TensorRow("optimizer", "missing", "the checkpoint is of an engine without one")
        return
    here, there = type(optimizer).__name__, saved.get("type") or ""
    if there and optimizer_kind(here) != optimizer_kind(there):
        yield TensorRow("optimizer", "different", f"{here} and {there}")
    mine, theirs = len(optimizer.param_groups), len(saved["groups"])
    if mine != theirs:
        yield TensorRow("optimizer parameter groups", "different", f"{mine} and {theirs}")


def slots_of(optimizer: torch.optim.Optimizer, groups: list[list[str]]) -> dict[Key, tuple[int, ...]]:
    """Shapes of the optimizer's state in a checkpoint by state and parameter (``groups``: their names), after a step of
    it.

    Raises UsageError when it cannot take a step on stand-ins.
    """
    whole = granularity(optimizer) == "parameter"
    found: dict[Key, tuple[int, ...]] = {}
    known: dict[tuple[int, tuple[int, ...]], dict[str, tuple[int, ...]]] = {}
    for index, (group, names) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        for name, shape in [(n, tuple(p.shape)) for n, p in zip(names, group["params"], strict=True) if p.numel()]:
            seen = shape if whole else (_FLAT,)
            if (index, seen) not in known:
                known[index, seen] = _step(optimizer, group, seen, ("meta", "cpu") if whole else ("cpu",))
            kept = known[index, seen]
            # Of an optimizer that sees elements, other tensors belong to a layout and have no parameter's name.
            found |= {
                (f"optim.{slot}", name): own if whole else shape
                for slot, own in kept.items()
                if (own if whole else own == seen)
            }
    return found


def _step(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], shape: tuple[int, ...], devices: tuple[str, ...]
) -> dict[str, Any]:
    """Shapes of the tensors that the optimizer keeps for a parameter of ``group``; whole matrices are tried without
    values first.
    """
    params = group["params"]
    for device in devices:
        stand_in = nn.Parameter(torch.zeros(shape, device=device))
        stand_in.grad = torch.ones_like(stand_in)
        group["params"] = [stand_in]
        try:
            optimizer.step()
            return {
                slot: tuple(v.shape) for slot, v in optimizer.state[stand_in].items() if isinstance(v, torch.Tensor)
            }
        except Exception as error:  # of any optimizer
            if device == devices[-1]:
                what = f"{type(optimizer).__name__} cannot take a step on a parameter of shape {list(shape)}"
                raise UsageError(f"{what}, so its state is not known: {error}; leave --config out") from error
        finally:
            optimizer.state.pop(stand_in, None)
            group["params"] = params
    raise AssertionError("the last device returns or raises")


def _slot_rows(found: Match, source: Source, wanted: dict[Key, tuple[int, ...]]) -> Iterator[TensorRow]:
    there = [key for key in source.entries if key[0].startswith("optim.")]
    saved = open_facts(source).get("optimizer") or {}
    begun = (
        not saved or bool(there) or bool(saved.get("scalars"))
    )  # else it was saved before the first step, and loads as it is
    opaque = any(state.startswith(("opaque.", "part.")) for state, _ in source.entries)
    taken: set[Key] = set()
    for (state, name), shape in wanted.items():
        weight = found.keys.get(name)
        key = (state, weight[1] if weight is not None else name)
        label = f"{state} {name}"
        if key in source.entries:
            taken.add(key)
            yield shape_row(label, shape, source.entries[key].shape)
        elif begun and not opaque:
            yield TensorRow(label, "missing", "only in the optimizer")
    for state, name in there:
        if (state, name) not in taken:
            yield TensorRow(f"{state} {name}", "extra", "only in the checkpoint")
