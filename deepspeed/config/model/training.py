"""Blocks about the optimizer, the schedule, numeric precision and activation checkpointing."""

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, StrictStr, field_validator

from deepspeed.config.model.values import (
    Block,
    Count,
    DtypeName,
    Flag,
    FrozenDict,
    Int,
    Names,
    Num,
    OptionalDtype,
    Positive,
    dtype_name,
    freeze,
    name_list,
)

# Read like a dict and unpacked with **; what each setting may be is told by ``optim_params``.
Params = Annotated[dict[str, Any], AfterValidator(freeze)]


class OptimizerConfig(Block):
    """``optimizer``: the name (known names in any case, else a torch.optim class) and its keyword arguments."""

    type: StrictStr
    params: Params = Field(default_factory=FrozenDict)
    legacy_fusion: Flag = False


class SchedulerConfig(Block):
    """``scheduler``: the name of a learning-rate schedule and its keyword arguments."""

    type: StrictStr
    params: Params = Field(default_factory=FrozenDict)


class Fp16Config(Block):
    """``fp16``: half precision with a static (``loss_scale`` > 0) or dynamic (0) loss scale."""

    enabled: Flag = False
    auto_cast: Flag = False
    loss_scale: Num = Field(default=0.0, ge=0)
    # No scale above the largest fp32 number can be multiplied with a loss.
    initial_scale_power: Int = Field(default=16, ge=0, le=127)
    loss_scale_window: Count = 1000
    hysteresis: Count = 2
    consecutive_hysteresis: Flag = False
    min_loss_scale: Count = 1
    fp16_master_weights_and_grads: Flag = False

    @property
    def dynamic(self) -> bool:
        """Whether the loss scale adapts itself."""
        return self.loss_scale == 0


class Bf16Config(Block):
    """``bf16`` (also written ``bfloat16``): brain-float compute with fp32 master weights."""

    enabled: Flag = False
    immediate_grad_update: Flag = False
    check_grad_overflow: Flag = True
    bf16_master_weights_and_grads: Flag = False
    bf16_optimizer_states: Flag = False


class TorchAutocastConfig(Block):
    """``torch_autocast``: torch.autocast around the forward. ``lower_precision_safe_modules`` None: no module."""

    enabled: Flag = False
    dtype: DtypeName = "bf16"
    lower_precision_safe_modules: Annotated[
        tuple[str, ...] | None, BeforeValidator(lambda v: v if v is None else name_list(v))
    ] = None

    @field_validator("dtype", mode="before")
    @classmethod
    def _default_dtype(cls, value: Any) -> Any:
        return "bf16" if value is None else dtype_name(value)


class DataTypesConfig(Block):
    """``data_types``: dtypes of gradient accumulation, parameters and buffers. None: each its usual one."""

    grad_accum_dtype: OptionalDtype = None
    param_dtype: OptionalDtype = None
    buffer_dtype: OptionalDtype = None
    keep_in_fp32_modules: str | Names = "auto"

    @field_validator("keep_in_fp32_modules", mode="before")
    @classmethod
    def _auto_or_names(cls, value: Any) -> Any:
        if value == "auto":
            return value
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise ValueError(f'must be "auto" or a list of module names, not {value!r}')
        return tuple(value)


class ActivationCheckpointingConfig(Block):
    """``activation_checkpointing``: defaults for ``deepspeed.checkpointing.configure``."""

    partition_activations: Flag = False
    cpu_checkpointing: Flag = False
    contiguous_memory_optimization: Flag = False
    number_checkpoints: Positive | None = None
    synchronize_checkpoint_boundary: Flag = False
    profile: Flag = False
