"""Splitting a model: its layers are replaced by those that its plan asks for, until the engine ends."""

import zlib
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from deepspeed.accelerator.device import map_tensors
from deepspeed.comm.collectives import AxisGroup, gather_objects
from deepspeed.comm.mesh.groups import Mesh
from deepspeed.config.model.tensor_parallel import TensorParallelConfig
from deepspeed.errors import DeepSpeedConfigError, UsageError
from deepspeed.monitor.log import log_dist
from deepspeed.sequence.cross_entropy import VocabParallelCausalLMLoss
from deepspeed.tensor import layers
from deepspeed.tensor.differentiable import summed
from deepspeed.tensor.layers import RandomStates, SharedInput, TensorParallelLayer
from deepspeed.tensor.loss import loss_fault
from deepspeed.tensor.parts import guard_saving, put_back
from deepspeed.tensor.sequence import split_sequence
from deepspeed.tensor.splits import Planner, Split, TensorPlan

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


def parallelize(model: nn.Module, mesh: Mesh, wanted: TensorParallelConfig, back: ExitStack) -> None:
    """Replace the layers of ``model`` by their parts on the ranks of ``mesh.tp``; ``back`` restores them.

    The parameters stay the same objects and are cut when ZeRO takes them over. Raises DeepSpeedConfigError for a plan
    that does not fit the model, NotYetError for what cannot be split; nothing has changed then.
    """
    rules = wanted.partition_config is not None and wanted.partition_config.layer_specs
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)] if rules else []
    all_names = None if mesh.pp.alike else [name for some in gather_objects(names, mesh.pp) for name in some]
    unfit = ("sequence_parallel_norms", "vocab_parallel_lm_head")
    if mesh.pp.size > 1 and (asked := [key for key in unfit if getattr(wanted, key)]):
        raise DeepSpeedConfigError(f"tensor_parallel.{asked[0]} is not for pipeline stages; set it to false")
    group, plan = mesh.tp, Planner(model, wanted, mesh.tp.size, mesh.tp.index, all_names=all_names).make()
    _refuse(model, plan, mesh)
    shared, modules = SharedInput(group, random=draws(model)), dict(model.named_modules(remove_duplicate=False))
    back.callback(_unmark, {p: getattr(p, "tp_place", None) for p in model.parameters()})
    made = replace_layers(modules, plan, shared, back)
    for holder, name, number in plan.numbers:
        back.callback(setattr, holder, name, getattr(holder, name))
        setattr(holder, name, number)
    if any(split.local for split in plan.splits.values()):
        back.callback(put_back, model, "_loss_function", model.__dict__.get("_loss_function"))
        model.loss_function = VocabParallelCausalLMLoss(tp_group=group).forward  # type: ignore[assignment]
    sums = [modules[path] for path, split in plan.splits.items() if split.way == "sum"]
    shared_parameters = dict.fromkeys(p for module in sums for p in module.parameters(recurse=False))
    if wanted.sequence_parallel_norms:
        split_sequence(model, shared, shared_parameters.setdefault, back)
    for parameter in shared_parameters:
        if parameter.requires_grad:
            back.callback(parameter.register_hook(partial(summed, group=group)).remove)
    back.callback(model.register_forward_pre_hook(FirstBatch(group), with_kwargs=True).remove)
    back.callback(model.register_forward_hook(partial(_end_forward, shared), always_call=True).remove)
    RandomStates.agree(group)
    guard_saving(model, back)
    counts = Counter(type(layer).__name__ for layer in made)
    text = ", ".join(f"{count} {name}" for name, count in counts.items())
    log_dist(f"tensor parallelism over {group.size} ranks: {text}")


def _refuse(model: nn.Module, plan: TensorPlan, mesh: Mesh) -> None:
    """Raise where the plan leaves logits in parts that nobody can take, or leaves everything whole."""
    name = type(model).__name__
    if any(split.local for split in plan.splits.values()):
        lacks = f"{name} has no loss_function to compute the loss from them"
        if fault := loss_fault(model) if hasattr(type(model), "loss_function") else lacks:
            raise DeepSpeedConfigError(
                f"tensor_parallel.vocab_parallel_lm_head is true: the logits stay in parts, but {fault}. Delete the "
                "key, and the logits are gathered"
            )
    if mesh.pp.size == 1:  # a pipeline stage may have none
        plan.check(model, "tensor_parallel.autotp_size", mesh.tp.size)


def replace_layers(
    modules: dict[str, nn.Module], plan: TensorPlan, shared: SharedInput, back: ExitStack
) -> list[TensorParallelLayer]:
    """Put parts in the places of layers and return the parts; a layer in several places is one part there too."""
    made: dict[int, TensorParallelLayer] = {}
    for path, module in modules.items():
        split = plan.splits.get(path, Split("whole"))
        if split.way in ("sum", "whole"):
            continue
        if id(module) not in made:
            layer = made[id(module)] = _layer(module, split, shared, path)
            layer.train(module.training)
            for name in _HOOKS:
                setattr(layer, name, getattr(module, name))
        parent, _, name = path.rpartition(".")
        setattr(modules[parent], name, made[id(module)])
        back.callback(setattr, modules[parent], name, module)
    return list(made.values())


def _end_forward(shared: SharedInput, *_: Any) -> None:
    shared.end_parts()
    shared.forget()


def draws(model: nn.Module) -> bool:
    """Return whether the model may use dropout, by its modules or by a number in them or in its configuration."""
    holders = [vars(getattr(model, "config", None) or object) if hasattr(model, "config") else {}]
    holders += [vars(module) for module in model.modules()]
    numbers = (v for holder in holders for n, v in holder.items() if "drop" in n and isinstance(v, float))
    layers = (m.p for m in model.modules() if isinstance(m, nn.modules.dropout._DropoutNd))
    return any(number > 0 for number in (*numbers, *layers))


def _unmark(before: dict[nn.Parameter, Any]) -> None:
    for parameter, place in before.items():
        if place is None and tuple(parameter.shape) == getattr(getattr(parameter, "tp_place", None), "shape", None):
            del parameter.tp_place  # type: ignore[attr-defined]


def _layer(module: nn.Module, split: Split, shared: SharedInput, path: str) -> TensorParallelLayer:
    if isinstance(module, nn.Embedding):
        hidden = split.way == "hidden"
        kind: Callable[..., Any] = layers.HiddenParallelEmbedding if hidden else layers.VocabParallelEmbedding
        return kind(module, shared, name=path)
    if split.way == "row":
        return layers.LinearAllreduce(module, shared, name=path, split_input=split.whole, unit=split.unit)
    if split.way == "heads":
        return layers.HeadsLinear(module, shared, name=path, heads=split.heads)
    kind = layers.VocabParallelLinear if split.local else layers.LinearLayer
    return kind(module, shared, name=path, parts=split.parts, gather_output=split.whole, unit=split.unit)


class FirstBatch:
    """Check once whether the ranks that share layers are fed the same batch."""

    def __init__(self, group: AxisGroup) -> None:
        self.group, self.looked = group, False

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compare batches in a forward pre-hook; UsageError (an AssertionError) on all the group's ranks if unequal."""
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
