from deepspeed.zero.client.client_optimizer import DeepSpeedZeroOptimizer
from deepspeed.zero.client.estimate import (
    estimate_zero2_model_states_mem_needs,
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
)
