"""Names of tiled layers; not in this release."""

from deepspeed.pending import pending_class

_INSTEAD = "Use torch.nn.Linear."

TiledLinear = pending_class("deepspeed.zero.TiledLinear", _INSTEAD)
TiledLinearReturnBias = pending_class("deepspeed.zero.TiledLinearReturnBias", _INSTEAD)
