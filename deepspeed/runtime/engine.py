"""Import path of the engine."""

from deepspeed.engine import DeepSpeedEngine
