"""Values that clients import by name."""

from datetime import timedelta

TORCH_DISTRIBUTED_DEFAULT_PORT = 29500
DEFAULT_PROCESS_GROUP_TIMEOUT = timedelta(minutes=10)
# environment variables that name the machine a rank runs on, and how many machines there are
CROSS_RANK, CROSS_SIZE = "CROSS_RANK", "CROSS_SIZE"
# optimizer names as the configuration spells them, lower case
ADAM_OPTIMIZER, ADAMW_OPTIMIZER, LION_OPTIMIZER = "adam", "adamw", "lion"
LAMB_OPTIMIZER, ONEBIT_LAMB_OPTIMIZER = "lamb", "onebitlamb"
