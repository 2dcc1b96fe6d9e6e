from deepspeed.native.builders import AsyncIOBuilder
from deepspeed.tier.aio_handle import aio_handle
