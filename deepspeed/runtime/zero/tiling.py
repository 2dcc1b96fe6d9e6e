from deepspeed.client.zero.tiled import TiledLinear, TiledLinearReturnBias
