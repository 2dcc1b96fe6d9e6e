"""A ZeRO sharding and offload runtime for PyTorch, import- and config-compatible with DeepSpeed.

Importing the package imports no torch: the command-line tools answer at once, and programs that only ask for the
version pay nothing. Each public name is loaded when it is first used and kept from then on (PEP 562).
"""

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from deepspeed.pending import pending_class, pending_function
from deepspeed.version import __version__

if TYPE_CHECKING:
    from deepspeed import (
        accelerator,
        checkpoint,
        comm,
        comm as dist,
        git_version_info,
        module_inject,
        moe,
        ops,
        pipe,
        runtime,
        utils,
        zero,
    )
    from deepspeed.accelerator import get_accelerator
    from deepspeed.activation import checkpointing
    from deepspeed.api import add_config_arguments, initialize
    from deepspeed.comm import init_distributed
    from deepspeed.config import DeepSpeedConfig, DeepSpeedConfigError, read_config_source as load_ds_config
    from deepspeed.data.loader import DeepSpeedDataLoader
    from deepspeed.device import OnDevice
    from deepspeed.engine import DeepSpeedEngine
    from deepspeed.observe.log import log_dist, logger
    from deepspeed.pipe import PipelineModule
    from deepspeed.zero.client.client_optimizer import DeepSpeedOptimizer

# Clients compare ``deepspeed.version`` as a string. The submodule of that name is loaded above, so that nothing binds
# it here later.
version = __version__
__version_major__, __version_minor__, __version_patch__ = 1, 0, 0
__git_hash__ = __git_branch__ = None

init_inference = pending_function("deepspeed.init_inference")
default_inference_config = pending_function("deepspeed.default_inference_config")
tp_model_init = pending_function("deepspeed.tp_model_init")
set_autotp_mode = pending_function("deepspeed.set_autotp_mode")
DeepSpeedHybridEngine = pending_class("deepspeed.DeepSpeedHybridEngine")
PipelineEngine = pending_class("deepspeed.PipelineEngine")
InferenceEngine = pending_class("deepspeed.InferenceEngine")

# public name -> (module, attribute there, or "" for the module itself); the imports above say the same to type
# checkers. Submodules need no row.
_LAZY: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "DeepSpeedConfig": ("deepspeed.config", "DeepSpeedConfig"),
        "DeepSpeedConfigError": ("deepspeed.config", "DeepSpeedConfigError"),
        "DeepSpeedDataLoader": ("deepspeed.data.loader", "DeepSpeedDataLoader"),
        "DeepSpeedEngine": ("deepspeed.engine", "DeepSpeedEngine"),
        "DeepSpeedOptimizer": ("deepspeed.zero.client.client_optimizer", "DeepSpeedOptimizer"),
        "OnDevice": ("deepspeed.device", "OnDevice"),
        "PipelineModule": ("deepspeed.pipe", "PipelineModule"),
        "add_config_arguments": ("deepspeed.api", "add_config_arguments"),
        "checkpointing": ("deepspeed.activation.checkpointing", ""),
        "get_accelerator": ("deepspeed.accelerator", "get_accelerator"),
        "init_distributed": ("deepspeed.comm", "init_distributed"),
        "initialize": ("deepspeed.api", "initialize"),
        "load_ds_config": ("deepspeed.config", "read_config_source"),
        "log_dist": ("deepspeed.observe.log", "log_dist"),
        "logger": ("deepspeed.observe.log", "logger"),
    }
)

__all__ = [
    "DeepSpeedConfig",
    "DeepSpeedConfigError",
    "DeepSpeedDataLoader",
    "DeepSpeedEngine",
    "DeepSpeedHybridEngine",
    "DeepSpeedOptimizer",
    "InferenceEngine",
    "OnDevice",
    "PipelineEngine",
    "PipelineModule",
    "__version__",
    "accelerator",
    "add_config_arguments",
    "checkpoint",
    "checkpointing",
    "comm",
    "default_inference_config",
    "dist",
    "get_accelerator",
    "git_version_info",
    "init_distributed",
    "init_inference",
    "initialize",
    "load_ds_config",
    "log_dist",
    "logger",
    "module_inject",
    "moe",
    "ops",
    "pipe",
    "runtime",
    "set_autotp_mode",
    "tp_model_init",
    "utils",
    "version",
    "zero",
]


def _load(name: str) -> Any:
    if name in _LAZY:
        module, attribute = _LAZY[name]
        return getattr(import_module(module), attribute) if attribute else import_module(module)
    try:
        return import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"{__name__}.{name}":  # a dependency of the submodule is missing: that is the news
            raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)


def __getattr__(name: str) -> Any:
    """A public name or a submodule at its first use; AttributeError for everything else."""
    # Tools probe modules for many special names; none of them is worth a look at the file system.
    if not name.isidentifier() or name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    value = _load(name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_LAZY})
