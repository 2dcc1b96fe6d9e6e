"""Import path of parameter sharding. Clients replace ``zero_wrapper_for_fp_tensor_constructor`` here; Init reads it."""

from deepspeed.device import get_accelerator
from deepspeed.zero.attributes import ZeroParamType
from deepspeed.zero.client.gathered import (
    GatheredParameters,
    register_external_parameter,
    unregister_external_parameter,
)
from deepspeed.zero.client.init import (
    Init,
    _orig_torch_arange,
    restore_init_context,
    shutdown_init_context,
    zero_wrapper_for_fp_tensor_constructor,
)
from deepspeed.zero.param import ZeroParamStatus
