from deepspeed.accelerator.native.builders import compatible_ops as __compatible_ops__
from deepspeed.ops import adagrad, adam, lamb, lion
