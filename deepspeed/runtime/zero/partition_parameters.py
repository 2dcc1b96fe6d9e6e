"""Import path of parameter sharding. Clients replace ``zero_wrapper_for_fp_tensor_constructor`` here; Init looks it up here."""

from deepspeed.device import get_accelerator
from deepspeed.zero.access import (
    GatheredParameters,
    ZeroParamStatus,
    ZeroParamType,
    register_external_parameter,
    unregister_external_parameter,
)
from deepspeed.zero.init import (
    Init,
    _orig_torch_arange,
    restore_init_context,
    shutdown_init_context,
    zero_wrapper_for_fp_tensor_constructor,
)

__all__ = [
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "ZeroParamType",
    "_orig_torch_arange",
    "get_accelerator",
    "register_external_parameter",
    "restore_init_context",
    "shutdown_init_context",
    "unregister_external_parameter",
    "zero_wrapper_for_fp_tensor_constructor",
]
