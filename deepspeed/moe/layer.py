"""Names of mixture-of-experts layers; not in this release."""

from deepspeed.errors import pending_class

MoE = pending_class("deepspeed.moe.layer.MoE", "Ordinary MoE modules train under ZeRO without expert parallelism.")
