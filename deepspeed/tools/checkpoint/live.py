"""``ds_checkpoint diff live``: would a checkpoint load completely into a model, and into its optimizer?

The model is built in this process, on the meta device where it can be (no memory, no values), and nothing is trained.
What state the optimizer keeps is found by letting the configured one take a step on stand-ins.
"""

import contextlib
import itertools
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from deepspeed.checkpoint.foreign.legacy import ReferenceSource
from deepspeed.checkpoint.foreign.weights import block_of, open_facts
from deepspeed.checkpoint.load.compare import Match, TensorRow, compared, match, optimizer_kind, shape_row
from deepspeed.checkpoint.load.reader import find_and_open
from deepspeed.checkpoint.load.source import Key, Source
from deepspeed.checkpoint.save.writer import progress
from deepspeed.config import load_config, read_config_source
from deepspeed.engine.initialize import choose_optimizer, names_by_group
from deepspeed.errors import UsageError
from deepspeed.optim.registry import granularity
from deepspeed.tools.verify.user_model import parts_of, resolve

_FLAT = 8  # elements of a stand-in for an optimizer that sees elements only
_Shape = tuple[int, ...]


def rows(args: Namespace) -> Iterator[TensorRow]:
    """Yield a row per tensor. Raises UsageError, DeepSpeedConfigError, CheckpointError."""
    if not args.model:
        raise UsageError("diff live needs --model MODULE:BUILD, which makes the model; a folder of the name is ./live")
    with contextlib.closing(find_and_open(Path(args.other), args.tag_b or args.tag)) as source:
        model = _build(args.model, "cpu" if args.values else "meta")
        slots, unlike = dict[Key, _Shape](), list[TensorRow]()
        if args.config is not None:
            optimizer = _optimizer(model, args.config)
            groups = names_by_group(model, optimizer.param_groups)
            slots, unlike = _slots_of(optimizer, groups), list(_optimizer_rows(optimizer, source))
            if isinstance(source, ReferenceSource) and not unlike:
                source = source.with_groups(groups)  # some of its files have numbers instead of names
        pairs = match(model, source)
        total = sum(t.nbytes for t in pairs.tensors.values()) if args.values else 0
        with progress("diff", total) as advance:
            for name, tensor in pairs.tensors.items():
                yield compared(pairs, source, name, tensor if args.values else None)
                advance(tensor.nbytes)
        if args.config is not None:
            yield from _slot_rows(pairs, source, slots)
        yield from itertools.chain(pairs.extra, unlike)


def _build(reference: str, device: str) -> nn.Module:
    """Build the model of ``module:build``, on the host where its own code needs values that the meta device lacks."""
    try:
        function = resolve(reference)
        with torch.device(device):
            model = parts_of(function(), reference)[0]
        for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
            if is_lazy(tensor):
                raise ValueError(f"tensor {name!r} of a lazy module has no shape yet; run one forward of the model")
        return model
    except Exception as error:  # it is the user's code: anything
        if device == "meta":
            return _build(reference, "cpu")
        reason = f"{error}" if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise UsageError(f"no model can be had from {reference}: {reason}") from error


def _optimizer(model: nn.Module, config: str) -> torch.optim.Optimizer:
    """Build the optimizer as ``deepspeed.initialize`` would, from the optimizer and zero_optimization blocks alone."""
    given = read_config_source(config)
    blocks: dict[str, Any] = {}
    if block := block_of(given, "optimizer"):  # rates and the like may be "auto"
        params = {key: value for key, value in block_of(block, "params").items() if value != "auto"}
        blocks["optimizer"] = {**block, "params": params}
    if zero := block_of(given, "zero_optimization"):  # nothing that asks for a number of ranks
        blocks["zero_optimization"] = {key: zero[key] for key in ("stage", "offload_optimizer") if key in zero}
    parsed = load_config({"train_micro_batch_size_per_gpu": 1, **blocks}, world_size=1)
    optimizer = choose_optimizer(parsed, model, None, None)
    if optimizer is None:
        raise UsageError(f"{config} has no 'optimizer' block, so its state is not known; leave --config out")
    return optimizer


def _optimizer_rows(optimizer: torch.optim.Optimizer, source: Source) -> Iterator[TensorRow]:
    """Yield reasons why loading would refuse the optimizer state as a whole, whatever its tensors are."""
    saved = open_facts(source).get("optimizer")
    if not saved:
        yield TensorRow("optimizer", "missing", "the checkpoint is of an engine without one")
        return
    current, stored = type(optimizer).__name__, saved.get("type") or ""
    if stored and optimizer_kind(current) != optimizer_kind(stored):
        yield TensorRow("optimizer", "different", f"{current} and {stored}")
    counts = len(optimizer.param_groups), len(saved["groups"])
    if counts[0] != counts[1]:
        yield TensorRow("optimizer parameter groups", "different", f"{counts[0]} and {counts[1]}")


def _slots_of(optimizer: torch.optim.Optimizer, groups: list[list[str]]) -> dict[Key, _Shape]:
    """Return the shapes of checkpointed optimizer state, from a step on stand-ins. UsageError when the step fails."""
    whole, slots = granularity(optimizer) == "parameter", dict[Key, _Shape]()
    cached: dict[tuple[int, _Shape], dict[str, _Shape]] = {}
    for index, (group, names) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        for name, shape in [(n, tuple(p.shape)) for n, p in zip(names, group["params"], strict=True) if p.numel()]:
            seen = shape if whole else (_FLAT,)
            if (index, seen) not in cached:
                cached[index, seen] = _step(optimizer, group, seen, ("meta", "cpu") if whole else ("cpu",))
            for slot, kept in cached[index, seen].items():
                if kept if whole else kept == seen:  # by elements, other tensors belong to a layout and to no name
                    slots[f"optim.{slot}", name] = kept if whole else shape
    return slots


def _step(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], shape: _Shape, devices: tuple[str, ...]
) -> dict[str, _Shape]:
    """Return the shapes of the optimizer's tensors for a parameter of ``group``, on the first device that will do."""
    params, refused = group["params"], Exception()
    for device in devices:
        stand_in = nn.Parameter(torch.zeros(shape, device=device))
        stand_in.grad = torch.ones_like(stand_in)
        group["params"] = [stand_in]
        try:
            optimizer.step()
            state = optimizer.state[stand_in].items()
            return {slot: tuple(value.shape) for slot, value in state if isinstance(value, torch.Tensor)}
        except Exception as error:  # of any optimizer
            refused = error
        finally:
            optimizer.state.pop(stand_in, None)
            group["params"] = params
    message = f"{type(optimizer).__name__} cannot take a step on a parameter of shape {list(shape)}"
    raise UsageError(f"{message}, so its state is not known: {refused}; leave --config out") from refused


def _slot_rows(pairs: Match, source: Source, slots: dict[Key, _Shape]) -> Iterator[TensorRow]:
    stored = dict.fromkeys(key for key in source.entries if key[0].startswith("optim."))
    saved = open_facts(source).get("optimizer") or {}
    begun = not saved or bool(stored or saved.get("scalars"))  # else of before the first step, and it loads as it is
    opaque = any(state.startswith(("opaque.", "part.")) for state, _ in source.entries)
    for (state, name), shape in slots.items():
        weight, label = pairs.keys.get(name), f"{state} {name}"
        key = (state, weight[1] if weight is not None else name)
        if key in source.entries:
            stored.pop(key, None)
            yield shape_row(label, shape, source.entries[key].shape)
        elif begun and not opaque:
            yield TensorRow(label, "missing", "only in the optimizer")
    for state, name in stored:
        yield TensorRow(f"{state} {name}", "extra", "only in the checkpoint")
