"""Splitting a model: its layers are replaced by those that its plan asks for, until the engine ends."""

import zlib
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from deepspeed.comm.collectives import AxisGroup, gather_objects, sum_scalars
from deepspeed.device import map_tensors
from deepspeed.errors import DeepSpeedConfigError, UsageError
from deepspeed.observe.log import log_dist
from deepspeed.tensor.layers import (
    HeadsLinear,
    HiddenParallelEmbedding,
    LinearAllreduce,
    LinearLayer,
    SharedInput,
    TensorParallelLayer,
    VocabParallelEmbedding,
    VocabParallelLinear,
)
from deepspeed.tensor.loss import PartsCausalLoss
from deepspeed.tensor.plan import Planner, Split, SplitWishes

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


def parallelize(model: nn.Module, group: AxisGroup, wanted: SplitWishes, back: ExitStack) -> None:
    """Replace the layers of ``model`` by their parts on the ranks of ``group``; ``back`` restores them.

    The parameters stay the same objects and are cut when ZeRO takes them over. Raises DeepSpeedConfigError for a plan
    that does not fit the model, NotYetError for what cannot be split; nothing has changed then.
    """
    plan = Planner(model, wanted, group.size).make()
    shared, modules = SharedInput(group), dict(model.named_modules(remove_duplicate=False))
    local = [path for path, split in plan.splits.items() if split.local]
    if local and not hasattr(type(model), "loss_function"):
        raise DeepSpeedConfigError(
            "tensor_parallel.vocab_parallel_lm_head is true: the logits stay in parts, but "
            f"{type(model).__name__} has no loss_function to compute the loss from them; leave it out and call "
            "deepspeed.tensor.loss.vocab_parallel_cross_entropy, or let it be null"
        )
    if all(split.way in ("sum", "whole") for split in plan.splits.values()):
        raise DeepSpeedConfigError(
            f"tensor_parallel.autotp_size is {group.size}, but no layer of {type(model).__name__} is known to be "
            "one that can be split; describe its layers in tensor_parallel.partition_config.layer_specs"
        )
    made: dict[int, TensorParallelLayer] = {}
    marked = {p: getattr(p, "tp_place", None) for p in model.parameters()}
    back.callback(_unmark, marked)
    for path, split in plan.splits.items():
        if split.way == "sum":
            for parameter in modules[path].parameters(recurse=False):
                if parameter.requires_grad:
                    back.callback(parameter.register_hook(partial(_sum_gradient, group=group)).remove)
    for path, module in modules.items():
        split = plan.splits.get(path, Split("whole"))
        if split.way in ("sum", "whole"):
            continue
        if id(module) not in made:
            made[id(module)] = _layer(module, split, shared, path)
            for name in _HOOKS:
                setattr(made[id(module)], name, getattr(module, name))
            made[id(module)].train(module.training)
        parent, _, name = path.rpartition(".")
        setattr(modules[parent], name, made[id(module)])
        back.callback(setattr, modules[parent], name, module)
    for holder, name, number in plan.numbers:
        back.callback(setattr, holder, name, getattr(holder, name))
        setattr(holder, name, number)
    if local:
        before = model.__dict__.get("_loss_function")
        model.loss_function = PartsCausalLoss(group)  # type: ignore[assignment]
        back.callback(setattr, model, "_loss_function", before) if before else back.callback(
            delattr, model, "_loss_function"
        )
    guard = FirstBatch(group)
    back.callback(model.register_forward_pre_hook(guard, with_kwargs=True).remove)
    back.callback(model.register_forward_hook(lambda *_: shared.forget(), always_call=True).remove)
    counts: dict[str, int] = {}
    for layer in made.values():
        counts[type(layer).__name__] = counts.get(type(layer).__name__, 0) + 1
    text = ", ".join(f"{count} {name}" for name, count in counts.items())
    log_dist(f"tensor parallelism over {group.size} ranks: {text}")


def _unmark(before: dict[nn.Parameter, Any]) -> None:
    for parameter, place in before.items():
        if place is None and tuple(parameter.shape) == getattr(getattr(parameter, "tp_place", None), "shape", None):
            del parameter.tp_place  # type: ignore[attr-defined]


def _sum_gradient(grad: torch.Tensor, *, group: AxisGroup) -> torch.Tensor:
    return sum_scalars(grad.clone(memory_format=torch.contiguous_format), group)


def _layer(module: nn.Module, split: Split, shared: SharedInput, path: str) -> TensorParallelLayer:
    if isinstance(module, nn.Embedding):
        kind: Callable[..., Any] = HiddenParallelEmbedding if split.way == "hidden" else VocabParallelEmbedding
        return kind(module, shared, name=path)
    if split.way == "row":
        return LinearAllreduce(module, shared, name=path, split_input=split.whole, unit=split.unit)
    if split.way == "heads":
        return HeadsLinear(module, shared, name=path, heads=split.heads)
    kind = VocabParallelLinear if split.local else LinearLayer
    return kind(module, shared, name=path, parts=split.parts, gather_output=split.whole, unit=split.unit)


class FirstBatch:
    """Looks once whether the ranks that share layers are fed the same batch."""

    def __init__(self, group: AxisGroup) -> None:
        self.group, self.looked = group, False

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A forward pre-hook. Raises UsageError (an AssertionError) on every rank of the group where they differ."""
        if self.looked:
            return
        self.looked = True
        digest = [0]

        def add(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.is_meta and tensor.layout is torch.strided:
                flat = tensor.detach().cpu().contiguous().view(-1)
                digest[0] = zlib.crc32(flat.view(torch.uint8).numpy().tobytes(), digest[0])
            return tensor

        map_tensors((args, kwargs), add)
        digests = gather_objects(digest[0], self.group)
        if len(set(digests)) > 1:
            other = next(rank for rank, seen in zip(self.group.ranks, digests, strict=True) if seen != digests[0])
            raise UsageError(
                f"ranks {self.group.ranks[0]} and {other} share every layer (tensor parallelism) and were fed "
                "different batches; deal data out by deepspeed.utils.groups.get_data_parallel_rank(), not by the rank "
                "in the job"
            )
