from deepspeed.accelerator.device import OnDevice
from deepspeed.client import zero_to_fp32
from deepspeed.client.attrs import recursive_getattr, recursive_setattr
from deepspeed.client.data_loader import RepeatingLoader
from deepspeed.client.legacy import get_numactl_cmd
from deepspeed.client.zero.leaf import (
    get_z3_leaf_modules,
    set_z3_leaf_module,
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
    unset_z3_leaf_modules,
    z3_leaf_module,
    z3_leaf_parameter,
)
from deepspeed.client.zero.safe_state import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
    safe_update_full_grad_vectorized,
)
from deepspeed.comm import is_initialized
from deepspeed.monitor.log import log_dist, log_dist_once, logger, set_log_level_from_string
from deepspeed.monitor.timers import instrument_w_nvtx, see_memory_usage
from deepspeed.utils import groups, logging, timer

__all__ = [name for name in globals() if not name.startswith("_")]
