from deepspeed.config import OffloadDeviceEnum, ZeroConfig as DeepSpeedZeroConfig
