"""Import path of Adagrad."""

from deepspeed.optim.named import DeepSpeedCPUAdagrad
