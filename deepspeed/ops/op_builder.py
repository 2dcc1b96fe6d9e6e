"""Import path of the kernel builders."""

from deepspeed.builders import AsyncIOBuilder, CPUAdamBuilder, FusedAdamBuilder, GDSBuilder, OpBuilder

__all__ = ["AsyncIOBuilder", "CPUAdamBuilder", "FusedAdamBuilder", "GDSBuilder", "OpBuilder"]
