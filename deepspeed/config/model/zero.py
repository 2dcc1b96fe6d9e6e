"""The ``zero_optimization`` block."""

from enum import Enum
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from deepspeed.config.model.removed import REMOVED_KEYS, removed_key, says_off
from deepspeed.config.model.values import (
    AUTO,
    Block,
    Count,
    Flag,
    Int,
    Names,
    Num,
    PathText,
    Positive,
    Violation,
    whole_number,
)
from deepspeed.observe.log import logger

_LEAF_CLASSES = (
    "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
    "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
)
_MAX_INT64 = 2**63 - 1


def _auto_or_whole(value: Any) -> Any:
    if isinstance(value, str) and value == AUTO:
        return value
    count = whole_number(value)
    if count < 1:
        raise ValueError(f'must be "auto" or at least 1, not {count}')
    return count


def _shard_group(value: Any) -> Any:
    count = whole_number(value)
    if count == 0 or count < -1:
        raise ValueError(f"must be -1 (off) or the ranks of one shard group, not {count}")
    return count


AutoOrInt = Annotated[Literal["auto"] | int, BeforeValidator(_auto_or_whole)]


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


class OffloadConfig(Block):
    """What both offload blocks have in common."""

    device: OffloadDeviceEnum = OffloadDeviceEnum.none
    nvme_path: PathText | None = None
    buffer_count: Count = 4
    pin_memory: Flag = True

    @field_validator("device", mode="before")
    @classmethod
    def _null_is_none(cls, value: Any) -> Any:
        return OffloadDeviceEnum.none if value is None else value


class OffloadOptimizerConfig(OffloadConfig):
    """``zero_optimization.offload_optimizer``; ``ratio`` is the share of elements updated on the CPU."""

    pipeline_read: Flag = False
    pipeline_write: Flag = False
    fast_init: Flag = False
    ratio: Num = Field(default=1.0, ge=0, le=1)
    super_offload: Flag = False
    cpuadam_cores_perc: Num = Field(default=0.8, ge=0, le=1)


class OffloadParamConfig(OffloadConfig):
    """``zero_optimization.offload_param``; sizes count elements."""

    buffer_count: Count = 5
    buffer_size: Count = 100_000_000
    max_in_cpu: Count = 1_000_000_000


class ZenFlowConfig(Block):
    """``zero_optimization.zenflow``: important gradient columns at once, the rest later on the host."""

    topk_ratio: Num = Field(default=0.1, gt=0, lt=1)
    select_strategy: Literal["auto", "step", "epoch"] = "auto"
    select_interval: AutoOrInt = "auto"
    update_interval: AutoOrInt = "auto"
    overlap_step: Flag = False
    offload: Flag = False
    auto_ratio: Num = Field(default=0.99, ge=0, le=1)
    full_warm_up_rounds: Count = 0
    pt_reserved_cores_perc: Num = Field(default=0.5, ge=0, le=1)
    steps_per_epoch: Positive | None = None


class LeafModuleConfig(Block):
    """``zero_optimization.leaf_module``: modules whose parameters are fetched together."""

    classes: Names = _LEAF_CLASSES
    names: Names = ()
    name_suffixes: Names = ()


class ZeroConfig(Block):
    """``zero_optimization``. Bucket sizes, thresholds and live limits count elements.

    ``divergence`` is an extension: what to do when ranks take different branches ("tolerate" them, raise an
    "error", or "assume_none" and skip the check).
    """

    stage: Int = Field(default=0, ge=0, le=3)
    contiguous_gradients: Flag = True
    reduce_scatter: Flag = True
    reduce_bucket_size: Positive = 500_000_000
    use_multi_rank_bucket_allreduce: Flag = True
    allgather_partitions: Flag = True
    allgather_bucket_size: Count = 500_000_000
    overlap_comm: Flag | None = None
    compute_grad_norm: Flag = True
    load_from_fp32_weights: Flag = True
    elastic_checkpoint: Flag = False
    sub_group_size: Count = 1_000_000_000
    ignore_unused_parameters: Flag = True
    round_robin_gradients: Flag = False
    parameter_alignment: Flag = False
    zero_hpz_partition_size: Count = 1
    zero_quantized_weights: Flag = False
    zero_quantized_nontrainable_weights: Flag = False
    zero_quantized_gradients: Flag = False
    prefetch_bucket_size: Count = 50_000_000
    param_persistence_threshold: Count = 100_000
    model_persistence_threshold: Count = _MAX_INT64
    max_live_parameters: Count = 1_000_000_000
    max_reuse_distance: Count = 1_000_000_000
    gather_16bit_weights_on_model_save: Flag = False
    module_granularity_threshold: Count = 0
    use_all_reduce_for_fetch_params: Flag = False
    allgather_sequential: Flag = False
    memory_efficient_linear: Flag = True
    pipeline_loading_checkpoint: Flag = False
    override_module_apply: Flag = True
    log_trace_cache_warnings: Flag = False
    enable_sanity_checks: Flag = False
    save_muon_momentum_buffer_in_memory: Flag = False
    leaf_module: LeafModuleConfig = Field(default_factory=LeafModuleConfig)
    offload_param: OffloadParamConfig | None = None
    offload_optimizer: OffloadOptimizerConfig | None = None
    zenflow: ZenFlowConfig | None = None
    mics_shard_size: Annotated[int, BeforeValidator(_shard_group)] = -1
    mics_hierarchical_params_gather: Flag = False
    divergence: Literal["tolerate", "error", "assume_none"] = "tolerate"

    @field_validator("offload_param", "offload_optimizer")
    @classmethod
    def _no_device_is_no_offload(cls, value: OffloadConfig | None) -> OffloadConfig | None:
        return None if value is None or value.device is OffloadDeviceEnum.none else value

    @field_validator("divergence", mode="before")
    @classmethod
    def _known_divergence(cls, value: Any) -> Any:
        if value not in ("tolerate", "error", "assume_none"):
            raise ValueError(f'must be "tolerate", "error" or "assume_none", not {value!r}')
        return value


_STAGE3_SPELLINGS = (
    "prefetch_bucket_size",
    "param_persistence_threshold",
    "model_persistence_threshold",
    "max_live_parameters",
    "max_reuse_distance",
    "gather_16bit_weights_on_model_save",
    "module_granularity_threshold",
    "use_all_reduce_for_fetch_params",
    "allgather_sequential",
)
ZERO_ALIASES = {f"stage3_{name}": name for name in _STAGE3_SPELLINGS} | {
    "stage3_gather_fp16_weights_on_model_save": "gather_16bit_weights_on_model_save"
}
LEGACY_OFFLOAD = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}
LEGACY_KEYS = (*LEGACY_OFFLOAD, "cpu_offload_use_pin_memory")
_OFFLOADS = ("offload_optimizer", "offload_param")


def drop_auto(block: dict[str, Any]) -> dict[str, Any]:
    """A copy of ``block`` without the values "auto"; the defaults take their place."""
    return {key: value for key, value in block.items() if not (isinstance(value, str) and value == AUTO)}


def _rename(block: dict[str, Any], renames: dict[str, str], problems: list[Violation]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in block.items():
        name = ZERO_ALIASES.get(key, key)
        if name in out and out[name] != value:
            other = renames.get(f"zero.{name}", f"zero_optimization.{name}")
            sentence = (
                f"zero_optimization.{key} and {other} are two spellings of one setting with different values. Keep one."
            )
            problems.append(Violation(f"zero_optimization.{key}", sentence))
        if name != key:
            renames[f"zero.{name}"] = f"zero_optimization.{key}"
        out[name] = value
    return out


def _legacy_offload(block: dict[str, Any], problems: list[Violation]) -> None:
    """Replace the old flags ``cpu_offload*`` by the blocks they stand for."""
    given = {key: block.pop(key, None) for key in LEGACY_KEYS}
    for old, wanted in given.items():
        path, new = f"zero_optimization.{old}", LEGACY_OFFLOAD.get(old, "pin_memory in the offload blocks")
        if wanted is not None and not isinstance(wanted, bool):
            problems.append(
                Violation(path, f"{path} must be true or false, not {wanted!r}. It is deprecated: use {new}.")
            )
        elif old in LEGACY_OFFLOAD and wanted and block.get(new) not in (None, False):
            problems.append(Violation(path, f"{path} is the deprecated spelling of {new}; both are given. Keep {new}."))
        elif old in LEGACY_OFFLOAD and wanted:
            block[new] = {"device": "cpu"}
    pin = given["cpu_offload_use_pin_memory"]
    for new in LEGACY_OFFLOAD.values():
        if pin is not None and isinstance(block.get(new), dict):
            block[new] = {"pin_memory": pin, **block[new]}


def canonical_zero(block: dict[str, Any], renames: dict[str, str], problems: list[Violation]) -> dict[str, Any]:
    """One spelling per setting: aliases resolved, "auto" dropped, absent offload as None.

    ``renames`` receives {canonical path: path as the user wrote it}; ``problems`` receives what is wrong.
    """
    out = _rename(drop_auto(block), renames, problems)
    _legacy_offload(out, problems)
    for name in (*_OFFLOADS, "leaf_module", "zenflow"):
        value = out.get(name)
        if value is False or value is None:
            out.pop(name, None)
        elif isinstance(value, dict) and name != "zenflow":  # "auto" is a value of its own inside zenflow
            out[name] = drop_auto(value)
    for key in [key for key in out if f"zero_optimization.{key}" in REMOVED_KEYS]:
        if not says_off(out.pop(key)):
            problems.append(Violation(f"zero_optimization.{key}", str(removed_key(f"zero_optimization.{key}"))))
    if isinstance(out.get("grad_hooks"), bool):
        logger.warning(
            "zero_optimization.grad_hooks is described in published documentation and read by no release. Delete it."
        )
        del out["grad_hooks"]
    if out.get("allgather_sequential") is True:
        path = renames.get("zero.allgather_sequential", "zero_optimization.allgather_sequential")
        if out.setdefault("prefetch_bucket_size", 1) != 1:
            other = renames.get("zero.prefetch_bucket_size", "zero_optimization.prefetch_bucket_size")
            problems.append(Violation(path, f"{path} means a {other} of 1. Delete one of them."))
    return out
