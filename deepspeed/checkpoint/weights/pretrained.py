"""A folder for ``from_pretrained``, written from weights as they come, a bucket at a time."""

import logging
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepspeed.checkpoint.weights.flow import Parcel, WeightFlow
from deepspeed.checkpoint.weights.weights import Stream, write_weights
from deepspeed.observe.log import log_dist
from deepspeed.zero.module.state import whole_shape

Tensors = dict[str, torch.Tensor]


def original_parcels(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> tuple[list[Parcel], Tensors]:
    """Name ``tensors`` as the files of ``module`` do (see ``save_pretrained``); return parcels and meta tensors."""
    ignored = set(getattr(module, "_keys_to_ignore_on_save", None) or ())
    kept = [name for name in tensors if name not in ignored]
    empty = {n: torch.empty(whole_shape(tensors[n]), dtype=tensors[n].dtype, device="meta") for n in kept}
    revert: Callable[..., Tensors] | None = None
    if hasattr(module, "base_model_prefix"):  # a model of transformers, which is imported then
        revert = getattr(sys.modules.get("transformers.core_model_loading"), "revert_weight_conversion", None)
    if revert is not None:
        try:
            reverted = [revert(module, {name: values}) for name, values in empty.items()]
            made = {name: values for tensors in reverted for name, values in tensors.items()}
            if made.keys() == set(revert(module, empty)):
                return [Parcel((name,), partial(revert, module)) for name in kept], made
        except Exception as error:  # whatever a conversion makes of tensors without values
            log_dist(f"save_pretrained: {error}", level=logging.DEBUG)
        log_dist(
            f"save_pretrained: weights of {type(module).__name__} are written as the model has them, not as its files "
            "had them, which would take several at a time; from_pretrained reads both"
        )
    return [Parcel((name,)) for name in kept], empty


def write_pretrained(
    saver: Callable[..., Any] | None, folder: Path, flow: WeightFlow, outputs: Tensors, *, max_shard_size: int | str
) -> None:
    """Write ``outputs`` (names, dtypes, shapes) from ``flow``; the files without weights are written by ``saver``."""
    arrived: Tensors = {}

    def read(name: str, start: int, out: torch.Tensor) -> None:
        while name not in arrived:
            arrived.update(next(flow))
        values = arrived[name].reshape(-1)
        out.copy_(values[start : start + out.numel()])
        if start + out.numel() == values.numel():
            del arrived[name]

    streams = [Stream(n, t.dtype, tuple(t.shape), partial(read, n)) for n, t in outputs.items()]
    if saver is not None:
        saver(folder, state_dict={})
    write_weights(streams, folder, safetensors=True, max_shard_size=max_shard_size)
