"""Names of tensor-parallel layer replacement."""

from deepspeed.module_inject import layers
