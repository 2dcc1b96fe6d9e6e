from deepspeed.runtime import (
    activation_checkpointing,
    base_optimizer,
    config,
    dataloader,
    engine,
    hybrid_engine,
    lr_schedules,
    pipe,
    utils,
    zero,
)
