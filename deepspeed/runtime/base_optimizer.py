from deepspeed.client.zero.optimizer import DeepSpeedOptimizer, ZeROOptimizer
