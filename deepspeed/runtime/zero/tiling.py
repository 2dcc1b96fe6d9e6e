from deepspeed.zero.client.tiled import TiledLinear, TiledLinearReturnBias
