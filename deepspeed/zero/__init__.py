"""ZeRO: the public helpers of ``deepspeed.zero``; the machinery lives in the submodules."""

from types import ModuleType as _Module

from deepspeed.zero.client.generation_gather import unwrap_model_for_generation as unwrap_model_for_generation
from deepspeed.zero.client.init import Init as Init
from deepspeed.zero.client.safe_state import (
    GatheredParameters as GatheredParameters,
    ZeroParamStatus as ZeroParamStatus,
    ZeroParamType as ZeroParamType,
    register_external_parameter as register_external_parameter,
    unregister_external_parameter as unregister_external_parameter,
)
from deepspeed.zero.client.tiling import TiledLinear as TiledLinear, TiledLinearReturnBias as TiledLinearReturnBias

__all__ = [name for name, value in globals().items() if not (name.startswith("_") or isinstance(value, _Module))]
