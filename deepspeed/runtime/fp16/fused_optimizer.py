from deepspeed.precision.legacy import FP16_Optimizer
