"""The configurations that other programs write parse as the key table says."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from deepspeed.config import DeepSpeedConfig, DeepSpeedConfigError, load_config
from tests.harness.rows import for_each

ADAMW_AUTO = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}
WARMUP_AUTO = {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
}
SCALE = {"loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1}
SWITCHES = dict.fromkeys(("allgather_partitions", "overlap_comm", "reduce_scatter", "contiguous_gradients"), True)
BATCH = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
BATCH |= {"gradient_clipping": 1.0}
SIZED_BY_THE_MODEL = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
ON, OFF = {"enabled": True}, {"enabled": False}

# The files of Transformers' documentation and tests.
HF_ZERO2 = {
    "fp16": {"enabled": "auto", **SCALE},
    "bf16": {"enabled": "auto"},
    "optimizer": ADAMW_AUTO,
    "scheduler": WARMUP_AUTO,
    "zero_optimization": {"stage": 2, **SWITCHES, "allgather_bucket_size": 2e8, "reduce_bucket_size": 2e8},
    **dict.fromkeys(BATCH, "auto"),
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
}
HF_ZERO3 = HF_ZERO2 | {
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        **dict.fromkeys(SIZED_BY_THE_MODEL, "auto"),
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}


def filled_by_transformers(config: dict[str, Any], hidden: int = 64) -> dict[str, Any]:
    """What Trainer makes of an all-auto file before it calls ``initialize`` (client_surface 2.1)."""
    out = copy.deepcopy(config) | BATCH | {"steps_per_print": float("inf")}
    out["optimizer"]["params"] = {"lr": 5e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
    out["scheduler"]["params"] = {"warmup_min_lr": 0, "warmup_max_lr": 5e-5, "warmup_num_steps": 10}
    out["fp16"]["enabled"], out["bf16"]["enabled"] = False, True
    out |= {"checkpoint": {"use_node_local_storage": True}, "tensor_parallel": {"autotp_size": 1}}
    sizes = dict(zip(SIZED_BY_THE_MODEL, (hidden * hidden, int(0.9 * hidden * hidden), 10 * hidden), strict=True))
    zero = out["zero_optimization"]
    zero |= {key: size for key, size in sizes.items() if zero.get(key) == "auto"}
    return out


def accelerate(stage: int, precision: dict[str, Any]) -> dict[str, Any]:
    """What Accelerate builds without a file (client_surface 2.2)."""
    none = {"device": "none", "nvme_path": None}
    zero: dict[str, Any] = {"stage": stage, "offload_optimizer": none, "offload_param": none}
    zero["stage3_gather_16bit_weights_on_model_save"] = False
    others = {"zero_optimization": zero, "steps_per_print": float("inf"), "zero_allow_untested_optimizer": True}
    return {**BATCH, **others, **precision}


LIGHTNING = {
    "activation_checkpointing": {
        **dict.fromkeys(("partition_activations", "cpu_checkpointing"), False),
        **dict.fromkeys(("contiguous_memory_optimization", "synchronize_checkpoint_boundary"), False),
    },
    "aio": {"block_size": 1048576, "queue_depth": 8, "single_submit": False, "overlap_events": True, "thread_count": 1},
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {
        "stage": 2,
        **SWITCHES,
        "allgather_bucket_size": 200_000_000,
        "reduce_bucket_size": 200_000_000,
        "sub_group_size": 1_000_000_000_000,
    },
    "gradient_accumulation_steps": 1,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 0.0,
    "bf16": {"enabled": True},
}
LIGHTNING_FP16 = {key: value for key, value in LIGHTNING.items() if key != "bf16"} | {"fp16": {**ON, **SCALE}}
FABRIC = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
OPENRLHF = {
    "steps_per_print": 100,
    "zero_optimization": {
        "stage": 3,
        **dict.fromkeys(("stage3_max_live_parameters", "stage3_max_reuse_distance", "sub_group_size"), "auto"),
        **dict.fromkeys(SIZED_BY_THE_MODEL, "auto"),
        "offload_param": {"device": "none"},
        "offload_optimizer": {"device": "none", "pin_memory": True},
    },
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "prescale_gradients": False,
    "wall_clock_breakdown": False,
    "data_types": {"grad_accum_dtype": "fp32"},
    "train_micro_batch_size_per_gpu": 2,
    "train_batch_size": 8,
}
# The keys that DeepSpeedExamples combines, as often as they occur there.
EXAMPLES_CIFAR = {
    "train_batch_size": 16,
    "steps_per_print": 2000,
    "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000}},
    "gradient_clipping": 1.0,
    "prescale_gradients": False,
    "bf16": {"enabled": False},
    "fp16": {
        **ON,
        "fp16_master_weights_and_grads": False,
        **{**SCALE, "loss_scale_window": 500, "initial_scale_power": 15},
    },
    "wall_clock_breakdown": False,
    "zero_optimization": {
        "stage": 2,
        **SWITCHES,
        "allgather_bucket_size": 50000000,
        "reduce_bucket_size": 50000000,
        "cpu_offload": False,
    },
}
EXAMPLES_CHAT = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 4,
    "steps_per_print": 10,
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "offload_param": {"device": "none"},
        "offload_optimizer": {"device": "none"},
        "stage3_param_persistence_threshold": 1e4,
        "stage3_max_live_parameters": 3e7,
        "stage3_prefetch_bucket_size": 3e7,
        "memory_efficient_linear": False,
    },
    "bfloat16": {"enabled": True},
    "gradient_clipping": 1.0,
    "prescale_gradients": False,
    "wall_clock_breakdown": False,
    "hybrid_engine": {
        "enabled": False,
        "max_out_tokens": 512,
        "inference_tp_size": 1,
        "release_inference_cache": False,
        "pin_parameters": True,
        "tp_gather_partition_size": 8,
    },
    "tensorboard": {**OFF, "output_path": "step1/ds_tensorboard_logs/", "job_name": "step1_model_tensorboard"},
}

ACCEPTED = {
    "transformers zero 2": filled_by_transformers(HF_ZERO2),
    "transformers zero 3": filled_by_transformers(HF_ZERO3),
    "accelerate stage 0": accelerate(0, {"bf16": OFF, "fp16": OFF}),
    "accelerate stage 2 bf16": accelerate(2, {"bf16": ON, "fp16": OFF}),
    "accelerate stage 3 fp16": accelerate(3, {"fp16": {**ON, "auto_cast": True}, "bf16": OFF}),
    "accelerate fp8": accelerate(2, {"msamp": {"enabled": True, "opt_level": "O1"}}),
    "lightning": LIGHTNING,
    "lightning fp16": LIGHTNING_FP16,
    "lightning, offload false": LIGHTNING | {"zero_optimization": {"stage": 2, "offload_optimizer": False}},
    "fabric": FABRIC,
    "openrlhf": OPENRLHF,
    "trl": accelerate(
        3,
        {"zero_optimization.reduce_bucket_size": 4096, "zero_optimization.stage3_prefetch_bucket_size": 0.9 * 64 * 64},
    ),
    "examples, cifar": EXAMPLES_CIFAR,
    "examples, chat": EXAMPLES_CHAT,
}


@for_each("name", ACCEPTED)
def test_accepted(name: str) -> None:
    before = copy.deepcopy(ACCEPTED[name])
    config = load_config(ACCEPTED[name], world_size=2)
    assert isinstance(config, DeepSpeedConfig) and config.source is ACCEPTED[name]
    assert before == ACCEPTED[name], "clients go on reading the dict they handed over"


# Those without keys of other programs.
PLAIN = [name for name in ACCEPTED if name not in ("trl", "accelerate fp8")]


def test_the_same_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    for name in PLAIN:
        path.write_text(json.dumps(ACCEPTED[name], indent=2))
        read, given = load_config(path, world_size=2), load_config(ACCEPTED[name], world_size=2)
        assert read.model_copy(update={"source": {}}) == given.model_copy(update={"source": {}}), name


@pytest.mark.parametrize("config", [HF_ZERO2, HF_ZERO3], ids=["zero 2", "zero 3"])
def test_all_auto_files_are_for_an_integration(config: dict[str, Any]) -> None:
    assert load_config(config, world_size=2, lenient=True).zero_stage == config["zero_optimization"]["stage"]
    with pytest.raises(DeepSpeedConfigError, match='still "auto"'):
        load_config(config, world_size=2)


# What asks for it beside other keys; keys that ask alone are in test_config_values.py and test_config_removed.py.
REFUSED: dict[str, dict[str, Any]] = {
    "tensor_parallel.tp_overlap_comm": {"tensor_parallel": {"autotp_size": 2, "tp_overlap_comm": True}},
    "zero_optimization.zenflow.offload": {
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "zenflow": {"offload": True}}
    },
    "hybrid_engine.enable_cuda_graph": {"hybrid_engine": {"enabled": True, "enable_cuda_graph": True}},
}


@pytest.mark.parametrize("path", REFUSED)
def test_what_is_not_there_is_refused_by_name(path: str) -> None:
    with pytest.raises(DeepSpeedConfigError) as caught:
        load_config({"train_batch_size": 4, **REFUSED[path]}, world_size=2)
    assert path in str(caught.value) and "not in this release yet" in str(caught.value)
