"""Import path of Adam."""

from deepspeed.optim.named import DeepSpeedCPUAdam, FusedAdam
