from deepspeed.zero.client.tiling import TiledLinear, TiledLinearReturnBias
