"""Classes that clients compare an optimizer against. Precision is handled by one mechanism here, so nothing is an
instance.
"""

from deepspeed.pending import pending_class

_INSTEAD = "Configure fp16 or bf16 and call deepspeed.initialize."

BF16_Optimizer = pending_class("deepspeed.runtime.bf16_optimizer.BF16_Optimizer", _INSTEAD)
FP16_Optimizer = pending_class("deepspeed.runtime.fp16.fused_optimizer.FP16_Optimizer", _INSTEAD)
FP16_UnfusedOptimizer = pending_class("deepspeed.runtime.fp16.unfused_optimizer.FP16_UnfusedOptimizer", _INSTEAD)
