from deepspeed.errors import CUDAMismatchException, MissingCUDAException
from deepspeed.native.builders import (
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

__all__ = [name for name in globals() if not name.startswith("_")]
