"""Import path of ZeRO helpers."""

from deepspeed.errors import DeepSpeedError as ZeRORuntimeException
