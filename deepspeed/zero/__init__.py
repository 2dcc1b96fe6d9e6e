"""ZeRO: the public helpers of ``deepspeed.zero``; the machinery lives in the submodules."""

from deepspeed.zero.access import (
    GatheredParameters,
    ZeroParamStatus,
    ZeroParamType,
    register_external_parameter,
    unregister_external_parameter,
)
from deepspeed.zero.generation import unwrap_model_for_generation
from deepspeed.zero.init import Init
from deepspeed.zero.tiling import TiledLinear, TiledLinearReturnBias

__all__ = [
    "GatheredParameters",
    "Init",
    "TiledLinear",
    "TiledLinearReturnBias",
    "ZeroParamStatus",
    "ZeroParamType",
    "register_external_parameter",
    "unregister_external_parameter",
    "unwrap_model_for_generation",
]
