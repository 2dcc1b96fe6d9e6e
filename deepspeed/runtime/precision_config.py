from deepspeed.config import Bf16Config as DeepSpeedBF16Config, Fp16Config as DeepSpeedFP16Config
from deepspeed.precision.legacy import get_bfloat16_config
