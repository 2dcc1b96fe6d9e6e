"""A ZeRO sharding and offload runtime for PyTorch, import- and config-compatible with DeepSpeed."""

import sys

from deepspeed import accelerator, checkpoint, comm, git_version_info, module_inject, moe, ops, pipe, runtime, utils, zero
from deepspeed.accelerator import get_accelerator
from deepspeed.activation import checkpointing
from deepspeed.api import add_config_arguments, initialize
from deepspeed.comm import init_distributed
from deepspeed.config import DeepSpeedConfig, DeepSpeedConfigError
from deepspeed.data.loader import DeepSpeedDataLoader
from deepspeed.device import OnDevice
from deepspeed.engine import DeepSpeedEngine
from deepspeed.observe.log import log_dist, logger
from deepspeed.pending import pending_class, pending_function
from deepspeed.pipe import PipelineModule
from deepspeed.version import __version__
from deepspeed.zero.optimizer import DeepSpeedOptimizer

# Clients compare ``deepspeed.version`` as a string; the submodule of that name stays importable by its full path.
version = __version__
__version_major__, __version_minor__, __version_patch__ = 1, 0, 0
__git_hash__ = __git_branch__ = None

dist = comm
sys.modules.setdefault("deepspeed.dist", comm)

init_inference = pending_function("deepspeed.init_inference")
default_inference_config = pending_function("deepspeed.default_inference_config")
tp_model_init = pending_function("deepspeed.tp_model_init")
set_autotp_mode = pending_function("deepspeed.set_autotp_mode")
DeepSpeedHybridEngine = pending_class("deepspeed.DeepSpeedHybridEngine")
PipelineEngine = pending_class("deepspeed.PipelineEngine")
InferenceEngine = pending_class("deepspeed.InferenceEngine")

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
