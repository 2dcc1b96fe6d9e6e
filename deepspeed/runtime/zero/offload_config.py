"""Import path of the offload configuration."""

from deepspeed.config import (
    OffloadDeviceEnum,
    OffloadStateTypeEnum,
)
from deepspeed.config import (
    OffloadOptimizerConfig as DeepSpeedZeroOffloadOptimizerConfig,
)
from deepspeed.config import (
    OffloadParamConfig as DeepSpeedZeroOffloadParamConfig,
)

__all__ = ["DeepSpeedZeroOffloadOptimizerConfig", "DeepSpeedZeroOffloadParamConfig", "OffloadDeviceEnum", "OffloadStateTypeEnum"]
