from deepspeed.accelerator.device import get_accelerator, set_accelerator
