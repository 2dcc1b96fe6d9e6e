from deepspeed.optim.named import DeepSpeedCPULion, FusedLion
