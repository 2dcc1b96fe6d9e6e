"""Import path of tiled layers."""

from deepspeed.zero.client.tiling import TiledLinear, TiledLinearReturnBias
