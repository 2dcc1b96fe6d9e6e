"""What a valid configuration asks for and this release does not contain yet."""

from collections.abc import Mapping
from typing import Any

from deepspeed.config.root import DeepSpeedConfig

_ENABLED_BLOCKS = (
    "compression_training",
    "autotuning",
    "hybrid_engine",
    "expert_parallel",
    "data_efficiency",
    "elasticity",
    "weight_quantization",
)
_OBSERVERS = ("tensorboard", "wandb", "csv_monitor", "comet", "flops_profiler")


def _block(cfg: DeepSpeedConfig, name: str) -> Mapping[str, Any]:
    value = cfg.other.get(name)
    return value if isinstance(value, Mapping) else {}


def _size(block: Mapping[str, Any], key: str) -> int:
    value = block.get(key, 0)
    return int(value) if isinstance(value, int | float) else 0


def _anything_enabled(block: Mapping[str, Any]) -> bool:
    """Whether the block, or a block at any depth inside it, is switched on."""
    return block.get("enabled") is True or any(_anything_enabled(item) for item in block.values() if isinstance(item, Mapping))


def _wanted(cfg: DeepSpeedConfig) -> list[tuple[str, bool]]:
    """(key, is it requested) for everything this release lacks; a later release shortens this list."""
    zero, tensor = cfg.zero, _block(cfg, "tensor_parallel")
    nested_tp = tensor.get("tp") if isinstance(tensor.get("tp"), Mapping) else {}
    offloads = [(f"zero_optimization.{name}", getattr(zero, name)) for name in ("offload_optimizer", "offload_param")]
    return [
        *((f'{path}.device "{block.device.value}"', True) for path, block in offloads if block is not None),
        ("zero_optimization.zenflow", zero.zenflow is not None),
        ("zero_optimization.zero_quantized_weights", zero.zero_quantized_weights),
        ("zero_optimization.zero_quantized_nontrainable_weights", zero.zero_quantized_nontrainable_weights),
        ("zero_optimization.zero_quantized_gradients", zero.zero_quantized_gradients),
        ("fp16.fp16_master_weights_and_grads", cfg.fp16.fp16_master_weights_and_grads),
        ("bf16.bf16_master_weights_and_grads", cfg.bf16.bf16_master_weights_and_grads),
        ("bf16.bf16_optimizer_states", cfg.bf16.bf16_optimizer_states),
        ("tensor_parallel.autotp_size", _size(tensor, "autotp_size") > 1),
        ("tensor_parallel.tp.tp_size", _size(nested_tp or {}, "tp_size") > 1),
        ("sequence_parallel_size", (cfg.sequence_parallel_size or 1) > 1),
        ("pipeline.stages", _size(_block(cfg, "pipeline"), "stages") > 1),
        ("compile.deepcompile", _block(cfg, "compile").get("deepcompile") is True),
        ("datastates_ckpt", cfg.other.get("datastates_ckpt", False) is not False),
        *((name, _anything_enabled(_block(cfg, name))) for name in _ENABLED_BLOCKS),
    ]


def unsupported_features(cfg: DeepSpeedConfig) -> list[str]:
    """One sentence per requested feature that would change the training and is not in this release."""
    return [f"{name} is not supported by this release yet. Remove it from the configuration." for name, asked in _wanted(cfg) if asked]


def inert_features(cfg: DeepSpeedConfig) -> list[str]:
    """One sentence per requested report that this release does not write; the training itself is unaffected."""
    names = [name for name in _OBSERVERS if _block(cfg, name).get("enabled") is True]
    names += ["comms_logger"] if "comms_logger" in cfg.other else []
    asked = [
        ("dump_state", cfg.dump_state),
        ("memory_breakdown", cfg.memory_breakdown),
        ("disable_python_gc", cfg.disable_python_gc),
        ("bf16.immediate_grad_update", cfg.bf16.immediate_grad_update),
        ("torch_autocast.lower_precision_safe_modules", cfg.torch_autocast.lower_precision_safe_modules is not None),
    ]
    names += [name for name, on in asked if on]
    return [f"{name} has no effect in this release yet; training goes on without it." for name in names]
