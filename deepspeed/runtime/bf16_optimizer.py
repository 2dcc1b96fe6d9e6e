from deepspeed.client.legacy import BF16_Optimizer
