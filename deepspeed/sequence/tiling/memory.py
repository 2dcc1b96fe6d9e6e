"""What the block ``sequence`` does to a model of Hugging Face for its memory: lazy logits, and MLPs in tiles."""

import copy
import copyreg
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from deepspeed.accelerator.device import get_accelerator
from deepspeed.client.attrs import replace_attribute
from deepspeed.config.model.sequence import SequenceConfig
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.moe.utils import stacked_experts
from deepspeed.monitor.log import log_dist
from deepspeed.sequence.tiling.logits import LazyHead, tile_bytes
from deepspeed.sequence.tiling.offload import get_checkpoint_hidden_states_offloading_ctx_manager
from deepspeed.sequence.tiling.tiles import tiled

# Attributes of a decoder layer that hold what treats every token alike.
_MLP_NAMES = ("mlp", "feed_forward", "ffn", "block_sparse_moe", "moe", "shared_mlp")
_MLP_FROM = 8  # tiles; below, recomputing them costs more than their memory is worth


def save_memory(model: nn.Module, block: SequenceConfig, *, shared: bool, back: ExitStack) -> None:
    """Wire ``model`` as ``block`` says; ``back`` undoes it. ``shared``: tensor-parallel ranks share its layers.

    Raises DeepSpeedConfigError where a key asks for what the model does not have.
    """
    heads = [] if shared or block.loss == "whole" else [*dict.fromkeys(_heads(model))]
    if block.loss == "tiled" and not heads:
        why = "its layers are shared by tensor-parallel ranks" if shared else "it has no get_output_embeddings()"
        raise DeepSpeedConfigError(
            f'sequence.loss is "tiled", which needs the output layer of a language model as those of Transformers, and '
            f'{type(model).__name__} has none for it: {why}. Use "auto" or "whole"'
        )
    for head in heads:
        replace_attribute(head, "forward", LazyHead(head, always=block.loss == "tiled"), back)
    mlps = [] if block.mlp_tiles == 1 else [*dict.fromkeys(_mlps(model))]
    if isinstance(block.mlp_tiles, int) and block.mlp_tiles > 1 and not mlps:
        raise DeepSpeedConfigError(
            f"sequence.mlp_tiles is {block.mlp_tiles}, and no layer of {type(model).__name__} has an MLP under the "
            f"names {', '.join(_MLP_NAMES)}. Delete the key, or call TiledMLP.apply in the model"
        )
    logged: list[int] = []
    # Norms compute in fp32: their values are as large as those of an MLP.
    norms = [m for m in model.modules() if mlps and type(m).__name__.endswith(("RMSNorm", "LayerNorm"))]
    for mlp in (*mlps, *norms):
        replace_attribute(mlp, "forward", _TiledForward(mlp, block.mlp_tiles, logged), back)
    if block.offload_activations and get_accelerator().device_name() == "cpu":
        log_dist("sequence.offload_activations has no effect: on the CPU activations are in host memory anyway")
    elif block.offload_activations:
        manager = get_checkpoint_hidden_states_offloading_ctx_manager()
        replace_attribute(model, "forward", partial(manager.run, model.forward), back)


def _heads(model: nn.Module) -> Iterator[nn.Module]:
    """Yield output layers whose logits go to a loss over words."""
    for module in model.modules():
        getter = getattr(type(module), "get_output_embeddings", None)
        head = getter(module) if getter is not None else None
        if isinstance(head, nn.Module) and hasattr(module, "loss_function"):  # which of a model without head warns
            yield head


def _mlps(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the MLPs of repeated layers; of a mixture its stacked experts, as routers and their losses need all."""
    layers = [layer for stack in model.modules() if isinstance(stack, nn.ModuleList) for layer in stack]
    for layer in layers:
        for name in _MLP_NAMES:
            mlp = layer._modules.get(name)
            if mlp is None:
                continue
            experts = [module for module in mlp.modules() if stacked_experts(module)]
            mixed = experts or any(isinstance(module, nn.ModuleList) for module in mlp.modules())
            yield from experts if mixed else [mlp]


class _TiledForward:
    """The ``forward`` of an MLP, or of stacked experts, in ``tiles`` tiles or as many as bytes ask for."""

    def __init__(self, module: nn.Module, tiles: int | str, logged: list[int]) -> None:
        self._module, self._tiles, self._logged = module, tiles, logged
        self.forward: Callable[..., torch.Tensor] = module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the module in tiles of its tensors, where they all are of the same tokens."""
        fits = args and not kwargs and all(isinstance(value, torch.Tensor) and value.dim() > 1 for value in args)
        if not fits or len({value.shape[:-1] for value in args}) > 1 or torch.compiler.is_compiling():
            return self.forward(*args, **kwargs)
        dim = args[0].dim() - 2
        tiles = min(self._number(*args), args[0].shape[dim])
        if tiles <= 1:
            return self.forward(*args)
        params = [*self._module.parameters()]
        return tiled(self.forward, args, dims=[dim] * len(args), tiles=tiles, join=dim, params=params)

    def _number(self, hidden: torch.Tensor, *more: torch.Tensor) -> int:
        if isinstance(self._tiles, int):
            return self._tiles
        size = sum(p.numel() for p in self._module.parameters() if p.dim() > 1) / hidden.shape[-1]
        size = size or 3 * hidden.shape[-1]  # of a norm: in fp32, and a narrow one
        if experts := stacked_experts(self._module):  # of this rank, whose parameters these are
            size *= (more[0].shape[-1] if more else 1) / experts
        # once for the values, once for their gradients
        nbytes = 2 * size * hidden.element_size() * hidden.numel() / hidden.shape[-1]
        tiles = math.ceil(nbytes / tile_bytes(hidden.device))
        if tiles < _MLP_FROM:
            return 1
        if not self._logged:
            self._logged.append(tiles)
            values = f"intermediate values of {type(self._module).__name__} and their gradients"
            text = f"{values} take {nbytes / 2**30:.1f} GiB"
            log_dist(f"{text}: it is computed in {tiles} tiles or less, again in the backward (key sequence.mlp_tiles)")
        return tiles


for _placed in (LazyHead, _TiledForward):  # a pickle or copy of the module has its plain forward
    copyreg.pickle(_placed, lambda placed: (copy.copy, (placed.forward,)))  # type: ignore[attr-defined]
