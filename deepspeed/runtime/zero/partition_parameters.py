"""Import path of parameter sharding. Clients replace ``zero_wrapper_for_fp_tensor_constructor`` here; Init reads it."""

from deepspeed.accelerator.device import get_accelerator
from deepspeed.client.zero.gathered import (
    GatheredParameters,
    register_external_parameter,
    unregister_external_parameter,
)
from deepspeed.client.zero.init import (
    Init,
    _orig_torch_arange,
    restore_init_context,
    shutdown_init_context,
    zero_wrapper_for_fp_tensor_constructor,
)
from deepspeed.zero.module.attributes import ZeroParamType
from deepspeed.zero.param import ZeroParamStatus
