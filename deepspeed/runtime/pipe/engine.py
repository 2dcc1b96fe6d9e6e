from deepspeed.engine import DeepSpeedEngine
from deepspeed.pipe.engine import PipelineEngine, PipelineError
