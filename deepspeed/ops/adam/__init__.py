from deepspeed.client.legacy import ZenFlowCPUAdam, ZenFlowSelectiveAdamW
from deepspeed.optim.rules import DeepSpeedCPUAdam, FusedAdam
