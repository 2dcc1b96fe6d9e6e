from deepspeed.zero.client.client_optimizer import DeepSpeedOptimizer, ZeROOptimizer
