"""Configuration: one frozen object from a dict, a relaxed-JSON file or base64 text. Imports no torch."""

from deepspeed.config.parse import read_config_source
from deepspeed.config.root import DeepSpeedConfig, load_config
from deepspeed.config.training import (
    ActivationCheckpointingConfig,
    Bf16Config,
    DataTypesConfig,
    Fp16Config,
    OptimizerConfig,
    SchedulerConfig,
    TorchAutocastConfig,
)
from deepspeed.config.zero import (
    LeafModuleConfig,
    OffloadConfig,
    OffloadDeviceEnum,
    OffloadOptimizerConfig,
    OffloadParamConfig,
    OffloadStateTypeEnum,
    ZenFlowConfig,
    ZeroConfig,
)
from deepspeed.errors import BatchConfigError, DeepSpeedConfigError

__all__ = [
    "ActivationCheckpointingConfig",
    "BatchConfigError",
    "Bf16Config",
    "DataTypesConfig",
    "DeepSpeedConfig",
    "DeepSpeedConfigError",
    "Fp16Config",
    "LeafModuleConfig",
    "OffloadConfig",
    "OffloadDeviceEnum",
    "OffloadOptimizerConfig",
    "OffloadParamConfig",
    "OffloadStateTypeEnum",
    "OptimizerConfig",
    "SchedulerConfig",
    "TorchAutocastConfig",
    "ZenFlowConfig",
    "ZeroConfig",
    "load_config",
    "read_config_source",
]
