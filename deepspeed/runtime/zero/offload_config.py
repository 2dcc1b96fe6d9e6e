from deepspeed.config import (
    OffloadDeviceEnum,
    OffloadOptimizerConfig as DeepSpeedZeroOffloadOptimizerConfig,
    OffloadParamConfig as DeepSpeedZeroOffloadParamConfig,
    OffloadStateTypeEnum,
)
