from deepspeed.device import get_accelerator, set_accelerator
