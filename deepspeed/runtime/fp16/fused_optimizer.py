"""Import path of a wrapper class that clients compare against."""

from deepspeed.precision.legacy import FP16_Optimizer
