from deepspeed.precision.legacy import BF16_Optimizer
