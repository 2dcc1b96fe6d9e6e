"""ZeRO: the public helpers of ``deepspeed.zero``; the machinery lives in the submodules."""

from types import ModuleType as _Module

from deepspeed.client.zero.gathered import (
    GatheredParameters as GatheredParameters,
    register_external_parameter as register_external_parameter,
    unregister_external_parameter as unregister_external_parameter,
    unwrap_model_for_generation as unwrap_model_for_generation,
)
from deepspeed.client.zero.init import Init as Init
from deepspeed.client.zero.tiled import TiledLinear as TiledLinear, TiledLinearReturnBias as TiledLinearReturnBias
from deepspeed.zero.module.attributes import ZeroParamType as ZeroParamType
from deepspeed.zero.param import ZeroParamStatus as ZeroParamStatus

__all__ = [name for name, value in globals().items() if not (name.startswith("_") or isinstance(value, _Module))]
