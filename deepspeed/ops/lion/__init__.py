from deepspeed.optim.rules import DeepSpeedCPULion, FusedLion
