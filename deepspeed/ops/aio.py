from deepspeed.client.aio_handle import aio_handle
from deepspeed.native.builders import AsyncIOBuilder
