"""Blocks about how a model is spread over ranks: pipeline, tensor and expert parallelism."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import InitErrorDetails

from deepspeed.config.explain.messages import nearest
from deepspeed.config.model.values import (
    AttributeName,
    Block,
    Count,
    DtypeName,
    Flag,
    Int,
    Names,
    NestingBlock,
    Num,
    Pattern,
    Positive,
    Text,
    dtype_name,
    freeze,
)
from deepspeed.config.model.zero import AutoOrInt

_RESEMBLES = 0.8


class PipelineConfig(Block):
    """``pipeline``. A client may keep keys of its own here; they are stored and not read."""

    model_config = ConfigDict(extra="allow")

    stages: AutoOrInt = "auto"
    partition: Text = "best"
    seed_layers: Flag = False
    activation_checkpoint_interval: Count = 0
    pipe_partitioned: Flag = True
    grad_partitioned: Flag = True
    use_reentrant: Flag | None = None

    @model_validator(mode="before")
    @classmethod
    def _own_keys(cls, value: Any) -> Any:
        """Keys that look like a misspelt one are refused; the others are frozen."""
        if not isinstance(value, dict):
            return value
        own = {key: item for key, item in value.items() if key not in cls.model_fields}
        misspelt = [key for key in own if nearest(str(key), cls.model_fields, _RESEMBLES) is not None]
        if misspelt:
            faults = [InitErrorDetails(type="extra_forbidden", loc=(str(key),), input=own[key]) for key in misspelt]
            raise ValidationError.from_exception_data(cls.__name__, faults)
        return value | {key: freeze(item) for key, item in own.items()}


def _python_object(value: Any) -> Any:
    if isinstance(value, str | bytes | int | float | list | tuple | dict):
        raise ValueError(f"is an object that only a program can pass, not {value!r}; delete it")
    return value


PythonObject = Annotated[Any, BeforeValidator(_python_object)]


def _view(value: Any) -> Any:
    """A logical shape: sizes, -1 at most once for the rest, and at most one dimension split into a list of sizes."""
    if value is None:
        return None
    if not isinstance(value, list | tuple):
        raise ValueError(f"must be a list of sizes, not {value!r}")
    nested = [item for item in value if isinstance(item, list | tuple)]
    flat = [item for item in value if not isinstance(item, list | tuple)]
    sizes = [*flat, *(size for part in nested for size in part)]
    if any(isinstance(size, bool) or not isinstance(size, int) for size in sizes):
        raise ValueError(f"must hold whole numbers and at most one list of them, not {value!r}")
    if len(nested) > 1 or flat.count(-1) > 1 or any(size < 1 and size != -1 for size in flat):
        raise ValueError(
            f"must hold sizes of at least 1, -1 at most once, and at most one list of sizes, not {value!r}"
        )
    if any(not part or min(part) < 1 for part in nested):
        raise ValueError(f"must hold sizes of at least 1 in its inner list, not {value!r}")
    return freeze(value)


class LayerSpec(NestingBlock):
    """``tensor_parallel.partition_config.layer_specs[]``: how the parameters that match ``patterns`` are split."""

    patterns: Annotated[
        tuple[Pattern, ...], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)
    ] = ()
    partition_type: Literal["column", "row", "skip"] = "column"
    shape: Annotated[tuple[Any, ...] | None, BeforeValidator(_view)] = None
    partition_dim: Count | None = None
    model_types: Annotated[
        tuple[Text, ...] | None, BeforeValidator(lambda value: [value] if isinstance(value, str) else value)
    ] = None
    gather_output: Flag = False
    grad_allreduce: Flag = False


class PartitionConfig(NestingBlock):
    """``tensor_parallel.partition_config``: rules of the user's own, tried before the built-in ones."""

    tp_size: Positive = 1
    use_default_specs: Flag = True
    strict_mode: Flag = False
    embedding_partition_dim: Count = 1
    lm_head_patterns: Names = ("lm_head", "embed_out")
    layer_specs: tuple[LayerSpec, ...] = ()


class TensorParallelGroupConfig(NestingBlock):
    """``tensor_parallel.tensor_parallel`` (also written ``tp``): the group of ranks that share one layer."""

    auto_is_absent: ClassVar[bool] = True

    tp_size: Positive = 1
    tp_grain_size: Positive = 1
    mpu: PythonObject = None
    tp_group: PythonObject = None


class TensorParallelConfig(NestingBlock):
    """``tensor_parallel``: layers split over ``autotp_size`` ranks; 0 and 1 are off."""

    auto_is_absent: ClassVar[bool] = True

    autotp_size: Count = 0
    dtype: Annotated[DtypeName, BeforeValidator(dtype_name)] = "fp16"
    tp_overlap_comm: Flag = False
    vocab_parallel_lm_head: Flag | None = None
    vocab_parallel_ce_backend: Literal["torch", "liger"] = "torch"
    tensor_parallel: TensorParallelGroupConfig = Field(default_factory=TensorParallelGroupConfig)
    injection_policy_tuple: Annotated[tuple[Any, ...] | None, BeforeValidator(freeze)] = None
    preset_model: Literal["llama", "bloom", "chatglm", "mixtral", "deepseek_v2", "qwen2", "phi3"] | None = None
    keep_module_on_host: Flag = False
    replace_with_kernel_inject: Flag = False
    partition_config: PartitionConfig | None = None


TENSOR_PARALLEL_ALIASES: Mapping[str, str] = MappingProxyType(
    {"tp": "tensor_parallel", "kernel_inject": "replace_with_kernel_inject"}
)


def canonical_tensor_parallel(block: dict[str, Any], renames: dict[str, str], problems: list[str]) -> dict[str, Any]:
    """One spelling per setting; ``renames`` receives {canonical path: path as written}, ``problems`` sentences."""
    out: dict[str, Any] = {}
    for key, value in block.items():
        name = TENSOR_PARALLEL_ALIASES.get(key, key)
        if name in out and out[name] != value:
            other = renames.get(f"tensor_parallel.{name}", f"tensor_parallel.{name}")
            problems.append(
                f"tensor_parallel.{key} and {other} are two spellings of one setting with different values. Keep one."
            )
        if name != key:
            renames[f"tensor_parallel.{name}"] = f"tensor_parallel.{key}"
        out[name] = value
    return out


def _only_null(value: Any) -> None:
    if value is not None:
        raise ValueError(f"is not supported: it must be null, not {value!r}")


def _auto_or_number(value: Any) -> Any:
    if isinstance(value, str) and value != "auto":
        raise ValueError(f'must be "auto" or a number, not {value!r}')
    return value


class ExpertParallelConfig(NestingBlock):
    """``expert_parallel``: experts of Hugging Face models spread over ranks.

    ``expert_w3`` null says that gate and up projection are one tensor; absent (see ``model_fields_set``) follows the
    preset.
    """

    enabled: Flag = False
    autoep_size: Positive = 1
    expert_tensor_parallel_size: Int = Field(default=1, ge=1, le=1)
    validate_folding_routing: Flag = False
    async_split_plan: Flag = False
    preset_model: Literal["mixtral", "qwen3_moe", "qwen3_5_moe", "deepseek_v2", "deepseek_v3", "minimax_m3"] | None = (
        None
    )
    moe_layer_pattern: Pattern | None = None
    expert_pattern: AttributeName | None = None
    router_pattern: AttributeName | None = None
    use_grouped_mm: Flag = True
    disable_triton_grouped_mm: Flag = False
    route_norm: Flag | None = None
    route_scale: Num = 1.0
    score_apply: Literal["auto", "pre", "post"] = "auto"
    combine_impl: Literal["auto", "weighted_sum", "fused_weighted_sum", "legacy_bmm"] = "auto"
    row_weighting_impl: Literal["auto", "eager", "fused"] = "auto"
    gate_up_impl: Literal["separate", "fused"] = "separate"
    comm_backend: Literal["comm", "deepep"] = "comm"
    comm_num_sm: Positive = 12
    comm_qp_margin: Count = 4
    comm_max_tokens_per_rank: Count = 0
    num_expert_groups: Positive | None = None
    num_limited_groups: Positive | None = None
    score_func: Literal["auto", "softmax", "sigmoid"] = "auto"
    top_k: AutoOrInt = "auto"
    load_balance_coeff: Annotated[None, BeforeValidator(_only_null)] = None
    routed_scaling_factor: Annotated[Literal["auto"] | Num, BeforeValidator(_auto_or_number)] = "auto"
    expert_w1: AttributeName | None = None
    expert_w2: AttributeName | None = None
    expert_w3: AttributeName | None = None
    num_experts_attr: Text | None = None
    top_k_attr: Text | None = None
    has_shared_experts: Flag | None = None
    shared_experts_pattern: Text | None = None
    shared_experts_gate_pattern: Text | None = None
    expert_activation: Literal["swiglu", "geglu_tanh", "swiglu_clamped", "swiglu_oai"] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Any:
        groups, limited = self.num_expert_groups, self.num_limited_groups
        if not self.enabled:
            return self
        for wrong, sentence in (
            ((groups is None) is not (limited is None), "needs num_expert_groups and num_limited_groups together"),
            (
                groups and limited and limited > groups,
                f"has num_limited_groups {limited} above num_expert_groups {groups}",
            ),
            (
                self.comm_backend == "deepep" and not self.comm_max_tokens_per_rank,
                'needs comm_max_tokens_per_rank with comm_backend "deepep"',
            ),
            (
                self.gate_up_impl == "fused" and not self.use_grouped_mm,
                'needs use_grouped_mm with gate_up_impl "fused"',
            ),
            (
                self.row_weighting_impl == "fused" and (self.comm_backend != "deepep" or self.autoep_size < 2),
                'needs comm_backend "deepep" and autoep_size above 1 with row_weighting_impl "fused"',
            ),
        ):
            if wrong:
                raise ValueError(sentence)
        return self
