"""Import path of the optimizer base classes."""

from deepspeed.zero.client.client_optimizer import DeepSpeedOptimizer, ZeROOptimizer
