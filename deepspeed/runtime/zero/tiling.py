"""Import path of tiled layers."""

from deepspeed.zero.tiling import TiledLinear, TiledLinearReturnBias

__all__ = ["TiledLinear", "TiledLinearReturnBias"]
