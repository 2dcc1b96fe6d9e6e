"""Names of pipeline parallelism; not in this release."""

from deepspeed.errors import pending_class

_INSTEAD = "Use ZeRO data parallelism (zero_optimization.stage 1 to 3)."

PipelineModule = pending_class("deepspeed.pipe.PipelineModule", _INSTEAD)
LayerSpec = pending_class("deepspeed.pipe.LayerSpec", _INSTEAD)
TiedLayerSpec = pending_class("deepspeed.pipe.TiedLayerSpec", _INSTEAD)
PipelineEngine = pending_class("deepspeed.pipe.PipelineEngine", _INSTEAD)
PipelineError = type(
    "PipelineError", (Exception,), {"__doc__": "A pipeline engine was used in a way it does not support."}
)
