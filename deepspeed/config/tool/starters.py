"""The files that ``ds_config init`` writes: each is valid as it stands."""

from collections.abc import Mapping
from types import MappingProxyType

_HEAD = """\
// {title}
// Comments are allowed. Check this file:   ds_config check FILE --world RANKS
// What every key comes to, and why:        ds_config show FILE --world RANKS
"""

_BATCH = """\
  // Samples per rank in one forward and backward; raise it until memory is full.
  "train_micro_batch_size_per_gpu": {micro},
  // Micro-batches per update. Samples per update = micro batch x this x data-parallel ranks.
  "gradient_accumulation_steps": {steps},
  "gradient_clipping": 1.0,
"""

_BF16 = """\
  // Needs no loss scaling. Master weights and optimizer states stay fp32; on devices without bf16 use an fp16 block.
  "bf16": {"enabled": true},
"""

_FINETUNE = """\
{
%(batch)s
%(bf16)s
  // Delete both blocks when the script makes its own optimizer and schedule.
  "optimizer": {"type": "AdamW", "params": {"lr": 2e-5, "betas": [0.9, 0.999], "weight_decay": 0.01}},
  "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 2e-5, "warmup_num_steps": 100}},

  "zero_optimization": {
    // 1 shards optimizer states, 2 gradients too, 3 parameters too: less memory per rank, more communication.
    "stage": 2
  },
  "steps_per_print": 50
}
"""

_PRETRAIN = """\
{
%(batch)s
%(bf16)s
  "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}},
  // Steps are optimizer updates. The cosine ends at total_num_steps: set it to the length of the run.
  "scheduler": {
    "type": "WarmupCosineLR",
    "params": {"total_num_steps": 100000, "warmup_num_steps": 2000, "cos_min_ratio": 0.1}
  },

  "zero_optimization": {
    // Parameters, gradients and optimizer states are all sharded over the ranks.
    "stage": 3,
    // Elements fetched ahead of their use: more hides more communication and costs memory.
    "stage3_prefetch_bucket_size": 5e7,
    // Parameters up to this many elements (biases, norms) stay whole on every rank.
    "stage3_param_persistence_threshold": 1e5,
    // Lets save_16bit_model write one file with all weights.
    "stage3_gather_16bit_weights_on_model_save": true
  },
  "data_types": {"grad_accum_dtype": "fp32"},
  "steps_per_print": 100
}
"""

_OFFLOAD = """\
{
%(batch)s
%(bf16)s
  "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "betas": [0.9, 0.999], "weight_decay": 0.01}},

  "zero_optimization": {
    // Sharding everything comes first: with N ranks each holds 1/N of all states.
    "stage": 3,
    // Optimizer states, gradients and parameters rest in host memory. When that is too small as well, use a drive:
    // {"device": "nvme", "nvme_path": "/folder/on/the/drive"}, and "max_in_cpu": 0 in the block of the parameters.
    "offload_optimizer": {"device": "cpu", "pin_memory": true},
    "offload_param": {"device": "cpu", "pin_memory": true},

    // Little fetched ahead, little kept for reuse, small persistent parameters only.
    "stage3_prefetch_bucket_size": 1e7,
    "stage3_max_live_parameters": 1e8,
    "stage3_param_persistence_threshold": 1e4
  },
  // What one rank may hold. The need is computed before anything is built, and refused at once when it does not fit.
  // "memory": {"host_limit": "64GiB", "device_limit": "16GiB"},
  "steps_per_print": 50
}
"""

_LORA = """\
{
%(batch)s
%(bf16)s
  // Only the adapters are trained: freeze the base (requires_grad False) before deepspeed.initialize.
  "optimizer": {"type": "AdamW", "params": {"lr": 2e-4, "weight_decay": 0.0}},
  "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 2e-4, "warmup_num_steps": 50}},

  "zero_optimization": {
    // 3 shards the frozen base as well; 2 is faster when the base fits on one device.
    "stage": 3,
    // Adapter matrices are small; above this many elements a parameter is sharded.
    "stage3_param_persistence_threshold": 1e5,
    "stage3_gather_16bit_weights_on_model_save": true
  },
  "steps_per_print": 20
}
"""

# goal -> (title, micro batch, accumulation, body)
GOALS: Mapping[str, tuple[str, int, int, str]] = MappingProxyType(
    {
        "finetune": ("Fine-tuning of all weights, bf16, ZeRO 2.", 4, 4, _FINETUNE),
        "lora": ("Training of adapters over a frozen base, bf16, ZeRO 3.", 4, 4, _LORA),
        "offload": ("A model that does not fit: bf16, ZeRO 3, states in host memory.", 1, 16, _OFFLOAD),
        "pretrain": ("Pre-training from scratch, bf16, ZeRO 3.", 8, 8, _PRETRAIN),
    }
)


def starter(goal: str) -> str:
    """The text of the file for ``goal``, a key of ``GOALS``."""
    title, micro, steps, body = GOALS[goal]
    return _HEAD.format(title=title) + body % {"batch": _BATCH.format(micro=micro, steps=steps), "bf16": _BF16}
