"""Keys that earlier releases of the reference package accepted, and what to use now."""

from collections.abc import Mapping
from typing import Any

from deepspeed.config.explain.lines import enclosing

_QUANTIZE = "Quantize with the torchao library (its quantization.quantize_, or its QAT quantizers) and train the result"
_PRUNE = "Prune with torch.nn.utils.prune, or use the sparsity tools of the torchao library, and train the result"
REMOVED_KEYS: Mapping[str, str] = {
    "amp": "Use the bf16, fp16 or torch_autocast block instead",
    "sparse_gradients": "Delete the key: gradients of nn.Embedding(sparse=True) are handled without a switch",
    "graph_harvesting": "Delete the key and use the compile block",
    "progressive_layer_drop": "Drop layers in the model's own forward",
    "eigenvalue": "Delete the block: the quantization schedule that used it no longer exists",
    "quantize_training": _QUANTIZE,
    "sparse_attention": "Use torch.nn.attention.flex_attention or the model's own attention",
    "curriculum_learning": "Use the block data_efficiency.data_sampling.curriculum_learning; the keys go under "
    "curriculum_metrics.<name>",
    "nebula": "Use the checkpoint block (checkpoint.writer for how files are written) and an ordinary folder",
    "elasticity": "Delete the block and write the batch sizes; what starts the job restarts it (torchrun "
    "--max-restarts)",
    "compression_training": _QUANTIZE,
    "compression_training.layer_reduction": "Build the smaller model yourself and copy the layers to keep into it",
    **{f"compression_training.{name}_quantization": _QUANTIZE for name in ("weight", "activation")},
    **{f"compression_training.{name}_pruning": _PRUNE for name in ("sparse", "row", "head", "channel")},
    "zero_optimization.zeropp_loco_param": "Delete the block: error-feedback quantization no longer exists",
    "zero_optimization.legacy_stage1": "Delete the key: there is one implementation of stage 1",
    **{
        f"optimizer.params.{name}": "Delete the key: compressed-communication optimizers no longer exist"
        for name in (
            *("freeze_step", "cuda_aware", "comm_backend_name", "var_freeze_step", "var_update_scaler", "coeff_beta"),
            *("local_step_scaler", "local_step_clipper", "factor_max", "factor_min", "factor_threshold"),
        )
    },
}
"""Path of a key, or of a whole block, -> what to do instead."""
REMOVED_OPTIMIZERS: Mapping[str, str] = {"onebitadam": "Adam", "zerooneadam": "Adam", "onebitlamb": "Lamb"}


def removed_key(path: str) -> str | None:
    """One sentence about a removed key, with the advice of the innermost block that has one; None when it is none."""
    block = enclosing(path, REMOVED_KEYS)
    return f"{path} was removed. {REMOVED_KEYS[block]}." if block else None


def says_off(value: Any) -> bool:
    """Whether the value of a removed key only says that the feature is not wanted, which needs no replacement."""
    if not isinstance(value, Mapping):
        return value is None or value is False
    if "enabled" in value:
        return value["enabled"] in (None, False)
    if "shared_parameters" in value:
        return says_off(value["shared_parameters"])
    return all(map(says_off, value.values()))


def removed_parts(path: str, value: Any) -> list[str]:
    """The removed keys that ``path: value`` asks for, as precisely as there is advice; empty when it says "off"."""
    if says_off(value):
        return []
    inner = value if isinstance(value, Mapping) else {}
    asked = [f"{path}.{key}" for key, item in inner.items() if f"{path}.{key}" in REMOVED_KEYS and not says_off(item)]
    return asked or [path]
