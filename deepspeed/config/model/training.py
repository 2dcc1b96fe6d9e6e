"""Blocks about the optimizer, the schedule, numeric precision and activation checkpointing."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, StrictStr

from deepspeed.config.model.unread import ActivationCheckpointingKeys, Bf16Keys, Fp16Keys, OptimizerKeys
from deepspeed.config.model.values import (
    Block,
    Count,
    DtypeName,
    DtypeText,
    Flag,
    FrozenDict,
    Int,
    Names,
    Num,
    OptionalDtype,
    dtype_name,
    freeze,
    key,
)

# Read like a dict and unpacked with **; what each setting may be is told by ``optim_params``.
Params = Annotated[dict[str, Any], AfterValidator(freeze)]
_bf16_if_null = BeforeValidator(lambda value: dtype_name(value) or "bf16", json_schema_input_type=DtypeText)
_AutocastDtype = Annotated[DtypeName, _bf16_if_null]


class OptimizerConfig(OptimizerKeys):
    """``optimizer``: the name (known names in any case, else a torch.optim class) and its keyword arguments."""

    type: StrictStr = key(..., "A known optimizer in any case, or a class of torch.optim by its exact name.")
    params: Params = key(FrozenDict(), "Settings of the optimizer; which ones depends on its name.")


class SchedulerConfig(Block):
    """``scheduler``: the name of a learning-rate schedule and its keyword arguments."""

    type: StrictStr = key(..., "Name of the schedule, or a class of torch.optim.lr_scheduler; case matters.")
    params: Params = key(FrozenDict(), "Settings of the schedule; which ones depends on its name.")


class Fp16Config(Fp16Keys):
    """``fp16``: half precision with a static (``loss_scale`` > 0) or dynamic (0) loss scale."""

    enabled: Flag = key(False, "Compute in fp16 with loss scaling; master weights stay fp32.")
    auto_cast: Flag = key(False, "Cast floating inputs of the forward to fp16.")
    loss_scale: Num = key(0.0, "A fixed loss scale; 0 lets it adapt.", ge=0)
    # No scale above the largest fp32 number can be multiplied with a loss.
    initial_scale_power: Int = key(16, "The first adaptive loss scale is 2 to this power.", ge=0, le=127)
    loss_scale_window: Count = key(1000, "Updates without overflow before the loss scale doubles.")
    hysteresis: Count = key(2, "The loss scale halves at this overflow, counted from 1.")
    consecutive_hysteresis: Flag = key(False, "Every update without overflow restores the hysteresis.")
    min_loss_scale: Count = key(1, "The adaptive loss scale never falls below this.")

    @property
    def dynamic(self) -> bool:
        """Whether the loss scale adapts itself."""
        return self.loss_scale == 0


class Bf16Config(Bf16Keys):
    """``bf16`` (also written ``bfloat16``): brain-float compute with fp32 master weights."""

    enabled: Flag = key(False, "Compute in bf16; master weights stay fp32.")
    check_grad_overflow: Flag = key(True, "Skip an update whose gradients are not finite.")


class TorchAutocastConfig(Block):
    """``torch_autocast``: torch.autocast around the forward. ``lower_precision_safe_modules`` None: no module."""

    enabled: Flag = key(False, "Run the forward inside torch.autocast.")
    dtype: _AutocastDtype = key("bf16", "Dtype of autocast; null means bf16.")
    lower_precision_safe_modules: Names | None = key(
        None, "Classes (torch.nn.Linear) whose parameters rest and travel in the autocast dtype; null for none."
    )


class DataTypesConfig(Block):
    """``data_types``: dtypes of gradient accumulation, parameters and buffers. None: each its usual one."""

    grad_accum_dtype: OptionalDtype = key(None, "Dtype in which micro-batches are summed; null means fp32.")
    param_dtype: OptionalDtype = key(None, "The compute dtype again; refused unless the fp16 and bf16 blocks agree.")
    buffer_dtype: OptionalDtype = key(None, "Dtype of floating buffers; null leaves them as the model is built.")
    keep_in_fp32_modules: tuple[StrictStr, ...] | Literal["auto"] = key(
        "auto", "Modules by name that keep fp32; auto asks the model's class."
    )


class ActivationCheckpointingConfig(ActivationCheckpointingKeys):
    """``activation_checkpointing``: defaults for ``deepspeed.checkpointing.configure``."""

    cpu_checkpointing: Flag = key(False, "Saved activations rest in host memory (for models on a device).")
    synchronize_checkpoint_boundary: Flag = key(False, "Wait for the device at each checkpointed call.")
    profile: Flag = key(False, "Log the forward time of each checkpointed call.")
