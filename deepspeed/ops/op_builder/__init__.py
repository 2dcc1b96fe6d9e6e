from deepspeed.accelerator.native.builders import (
    ALL_OPS,
    AsyncIOBuilder,
    CPUAdagradBuilder,
    CPUAdamBuilder,
    CPUChecksumBuilder,
    CPULionBuilder,
    CUDAOpBuilder,
    FusedAdamBuilder,
    FusedLambBuilder,
    FusedLionBuilder,
    GDSBuilder,
    OpBuilder,
    PinMemoryBuilder,
    TorchCPUOpBuilder,
)
from deepspeed.errors import CUDAMismatchException, MissingCUDAException

__all__ = [name for name in globals() if not name.startswith("_")]
