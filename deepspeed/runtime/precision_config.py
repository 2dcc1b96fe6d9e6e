from deepspeed.client.legacy import get_bfloat16_config
from deepspeed.config import Bf16Config as DeepSpeedBF16Config, Fp16Config as DeepSpeedFP16Config
