"""Import path of the ZeRO configuration."""

from deepspeed.config import OffloadDeviceEnum, ZeroConfig as DeepSpeedZeroConfig
