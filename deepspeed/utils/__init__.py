"""Import paths of helpers that clients use; nothing is defined here."""

from deepspeed.attrs import recursive_getattr as recursive_getattr, recursive_setattr as recursive_setattr
from deepspeed.comm import is_initialized as is_initialized
from deepspeed.data.loader import RepeatingLoader as RepeatingLoader
from deepspeed.device import OnDevice as OnDevice
from deepspeed.observe.log import log_dist as log_dist, logger as logger
from deepspeed.observe.log_tools import (
    log_dist_once as log_dist_once,
    set_log_level_from_string as set_log_level_from_string,
)
from deepspeed.observe.memory import see_memory_usage as see_memory_usage
from deepspeed.observe.timers import instrument_w_nvtx as instrument_w_nvtx
from deepspeed.utils import groups as groups, logging as logging, timer as timer, zero_to_fp32 as zero_to_fp32
from deepspeed.zero.client.leaf import (
    get_z3_leaf_modules as get_z3_leaf_modules,
    set_z3_leaf_module as set_z3_leaf_module,
    set_z3_leaf_modules as set_z3_leaf_modules,
    set_z3_leaf_modules_by_name as set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix as set_z3_leaf_modules_by_suffix,
    unset_z3_leaf_modules as unset_z3_leaf_modules,
    z3_leaf_module as z3_leaf_module,
    z3_leaf_parameter as z3_leaf_parameter,
)
from deepspeed.zero.client.safe_state import (
    safe_get_full_fp32_param as safe_get_full_fp32_param,
    safe_get_full_grad as safe_get_full_grad,
    safe_get_full_optimizer_state as safe_get_full_optimizer_state,
    safe_get_local_fp32_param as safe_get_local_fp32_param,
    safe_get_local_grad as safe_get_local_grad,
    safe_get_local_optimizer_state as safe_get_local_optimizer_state,
    safe_set_full_fp32_param as safe_set_full_fp32_param,
    safe_set_full_grad as safe_set_full_grad,
    safe_set_full_optimizer_state as safe_set_full_optimizer_state,
    safe_set_local_fp32_param as safe_set_local_fp32_param,
    safe_set_local_grad as safe_set_local_grad,
    safe_set_local_optimizer_state as safe_set_local_optimizer_state,
    safe_update_full_grad_vectorized as safe_update_full_grad_vectorized,
)

__all__ = [name for name in globals() if not name.startswith("_")]
