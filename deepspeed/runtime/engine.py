from deepspeed.client.legacy import autocast_if_enabled
from deepspeed.engine import DeepSpeedEngine
from deepspeed.moe.layer import MoE
