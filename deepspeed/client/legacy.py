"""Names that programs import for their own sake: most are no more than that here, and the classes have no instance."""

import argparse
from collections.abc import Mapping
from typing import Any

from deepspeed.config import Bf16Config
from deepspeed.errors import pending_class, pending_function

_INSTEAD = "Configure fp16 or bf16 and call deepspeed.initialize."

BF16_Optimizer = pending_class("deepspeed.runtime.bf16_optimizer.BF16_Optimizer", _INSTEAD)
FP16_Optimizer = pending_class("deepspeed.runtime.fp16.fused_optimizer.FP16_Optimizer", _INSTEAD)
FP16_UnfusedOptimizer = pending_class("deepspeed.runtime.fp16.unfused_optimizer.FP16_UnfusedOptimizer", _INSTEAD)

_BLOCK = "The block zero_optimization.zenflow works with this package's AdamW and Adam (DeepSpeedCPUAdam, FusedAdam)."

ZenFlowCPUAdam = pending_class("deepspeed.ops.adam.ZenFlowCPUAdam", _BLOCK)
ZenFlowSelectiveAdamW = pending_class("deepspeed.ops.adam.ZenFlowSelectiveAdamW", _BLOCK)
autocast_if_enabled = pending_function("deepspeed.runtime.engine.autocast_if_enabled", "Use torch.autocast.")
get_numactl_cmd = pending_function(
    "deepspeed.utils.get_numactl_cmd", "The launcher binds ranks to cores with --bind_cores_to_rank."
)


def get_bfloat16_config(param_dict: Mapping[str, Any]) -> Bf16Config:
    """Parse the block ``bf16``, or ``bfloat16``, of a configuration dict. Raises ValueError for wrong content."""
    blocks = (param_dict.get(name) for name in ("bf16", "bfloat16"))
    return Bf16Config(**next((block for block in blocks if block is not None), {}))


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--deepspeed``, ``--deepspeed_config`` and their deprecated spellings to ``parser`` and return it."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    for flag, text in (("deepspeed", "Enable DeepSpeed (helper flag for user code)"), ("deepscale", "Deprecated")):
        group.add_argument(f"--{flag}", action="store_true", help=text)
        group.add_argument(f"--{flag}_config", type=str, help="DeepSpeed json configuration file.")
    return parser
