from deepspeed.module_inject import layers
