from deepspeed.zero.client.client_optimizer import DeepSpeedZeroOptimizer_Stage3
from deepspeed.zero.client.estimate import (
    estimate_zero3_model_states_mem_needs,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)
