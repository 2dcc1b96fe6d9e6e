"""Import path of parameter sharding. Clients replace ``zero_wrapper_for_fp_tensor_constructor`` here; Init looks it up
here.
"""

from deepspeed.device import get_accelerator
from deepspeed.zero.client.init import (
    Init,
    _orig_torch_arange,
    restore_init_context,
    shutdown_init_context,
    zero_wrapper_for_fp_tensor_constructor,
)
from deepspeed.zero.client.safe_state import (
    GatheredParameters,
    ZeroParamStatus,
    ZeroParamType,
    register_external_parameter,
    unregister_external_parameter,
)
