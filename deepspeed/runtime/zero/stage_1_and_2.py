from deepspeed.client.zero.estimate import (
    estimate_zero2_model_states_mem_needs,
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
)
from deepspeed.client.zero.optimizer import DeepSpeedZeroOptimizer
