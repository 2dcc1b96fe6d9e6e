from deepspeed.optim.rules import FusedLamb
