"""The ``zero_optimization`` block."""

from enum import Enum
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, field_validator

from deepspeed.config.model import unread
from deepspeed.config.model.values import (
    AutoBlock,
    Count,
    Flag,
    Int,
    Names,
    Num,
    PathText,
    Positive,
    Support,
    key,
)

ZenFlowConfig = unread.ZeroOptimizationZenflowKeys
_LEAF_CLASSES = (
    "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
    "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
)
_MAX_INT64 = 2**63 - 1
_OWN_PART = "every rank reads only its own part"
_SCATTERS = "sharded gradients always are; false only lifts the limits on prescale_gradients and predividing"


def _shard_group(count: int) -> int:
    if count == 0 or count < -1:
        raise ValueError(f"must be -1 (off) or the ranks of one shard group, not {count}")
    return count


_ShardGroup = Annotated[Int, AfterValidator(_shard_group)]
_Divergence = Literal["tolerate", "error", "assume_none"]


class OffloadDeviceEnum(str, Enum):
    """Where an offloaded state rests."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, Enum):
    """The states that ``engine.offload_states`` can move."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


_none_if_null = BeforeValidator(
    lambda value: "none" if value is None else value, json_schema_input_type=Literal["none", "cpu", "nvme"] | None
)
_Device = Annotated[OffloadDeviceEnum, _none_if_null]


class OffloadConfig(AutoBlock):
    """What both offload blocks have in common."""

    device: _Device = key(OffloadDeviceEnum.none, "Tier of optimizer states: none, cpu or nvme.")
    nvme_path: PathText | None = key(None, "Folder on the drive; only its last part is made when missing.")
    buffer_count: Count = key(4, "Tiles of optimizer state in memory at once.")
    pin_memory: Flag = key(True, "Page-locked host memory, where an accelerator makes use of it.")


class OffloadOptimizerConfig(OffloadConfig, unread.ZeroOptimizationOffloadOptimizerKeys):
    """``zero_optimization.offload_optimizer``; ``ratio`` is the share of elements updated on the CPU."""

    ratio: Num = key(1.0, "Share of elements that the host updates; the rest stays on the device.", ge=0, le=1)


class OffloadParamConfig(OffloadConfig):
    """``zero_optimization.offload_param``; sizes count elements."""

    device: _Device = key(OffloadDeviceEnum.none, "Tier of sharded parameters: none, cpu or nvme.")
    buffer_count: Count = key(5, "Staging buffers for the drive.")
    buffer_size: Count = key(100_000_000, "Most elements of a staging buffer; larger shards travel in pieces.")
    max_in_cpu: Count = key(10**9, "Elements of this rank that stay in host memory before the drive is used.")


class LeafModuleConfig(AutoBlock):
    """``zero_optimization.leaf_module``: modules whose parameters are fetched together."""

    classes: Names = key(_LEAF_CLASSES, "Classes of modules that are gathered as a whole.")
    names: Names = key((), "Names of modules that are gathered as a whole.")
    name_suffixes: Names = key((), "Ends of names of modules that are gathered as a whole.")


class ZeroConfig(unread.ZeroOptimizationKeys):
    """``zero_optimization``: what is sharded. Bucket sizes, thresholds and live limits count elements.

    ``divergence`` is an extension: "tolerate" that ranks take different branches, "error", or "assume_none" (no check).
    """

    stage: Int = key(0, "Shard: 1 optimizer states, 2 and gradients, 3 and parameters; 0 nothing.", ge=0, le=3)
    reduce_scatter: Flag = key(True, "Reduce gradients to their owners instead of to all.", Support.INERT, _SCATTERS)
    reduce_bucket_size: Positive = key(500_000_000, "Elements of small modules packed into one unit of communication.")
    overlap_comm: Flag | None = key(None, "Communicate beside computation; only false switches it off.")
    compute_grad_norm: Flag = key(True, "Compute the norm of all gradients at each update; false saves a reduction.")
    sub_group_size: Count = key(10**9, "Elements per tile of an update that rests on a drive; absent means 2,097,152.")
    zero_hpz_partition_size: Count = key(1, "Ranks that hold one copy of the parameters; other states spread wider.")
    prefetch_bucket_size: Count = key(50_000_000, "Elements gathered ahead of use; the next unit always is, unless 0.")
    param_persistence_threshold: Count = key(100_000, "Parameters with fewer elements stay whole on every rank.")
    model_persistence_threshold: Count = key(_MAX_INT64, "Most elements, over all parameters, that may stay whole.")
    max_live_parameters: Count = key(10**9, "Most gathered elements that may wait for their next use.")
    max_reuse_distance: Count = key(10**9, "Keep parameters used again within so many elements; absent releases them.")
    gather_16bit_weights_on_model_save: Flag = key(False, "Let save_16bit_model gather the weights under stage 3.")
    allgather_sequential: Flag = key(False, "Gather little ahead: the same as a prefetch_bucket_size of 1.")
    pipeline_loading_checkpoint: Flag = key(False, "Ranks of a node read one after another.", Support.INERT, _OWN_PART)
    leaf_module: LeafModuleConfig = Field(default_factory=LeafModuleConfig)
    offload_param: OffloadParamConfig | None = key(None, "Where sharded parameters rest; absent or false: the device.")
    offload_optimizer: OffloadOptimizerConfig | None = key(None, "Where optimizer states rest; absent: the device.")
    mics_shard_size: _ShardGroup = key(-1, "Ranks that hold one copy of all states together (MiCS); -1 for all ranks.")
    divergence: _Divergence = key("tolerate", "Ranks that take different branches: tolerate, error, or no check.")

    @field_validator("offload_param", "offload_optimizer")
    @classmethod
    def _no_device_is_no_offload(cls, value: OffloadConfig | None) -> OffloadConfig | None:
        return None if value is None or value.device is OffloadDeviceEnum.none else value
