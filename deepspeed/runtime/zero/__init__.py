"""Import path of the ZeRO interface."""

from deepspeed.runtime.zero import partition_parameters
from deepspeed.zero.access import (
    GatheredParameters,
    ZeroParamStatus,
    ZeroParamType,
    register_external_parameter,
    unregister_external_parameter,
)
from deepspeed.zero.init import Init
from deepspeed.zero.tiling import TiledLinear, TiledLinearReturnBias

__all__ = [
    "GatheredParameters",
    "Init",
    "TiledLinear",
    "TiledLinearReturnBias",
    "ZeroParamStatus",
    "ZeroParamType",
    "partition_parameters",
    "register_external_parameter",
    "unregister_external_parameter",
]
