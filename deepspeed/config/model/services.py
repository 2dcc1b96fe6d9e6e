"""Blocks about what surrounds the training: IO, checkpoints, monitors, profiling, tuning, compilation, generation."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, create_model

from deepspeed.config.model.values import (
    Block,
    Bytes,
    Count,
    Flag,
    FrozenDict,
    Int,
    Names,
    NestingBlock,
    Num,
    PathText,
    Positive,
    Text,
    freeze,
)


def _upper(value: Any) -> Any:
    return value.upper() if isinstance(value, str) else value


class _AutoBlock(NestingBlock):
    """A block where "auto" means: as if absent."""

    auto_is_absent: ClassVar[bool] = True


class AioConfig(Block):
    """``aio``: reads and writes of NVMe offload. ``thread_count`` is an old name that nothing ever read."""

    block_size: Int = Field(default=1_048_576, ge=1, le=1 << 30)
    queue_depth: Int = Field(default=8, ge=1, le=4096)
    intra_op_parallelism: Int = Field(default=1, ge=1, le=256)
    thread_count: Positive = 1
    single_submit: Flag = False
    overlap_events: Flag = True
    use_gds: Flag = False


class MemoryConfig(Block):
    """``memory`` (an extension): what one rank may hold, in bytes or as "3GiB"; checked before training starts."""

    host_limit: Bytes | None = None
    device_limit: Bytes | None = None


class ParallelWriteConfig(Block):
    """``checkpoint.parallel_write``."""

    pipeline_stage: Flag = False


class CheckpointWriterConfig(Block):
    """``checkpoint.writer``: how bytes reach the disk; sizes in bytes."""

    type: Annotated[Literal["MOCK", "PYTHON", "FAST"], BeforeValidator(_upper)] = "FAST"
    io_buffer_size: Positive = 67_108_864
    io_buffer_double: Flag = True
    show_statistics: Flag = False
    data_parallel: Annotated[Literal["REPLICA", "SOCKET", "MACHINE"] | None, BeforeValidator(_upper)] = None
    decoupled: Flag = False
    io_multiplier: Positive = 1


# ``async`` is a keyword of Python, so the field cannot be written in a class body.
_Asynchronous: type[NestingBlock] = create_model("_Asynchronous", __base__=NestingBlock, **{"async": (Flag, False)})  # type: ignore[call-overload]


class CheckpointConfig(_Asynchronous):  # type: ignore[misc, valid-type]
    """``checkpoint``: saving and loading. The last six keys, and ``async``, are extensions."""

    tag_validation: Annotated[Literal["WARN", "IGNORE", "FAIL"], BeforeValidator(_upper)] = "WARN"
    load_universal: Flag = False
    use_node_local_storage: Flag = False
    parallel_write: ParallelWriteConfig = Field(default_factory=ParallelWriteConfig)
    checkpoint_serialization: Flag = True
    writer: CheckpointWriterConfig | None = None
    keep_last: Positive | None = None
    rate_limit: Bytes | None = None
    allow_pickle: Flag = False
    client_files: Flag = True
    restore_rng: Flag = True
    restore_data: Flag = True

    @property
    def in_background(self) -> bool:
        """The key ``async``."""
        return bool(getattr(self, "async"))


class DataStatesConfig(Block):
    """``datastates_ckpt``: options of the external asynchronous checkpoint engine; the size is in its own unit."""

    host_cache_size: Count


class TensorBoardConfig(_AutoBlock):
    """``tensorboard``: event files under ``output_path``/``job_name``."""

    enabled: Flag = False
    output_path: PathText = ""
    job_name: Text = "DeepSpeedJobName"


class WandbConfig(_AutoBlock):
    """``wandb``: Weights and Biases."""

    enabled: Flag = False
    group: Text | None = None
    team: Text | None = None
    project: Text = "deepspeed"


class CsvMonitorConfig(_AutoBlock):
    """``csv_monitor``: one CSV file per metric under ``output_path``/``job_name``."""

    enabled: Flag = False
    output_path: PathText = ""
    job_name: Text = "DeepSpeedJobName"


class CometConfig(_AutoBlock):
    """``comet``: Comet. ``samples_log_interval`` counts samples."""

    enabled: Flag = False
    samples_log_interval: Positive = 100
    project: Text | None = None
    workspace: Text | None = None
    api_key: Text | None = Field(default=None, repr=False)
    experiment_name: Text | None = None
    experiment_key: Text | None = None
    online: Flag | None = None
    mode: Literal["get", "create", "get_or_create"] | None = None


class CommsLoggerConfig(_AutoBlock):
    """``comms_logger``: a record of every collective."""

    enabled: Flag = False
    prof_all: Flag = True
    prof_ops: Names = ()
    verbose: Flag = False
    debug: Flag = False


class FlopsProfilerConfig(Block):
    """``flops_profiler``: floating-point operations of one step. ``module_depth`` -1 is the innermost level."""

    enabled: Flag = False
    recompute_fwd_factor: Num = Field(default=0.0, ge=0)
    profile_step: Count = 1
    module_depth: Int = Field(default=-1, ge=-1)
    top_modules: Positive = 1
    detailed: Flag = True
    output_file: PathText | None = None


class ThroughputConfig(_AutoBlock):
    """``timers.throughput``: samples per second."""

    enabled: Flag = True
    synchronized: Flag = True


class TimersConfig(NestingBlock):
    """``timers``."""

    throughput: ThroughputConfig = Field(default_factory=ThroughputConfig)


class ModelInfoConfig(NestingBlock):
    """``autotuning.model_info``: facts about the model, in parameters and layers."""

    profile: Flag = False
    num_params: Count | None = None
    hidden_size: Positive | None = None
    num_layers: Positive | None = None


def _not_empty(value: str) -> str:
    if not value:
        raise ValueError("must name a folder")
    return value


Folder = Annotated[PathText, AfterValidator(_not_empty)]
ScriptFlags = Annotated[Mapping[str, Text], AfterValidator(FrozenDict)]


class AutotuningConfig(NestingBlock):
    """``autotuning``: search for batch size and ZeRO settings. Batches count samples."""

    enabled: Flag = False
    fast: Flag = True
    results_dir: Folder = "autotuning_results"
    exps_dir: Folder = "autotuning_exps"
    overwrite: Flag = True
    start_profile_step: Count = 3
    end_profile_step: Count = 5
    metric: Literal["throughput", "latency", "flops"] = "throughput"
    metric_path: PathText | None = None
    tuner_type: Literal["gridsearch", "random", "model_based"] = "gridsearch"
    tuner_early_stopping: Count = 5
    tuner_num_trials: Positive = 50
    arg_mappings: ScriptFlags | None = None
    model_info: ModelInfoConfig | None = None
    model_info_path: PathText | None = None
    mp_size: Positive = 1
    max_train_batch_size: Positive | None = None
    min_train_batch_size: Positive = 1
    max_train_micro_batch_size_per_gpu: Positive = 1024
    min_train_micro_batch_size_per_gpu: Positive = 1
    num_tuning_micro_batch_sizes: Positive = 3


class CompileConfig(_AutoBlock):
    """``compile``: distributed passes over the compiled graph. The threshold is in bytes."""

    deepcompile: Flag = False
    autoep_non_moe: Flag = False
    free_activation: Flag = False
    free_activation_threshold: Count = 10_485_760
    offload_activation: Flag = False
    offload_activation_pin_memory: Flag = True
    offload_opt_states: Flag = False
    double_buffer: Flag = True
    symmetric_memory: Flag = False
    debug_log: Flag = False
    offload_parameters: Flag = False
    sync_before_reduce: Flag = False
    sync_after_reduce: Flag = False
    sync_before_allgather: Flag = False
    sync_after_allgather: Flag = False
    keep_int_input_tensors: Flag = True
    keep_all_input_tensors: Flag = False
    passes: tuple[Literal["z1", "z3", "autosp", "autotp"], ...] | None = None


class HybridEngineConfig(_AutoBlock):
    """``hybrid_engine``: training and generation with one set of weights. Lengths are in tokens."""

    enabled: Flag = False
    max_out_tokens: Positive = 512
    inference_tp_size: Positive = 1
    release_inference_cache: Flag = False
    pin_parameters: Flag = True
    tp_gather_partition_size: Positive = 8
    enable_cuda_graph: Flag = False


def _quantization(value: Any) -> Any:
    """Settings of one quantized group; they are few, and stay a plain mapping because their defaults depend on the
    place.
    """
    if not isinstance(value, dict):
        raise ValueError(f"must be a block {{...}}, not {value!r}")
    for key, item in value.items():
        whole = isinstance(item, int) and not isinstance(item, bool)
        allowed = {
            "num_bits": (whole and item in (4, 8), "4 or 8"),
            "group_size": (whole and item > 0, "at least 1"),
            "group_dim": (whole and item >= 0, "at least 0"),
            "symmetric": (item is False, "false"),
        }
        if key not in allowed:
            raise ValueError(f"has the unknown key {key!r}; valid here are {', '.join(allowed)}")
        fits, words = allowed[key]
        if not fits:
            raise ValueError(f"has {key} {item!r}, which must be {words}")
    return freeze(value)


def _quantized_modules(value: Any) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"must be a block {{...}}, not {value!r}")
    return FrozenDict({name: _quantization(item) for name, item in value.items()})


class WeightQuantizationConfig(_AutoBlock):
    """``weight_quantization``. Nothing is quantized until one of the last two names what."""

    enabled: Flag = True
    num_bits: Positive = 8
    q_type: Literal["symmetric", "asymmetric"] = "symmetric"
    q_groups: Positive = 1
    quantized_initialization: Annotated[
        Mapping[str, Any], BeforeValidator(_quantization), AfterValidator(FrozenDict)
    ] = FrozenDict()
    post_init_quant: Annotated[Mapping[str, Any], BeforeValidator(_quantized_modules), AfterValidator(FrozenDict)] = (
        FrozenDict()
    )
