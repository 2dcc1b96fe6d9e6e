"""Classes that clients name or compare an optimizer against; nothing is an instance of them."""

from deepspeed.errors import pending_class

_INSTEAD = "Configure fp16 or bf16 and call deepspeed.initialize."

BF16_Optimizer = pending_class("deepspeed.runtime.bf16_optimizer.BF16_Optimizer", _INSTEAD)
FP16_Optimizer = pending_class("deepspeed.runtime.fp16.fused_optimizer.FP16_Optimizer", _INSTEAD)
FP16_UnfusedOptimizer = pending_class("deepspeed.runtime.fp16.unfused_optimizer.FP16_UnfusedOptimizer", _INSTEAD)
TiledLinear = pending_class("deepspeed.zero.TiledLinear", "Use torch.nn.Linear.")
TiledLinearReturnBias = pending_class("deepspeed.zero.TiledLinearReturnBias", "Use torch.nn.Linear.")
