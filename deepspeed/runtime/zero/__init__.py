"""Import path of the ZeRO interface."""

from deepspeed.runtime.zero import partition_parameters
from deepspeed.zero.client.init import Init
from deepspeed.zero.client.safe_state import (
    GatheredParameters,
    ZeroParamStatus,
    ZeroParamType,
    register_external_parameter,
    unregister_external_parameter,
)
from deepspeed.zero.client.tiling import TiledLinear, TiledLinearReturnBias

__all__ = [name for name in globals() if not name.startswith("_")]
