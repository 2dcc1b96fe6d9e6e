"""Import path of Adam."""

from deepspeed.optim.named import DeepSpeedCPUAdam, FusedAdam

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]
