from deepspeed.optim.rules import DeepSpeedCPUAdam, FusedAdam
from deepspeed.precision.legacy import ZenFlowCPUAdam, ZenFlowSelectiveAdamW
