"""Import path of Lion."""

from deepspeed.optim.named import DeepSpeedCPULion, FusedLion

__all__ = ["DeepSpeedCPULion", "FusedLion"]
