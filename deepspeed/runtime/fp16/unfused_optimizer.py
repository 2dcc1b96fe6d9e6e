from deepspeed.client.legacy import FP16_UnfusedOptimizer
