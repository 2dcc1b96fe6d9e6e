from deepspeed.client.constants import (
    ADAM_OPTIMIZER,
    ADAMW_OPTIMIZER,
    LAMB_OPTIMIZER,
    LION_OPTIMIZER,
    ONEBIT_LAMB_OPTIMIZER,
)
from deepspeed.config import DeepSpeedConfig, DeepSpeedConfigError
