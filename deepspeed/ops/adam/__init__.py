from deepspeed.optim.named import DeepSpeedCPUAdam, FusedAdam
