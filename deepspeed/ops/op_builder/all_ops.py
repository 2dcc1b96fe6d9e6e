from deepspeed.accelerator.native.builders import ALL_OPS
