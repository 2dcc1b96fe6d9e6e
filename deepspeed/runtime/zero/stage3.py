from deepspeed.client.zero.estimate import (
    estimate_zero3_model_states_mem_needs,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)
from deepspeed.client.zero.optimizer import DeepSpeedZeroOptimizer_Stage3
