"""Import path of the ZeRO configuration."""

from deepspeed.config import OffloadDeviceEnum
from deepspeed.config import ZeroConfig as DeepSpeedZeroConfig

__all__ = ["DeepSpeedZeroConfig", "OffloadDeviceEnum"]
