"""Import path of asynchronous IO."""

from deepspeed.native.builders import AsyncIOBuilder
from deepspeed.tier.aio_handle import aio_handle
