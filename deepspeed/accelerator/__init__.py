from deepspeed.accelerator.device import (
    Accelerator,
    Accelerator as DeepSpeedAccelerator,
    get_accelerator,
    set_accelerator,
)
