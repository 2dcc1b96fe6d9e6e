from deepspeed.runtime.zero import config, partition_parameters, utils
from deepspeed.zero.attributes import ZeroParamType
from deepspeed.zero.client.gathered import (
    GatheredParameters,
    register_external_parameter,
    unregister_external_parameter,
)
from deepspeed.zero.client.init import Init
from deepspeed.zero.client.tiled import TiledLinear, TiledLinearReturnBias
from deepspeed.zero.param import ZeroParamStatus

__all__ = [name for name in globals() if not name.startswith("_")]
