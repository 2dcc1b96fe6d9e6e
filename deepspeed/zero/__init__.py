"""ZeRO: the public helpers of ``deepspeed.zero``; the machinery lives in the submodules."""

from deepspeed.zero.access import (
    GatheredParameters,
    ZeroParamStatus,
    ZeroParamType,
    register_external_parameter,
    unregister_external_parameter,
)
from deepspeed.zero.init import Init

__all__ = [
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "ZeroParamType",
    "register_external_parameter",
    "unregister_external_parameter",
]
