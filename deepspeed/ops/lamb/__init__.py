from deepspeed.optim.named import FusedLamb
