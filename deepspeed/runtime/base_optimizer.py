"""Import path of the optimizer base classes."""

from deepspeed.zero.optimizer import DeepSpeedOptimizer, ZeROOptimizer

__all__ = ["DeepSpeedOptimizer", "ZeROOptimizer"]
