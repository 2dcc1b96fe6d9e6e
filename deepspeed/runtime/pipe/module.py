from deepspeed.pipe.module import LayerSpec, PipelineModule, TiedLayerSpec
