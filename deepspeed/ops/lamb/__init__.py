"""Import path of LAMB."""

from deepspeed.optim.named import FusedLamb
