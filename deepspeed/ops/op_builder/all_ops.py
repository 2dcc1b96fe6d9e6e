"""Import path of the table of all kernel builders."""

from deepspeed.native.builders import ALL_OPS

__all__ = ["ALL_OPS"]
