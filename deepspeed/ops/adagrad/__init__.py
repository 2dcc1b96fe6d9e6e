from deepspeed.optim.named import DeepSpeedCPUAdagrad
