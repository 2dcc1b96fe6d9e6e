"""Import path of asynchronous IO."""

from deepspeed.builders import AsyncIOBuilder

__all__ = ["AsyncIOBuilder"]
