from deepspeed.native.builders import ALL_OPS
