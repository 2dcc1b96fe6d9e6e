from deepspeed.client.zero.gathered import (
    GatheredParameters,
    register_external_parameter,
    unregister_external_parameter,
)
from deepspeed.client.zero.init import Init
from deepspeed.client.zero.tiled import TiledLinear, TiledLinearReturnBias
from deepspeed.runtime.zero import config, partition_parameters, utils
from deepspeed.zero.module.attributes import ZeroParamType
from deepspeed.zero.param import ZeroParamStatus

__all__ = [name for name in globals() if not name.startswith("_")]
