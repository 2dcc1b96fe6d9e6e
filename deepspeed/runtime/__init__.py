from deepspeed.runtime import (
    activation_checkpointing,
    base_optimizer,
    config,
    dataloader,
    engine,
    lr_schedules,
    pipe,
    utils,
    zero,
)
