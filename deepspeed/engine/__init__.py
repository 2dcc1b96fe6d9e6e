"""The engine: one object that clients train by, and what it is made of."""

from deepspeed.engine.engine import DeepSpeedEngine as DeepSpeedEngine
