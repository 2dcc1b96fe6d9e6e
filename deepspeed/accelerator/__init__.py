"""Import path of the device layer."""

from deepspeed.device import Accelerator, get_accelerator, set_accelerator
from deepspeed.device import Accelerator as DeepSpeedAccelerator

__all__ = ["Accelerator", "DeepSpeedAccelerator", "get_accelerator", "set_accelerator"]
