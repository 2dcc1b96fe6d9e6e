"""Import path of parameter sharding. Clients replace ``zero_wrapper_for_fp_tensor_constructor`` here; Init looks it up
here.
"""

from deepspeed.device import get_accelerator as get_accelerator
from deepspeed.zero.client.init import (
    Init as Init,
    _orig_torch_arange as _orig_torch_arange,
    restore_init_context as restore_init_context,
    shutdown_init_context as shutdown_init_context,
    zero_wrapper_for_fp_tensor_constructor as zero_wrapper_for_fp_tensor_constructor,
)
from deepspeed.zero.client.safe_state import (
    GatheredParameters as GatheredParameters,
    ZeroParamStatus as ZeroParamStatus,
    ZeroParamType as ZeroParamType,
    register_external_parameter as register_external_parameter,
    unregister_external_parameter as unregister_external_parameter,
)
