from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
