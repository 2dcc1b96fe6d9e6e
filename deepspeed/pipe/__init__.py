"""Pipeline parallelism: models as lists of layers, dealt out to ranks that a batch passes in micro-batches."""

from deepspeed.errors import PipelineError
from deepspeed.pipe.module import DualPipeVModule, LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.pipe.plain import cut_model

__all__ = ["DualPipeVModule", "LayerSpec", "PipelineError", "PipelineModule", "TiedLayerSpec", "cut_model"]
