"""Import path of the ZeRO interface."""

from deepspeed.runtime.zero import partition_parameters as partition_parameters
from deepspeed.zero.client.init import Init as Init
from deepspeed.zero.client.safe_state import (
    GatheredParameters as GatheredParameters,
    ZeroParamStatus as ZeroParamStatus,
    ZeroParamType as ZeroParamType,
    register_external_parameter as register_external_parameter,
    unregister_external_parameter as unregister_external_parameter,
)
from deepspeed.zero.client.tiling import TiledLinear as TiledLinear, TiledLinearReturnBias as TiledLinearReturnBias

__all__ = [name for name in globals() if not name.startswith("_")]
