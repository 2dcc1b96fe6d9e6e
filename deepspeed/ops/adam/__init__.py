from deepspeed.optim.rules import DeepSpeedCPUAdam, FusedAdam
