from deepspeed.optim.rules import DeepSpeedCPUAdagrad
