from deepspeed.engine.hybrid import DeepSpeedHybridEngine
