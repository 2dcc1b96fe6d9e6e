"""Builders of the native kernels, for use from a checkout; an installation has them as ``deepspeed.ops.op_builder``."""

from typing import Any

from deepspeed.ops import op_builder as _installed

__all__ = list(_installed.__all__)


def __getattr__(name: str) -> Any:
    return getattr(_installed, name)
