from deepspeed.errors import DeepSpeedError as ZeRORuntimeException
