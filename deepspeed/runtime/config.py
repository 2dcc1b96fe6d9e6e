"""Import path of the configuration."""

from deepspeed.config import DeepSpeedConfig as DeepSpeedConfig, DeepSpeedConfigError as DeepSpeedConfigError
from deepspeed.constants import (
    ADAM_OPTIMIZER as ADAM_OPTIMIZER,
    ADAMW_OPTIMIZER as ADAMW_OPTIMIZER,
    LAMB_OPTIMIZER as LAMB_OPTIMIZER,
    LION_OPTIMIZER as LION_OPTIMIZER,
    ONEBIT_LAMB_OPTIMIZER as ONEBIT_LAMB_OPTIMIZER,
)
