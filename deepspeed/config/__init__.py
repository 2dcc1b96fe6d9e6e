"""Configuration: one frozen object from a dict, a relaxed-JSON file or base64 text. Imports no torch."""

from types import ModuleType as _Module

from deepspeed.config.model.blocks import (
    ActivationCheckpointingConfig as ActivationCheckpointingConfig,
    Bf16Config as Bf16Config,
    DataTypesConfig as DataTypesConfig,
    Fp16Config as Fp16Config,
    LeafModuleConfig as LeafModuleConfig,
    OffloadConfig as OffloadConfig,
    OffloadDeviceEnum as OffloadDeviceEnum,
    OffloadOptimizerConfig as OffloadOptimizerConfig,
    OffloadParamConfig as OffloadParamConfig,
    OffloadStateTypeEnum as OffloadStateTypeEnum,
    OptimizerConfig as OptimizerConfig,
    SchedulerConfig as SchedulerConfig,
    TorchAutocastConfig as TorchAutocastConfig,
    ZenFlowConfig as ZenFlowConfig,
    ZeroConfig as ZeroConfig,
)
from deepspeed.config.model.root import (
    DeepSpeedConfig as DeepSpeedConfig,
    ZeroBlockOfPrograms as ZeroBlockOfPrograms,
    load_config as load_config,
)
from deepspeed.config.parse import read_config_source as read_config_source
from deepspeed.errors import BatchConfigError as BatchConfigError, DeepSpeedConfigError as DeepSpeedConfigError

__all__ = [name for name, value in globals().items() if not (name.startswith("_") or isinstance(value, _Module))]
