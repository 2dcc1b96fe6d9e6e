from deepspeed.engine import DeepSpeedEngine
from deepspeed.moe.layer import MoE
from deepspeed.precision.legacy import autocast_if_enabled
