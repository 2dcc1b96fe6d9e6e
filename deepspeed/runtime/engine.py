from deepspeed.engine import DeepSpeedEngine
