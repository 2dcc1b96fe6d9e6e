"""Import path of the kernel builders."""

from deepspeed.errors import (
    CUDAMismatchException as CUDAMismatchException,
    MissingCUDAException as MissingCUDAException,
)
from deepspeed.native.builders import (
    ALL_OPS as ALL_OPS,
    AsyncIOBuilder as AsyncIOBuilder,
    CPUAdagradBuilder as CPUAdagradBuilder,
    CPUAdamBuilder as CPUAdamBuilder,
    CPUChecksumBuilder as CPUChecksumBuilder,
    CPULionBuilder as CPULionBuilder,
    CUDAOpBuilder as CUDAOpBuilder,
    FusedAdamBuilder as FusedAdamBuilder,
    FusedLambBuilder as FusedLambBuilder,
    FusedLionBuilder as FusedLionBuilder,
    GDSBuilder as GDSBuilder,
    OpBuilder as OpBuilder,
    PinMemoryBuilder as PinMemoryBuilder,
    TorchCPUOpBuilder as TorchCPUOpBuilder,
)

__all__ = [name for name in globals() if not name.startswith("_")]
