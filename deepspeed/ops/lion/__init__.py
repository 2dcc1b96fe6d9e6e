"""Import path of Lion."""

from deepspeed.optim.named import DeepSpeedCPULion, FusedLion
