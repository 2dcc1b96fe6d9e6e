from deepspeed.precision.legacy import TiledLinear, TiledLinearReturnBias
