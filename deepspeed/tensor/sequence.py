"""Norms and residuals on a part of the sequence (Korthikanti et al. 2022).

Between the split layers each tensor-parallel rank keeps its part of the tokens alone, so the activations there take a
share of the memory. The sum after a row-parallel layer becomes one of which each rank keeps its tokens; the input of
the next split module is joined before it; the list of blocks begins with a cut and ends with a join.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from deepspeed.comm.collectives import AxisGroup
from deepspeed.errors import DeepSpeedConfigError, UsageError
from deepspeed.tensor.differentiable import cut_parts, join_parts
from deepspeed.tensor.layers import HeadsLinear, LinearAllreduce, LinearLayer, SharedInput, TensorParallelLayer
from deepspeed.zero.partition import find_blocks
from deepspeed.zero.regions import bounds


def split_sequence(
    model: nn.Module, shared: SharedInput, sums: Callable[[nn.Parameter], None], back: ExitStack
) -> None:
    """Let the blocks of ``model``, whose layers are split already, work on parts of the sequence outside them.

    ``sums``: lets the gradients of a parameter be summed over the ranks. Raises DeepSpeedConfigError for models whose
    blocks do not keep the split layers in modules of their own, and for dropout.
    """
    blocks = [(path, block) for path, block in find_blocks(model) if _layers(block)]
    if not blocks or shared.random:
        why = "it drops out numbers" if blocks else "it has no list of blocks with split layers"
        raise DeepSpeedConfigError(
            f"tensor_parallel.sequence_parallel_norms: {type(model).__name__} cannot be cut so: {why}"
        )
    for path, block in blocks:
        owners = {layer: owner for owner in block.modules() for layer in owner.children() if layer in _layers(block)}
        inside = [m for owner in set(owners.values()) for m in owner.modules()]
        if block in owners.values() or any(type(m) is nn.Linear for m in inside):
            raise DeepSpeedConfigError(
                f"tensor_parallel.sequence_parallel_norms: {path} has split layers beside its norms, or whole layers "
                "beside split ones; they need modules of their own"
            )
        for owner in dict.fromkeys(owners.values()):
            back.callback(owner.register_forward_pre_hook(partial(_joined, shared.group), with_kwargs=True).remove)
        for layer in owners:
            _on_parts(layer, sums)
        for module in (m for m in block.modules() if m not in inside):
            for parameter in module.parameters(recurse=False):
                sums(parameter)
    first, last = blocks[0][1], blocks[-1][1]
    back.callback(first.register_forward_pre_hook(partial(_cut, shared.group), with_kwargs=True).remove)
    back.callback(last.register_forward_hook(partial(_whole, shared.group)).remove)


def _layers(block: nn.Module) -> list[TensorParallelLayer]:
    return [m for m in block.modules() if isinstance(m, TensorParallelLayer)]


def _on_parts(layer: nn.Module, sums: Callable[[nn.Parameter], None]) -> None:
    """Set the layer to take joined input, whose gradients it sums on their way back, and keep a part of the tokens."""
    if isinstance(layer, LinearLayer | HeadsLinear):
        layer.input_sums = True
    if isinstance(layer, HeadsLinear):
        for parameter in layer.parameters():
            sums(parameter)
    if isinstance(layer, LinearAllreduce):
        layer.keeps_tokens = True
        if layer.bias is not None:
            sums(layer.bias)


def _swapped(args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return the arguments with another hidden state: the keyword of that name, or the first tensor."""
    if isinstance(kwargs.get("hidden_states"), torch.Tensor):
        return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}
    at = next(i for i, value in enumerate(args) if isinstance(value, torch.Tensor))
    return (*args[:at], change(args[at]), *args[at + 1 :]), kwargs


def _cut(group: AxisGroup, module: nn.Module, args: Any, kwargs: Any) -> Any:
    def part(hidden: torch.Tensor) -> torch.Tensor:
        if hidden.shape[1] % group.size:
            raise UsageError(
                f"tensor_parallel.sequence_parallel_norms: a sequence of {hidden.shape[1]} tokens does not divide over "
                f"{group.size} tensor-parallel ranks; pad it to a multiple"
            )
        return cut_parts(hidden, group, 1, edges=bounds(hidden.shape[1], group.size))

    return _swapped(args, kwargs, part)


def _all_tokens(part: torch.Tensor, group: AxisGroup, *, partial_gradient: bool = False) -> torch.Tensor:
    edges = bounds(part.shape[1] * group.size, group.size)
    return join_parts(part, group, 1, edges=edges, partial_gradient=partial_gradient)


def _joined(group: AxisGroup, module: nn.Module, args: Any, kwargs: Any) -> Any:
    return _swapped(args, kwargs, partial(_all_tokens, group=group, partial_gradient=True))


def _whole(group: AxisGroup, module: nn.Module, args: Any, output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return _all_tokens(output, group)
    return (_all_tokens(output[0], group), *output[1:])
