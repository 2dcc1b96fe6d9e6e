"""Builders of the native kernels, for use from a checkout; an installation has them as ``deepspeed.ops.op_builder``."""

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

__all__ = [
    "ALL_OPS",
    "AsyncIOBuilder",
    "CPUAdagradBuilder",
    "CPUAdamBuilder",
    "CPUChecksumBuilder",
    "CPULionBuilder",
    "CUDAMismatchException",
    "CUDAOpBuilder",
    "FusedAdamBuilder",
    "FusedLambBuilder",
    "FusedLionBuilder",
    "GDSBuilder",
    "MissingCUDAException",
    "OpBuilder",
    "PinMemoryBuilder",
    "TorchCPUOpBuilder",
]
