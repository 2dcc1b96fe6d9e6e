"""Import path of Adagrad."""

from deepspeed.optim.named import DeepSpeedCPUAdagrad

__all__ = ["DeepSpeedCPUAdagrad"]
