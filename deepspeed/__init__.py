"""A ZeRO sharding and offload runtime for PyTorch, import- and config-compatible with DeepSpeed.

Importing the package imports no torch: the command-line tools answer at once, and programs that only ask for the
version pay nothing. Each public name is loaded when it is first used and kept from then on (PEP 562).
"""

import sys
from importlib import import_module
from typing import Any

from deepspeed import comm
from deepspeed.client import constants
from deepspeed.client.absent import tell_of_absent_modules
from deepspeed.errors import nearest_hint, pending_class, pending_function
from deepspeed.version import __version__

# Clients compare ``deepspeed.version`` as a string; the submodule of that name is loaded above, so it binds no more.
version = __version__
__version_major__, __version_minor__, __version_patch__ = 1, 0, 0
__git_hash__ = __git_branch__ = None

# Import paths of clients for modules that live elsewhere.
sys.modules |= {f"{__name__}.dist": comm, f"{__name__}.constants": constants}
tell_of_absent_modules()
_FUNCTIONS = ("init_inference", "default_inference_config", "replace_transformer_layer")
_CLASSES = ("DeepSpeedInferenceConfig", "InferenceEngine", "DeepSpeedTransformerConfig", "DeepSpeedTransformerLayer")
globals().update({name: pending_function(f"deepspeed.{name}") for name in _FUNCTIONS})
globals().update({name: pending_class(f"deepspeed.{name}") for name in _CLASSES})

# Public name -> "module:", with the name there if it is another one; without ":" it is the module itself.
_LAZY = {
    "DeepSpeedConfig": "deepspeed.config:",
    "DeepSpeedConfigError": "deepspeed.config:",
    "DeepSpeedDataLoader": "deepspeed.client.data_loader:",
    "DeepSpeedEngine": "deepspeed.engine:",
    "DeepSpeedHybridEngine": "deepspeed.client.hybrid_engine:",
    "DeepSpeedOptimizer": "deepspeed.client.zero.optimizer:",
    "DualPipeVEngine": "deepspeed.pipe.engine:",
    "DualPipeVModule": "deepspeed.pipe:",
    "HAS_TRITON": "deepspeed.git_version_info:",
    "OnDevice": "deepspeed.accelerator.device:",
    "PipelineEngine": "deepspeed.pipe.engine:",
    "PipelineModule": "deepspeed.pipe:",
    "add_config_arguments": "deepspeed.client.legacy:",
    "checkpointing": "deepspeed.client.activation",
    "get_accelerator": "deepspeed.accelerator:",
    "init_distributed": "deepspeed.comm:",
    "initialize": "deepspeed.engine.initialize:",
    "load_ds_config": "deepspeed.config:read_config_source",
    "log_dist": "deepspeed.monitor.log:",
    "logger": "deepspeed.monitor.log:",
    "set_autotp_mode": "deepspeed.module_inject.layers:",
    "tp_model_init": "deepspeed.tensor.start:",
}
_SUBMODULES = (
    *("accelerator", "checkpoint", "comm", "dist", "elasticity", "git_version_info", "module_inject"),
    *("moe", "monitor", "ops", "pipe", "profiling", "reallocate", "runtime", "utils", "zero"),
)

__all__ = ["__version__", "version", *_FUNCTIONS, *_CLASSES, *_LAZY, *_SUBMODULES]


def __getattr__(name: str) -> Any:
    """A public name or a submodule at its first use; AttributeError for everything else."""
    path, colon, attribute = _LAZY.get(name, f"{__name__}.{name}").partition(":")
    # Tools probe modules for many special names; none of them is worth a look at the file system.
    if not name.isidentifier() or name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    try:
        module = import_module(path)
    except ModuleNotFoundError as error:
        if error.name != f"{__name__}.{name}":  # a dependency of the submodule is missing: that is the news
            raise
        hint = nearest_hint(name, __all__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}", name=name) from None
    value = globals()[name] = getattr(module, attribute or name) if colon else module
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
