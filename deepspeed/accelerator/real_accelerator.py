"""Import path of the device layer."""

from deepspeed.device import get_accelerator, set_accelerator
