"""Keys that earlier releases of the reference package accepted, and what to use now."""

from collections.abc import Mapping
from types import MappingProxyType

REMOVED_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "amp": "Use the bf16, fp16 or torch_autocast block instead",
        "sparse_gradients": "Delete the key: gradients of nn.Embedding(sparse=True) are handled without a switch",
        "graph_harvesting": "Delete the key and use the compile block",
        "progressive_layer_drop": "Drop layers in the model's own forward",
        "eigenvalue": "Delete the block: the quantization schedule that used it no longer exists",
        "quantize_training": "Use the compression_training block",
        "sparse_attention": "Use torch.nn.attention.flex_attention or the model's own attention",
        "curriculum_learning": "Use data_efficiency.data_sampling.curriculum_learning",
        "nebula": "Use the checkpoint.writer block",
        "zero_optimization.zeropp_loco_param": "Delete the block: error-feedback quantization no longer exists",
        "zero_optimization.legacy_stage1": "Delete the key: there is one implementation of stage 1",
    }
)

REMOVED_OPTIMIZERS: Mapping[str, str] = MappingProxyType({"onebitadam": "Adam", "zerooneadam": "Adam", "onebitlamb": "Lamb"})


def removed_key(path: str) -> str | None:
    """One sentence about a removed key, or None when ``path`` is not one."""
    advice = REMOVED_KEYS.get(path)
    return None if advice is None else f"{path} was removed. {advice}."
