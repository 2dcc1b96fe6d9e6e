from deepspeed.accelerator.native.builders import AsyncIOBuilder
from deepspeed.client.aio_handle import aio_handle
