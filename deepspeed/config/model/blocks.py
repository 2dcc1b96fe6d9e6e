"""The blocks of a configuration: optimizer, precision, reports, ZeRO."""

from enum import Enum
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, StrictStr, field_validator

from deepspeed.config.model import unread, values
from deepspeed.config.model.values import AutoBlock, Block, Count, Flag, Int, Names, Num, PathText, Positive, Text, key

_INERT = values.Support.INERT
LogLevel = Annotated[Literal["debug", "info", "warning", "error", "critical"], values.LowerCase]
_OnTags = Annotated[Literal["WARN", "IGNORE", "FAIL"], values.UpperCase]
Normalize = Annotated[Literal["micro_batches", "tokens", "next_tokens"], values.LowerCase]
MeanOrSum = Annotated[Literal["mean", "sum"], values.LowerCase]
# Read like a dict and unpacked with **; what each setting may be is told by ``optim_params``.
Params = Annotated[dict[str, Any], AfterValidator(values.freeze)]
_bf16_if_null = BeforeValidator(lambda name: values.dtype_name(name) or "bf16", json_schema_input_type=values.DtypeText)
_AutocastDtype = Annotated[values.DtypeName, _bf16_if_null]


def _in_order(steps: tuple[int, int]) -> tuple[int, int]:
    if steps[0] > steps[1]:
        raise ValueError(f"must be the first and the last update, not [{steps[0]}, {steps[1]}]")
    return steps


Updates = Annotated[tuple[Positive, Positive], AfterValidator(_in_order)]


class OptimizerConfig(unread.OptimizerKeys):
    """``optimizer``: the name (known names in any case, else a torch.optim class) and its keyword arguments."""

    type: StrictStr = key(..., "A known optimizer in any case, or a class of torch.optim by its exact name.")
    params: Params = key(values.FrozenDict(), "Settings of the optimizer; which ones depends on its name.")


class SchedulerConfig(Block):
    """``scheduler``: the name of a learning-rate schedule and its keyword arguments."""

    type: StrictStr = key(..., "Name of the schedule, or a class of torch.optim.lr_scheduler; case matters.")
    params: Params = key(values.FrozenDict(), "Settings of the schedule; which ones depends on its name.")


class Fp16Config(unread.Fp16Keys):
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
        """Return whether the loss scale adapts itself."""
        return self.loss_scale == 0


class Bf16Config(unread.Bf16Keys):
    """``bf16`` (also written ``bfloat16``): brain-float compute with fp32 master weights."""

    enabled: Flag = key(False, "Compute in bf16; master weights stay fp32.")
    check_grad_overflow: Flag = key(True, "Skip an update whose gradients are not finite.")


class TorchAutocastConfig(Block):
    """``torch_autocast``: torch.autocast around the forward. ``lower_precision_safe_modules`` None: no module."""

    enabled: Flag = key(False, "Run the forward inside torch.autocast.")
    dtype: _AutocastDtype = key("bf16", "Dtype of autocast; null means bf16. Losses of fp16 are scaled.")
    lower_precision_safe_modules: Names | None = key(None, "Classes whose parameters rest and travel in that dtype.")


PipelineSchedule = Literal[
    "1f1b", "eager_1f1b", "gpipe", "interleaved", "breadth_first", "zero_bubble", "zbv", "dualpipev"
]


class PipelineConfig(unread.PipelineKeys):
    """``pipeline``: how a PipelineModule is cut, and in which order its stages run micro-batches."""

    stages: Positive | Literal["auto"] = key("auto", "Number of pipeline stages; that of the PipelineModule.")
    partition: Text = key("best", "How layers are dealt out to the stages; best means as the PipelineModule says.")
    seed_layers: Flag = key(False, "Seed every layer on its own when it is built.")
    activation_checkpoint_interval: Int = key(0, "Layers per recomputed block; 0: as the PipelineModule says.", ge=0)
    schedule: PipelineSchedule | None = key(None, "Order of micro-batches; null: what fits the PipelineModule.")
    chunks_per_stage: Positive | None = key(None, "Parts of the model on each stage, for schedules with several.")


class HybridEngineConfig(unread.HybridEngineKeys):
    """``hybrid_engine``: training and generation with one set of weights. Lengths are in tokens."""

    enabled: Flag = key(False, "Train and generate with one engine.")
    max_out_tokens: Positive = key(512, "Longest prompt and answer together, in tokens.")
    release_inference_cache: Flag = key(False, "Give the allocator's cached memory back after each generation.")
    pin_parameters: Flag = key(True, "Keep weights whole during a generation; false gathers them layer by layer.")
    tp_gather_partition_size: Positive = key(8, "Layers gathered by one message for a generation with whole weights.")
    inference_tp_size: Positive = key(1, "Ranks that share each layer while generating.")


class DataTypesConfig(Block):
    """``data_types``: dtypes of gradient accumulation, parameters and buffers. None: each its usual one."""

    grad_accum_dtype: values.OptionalDtype = key(None, "Dtype in which micro-batches are summed; null means fp32.")
    param_dtype: values.OptionalDtype = key(None, "The compute dtype again; refused unless fp16 and bf16 agree.")
    buffer_dtype: values.OptionalDtype = key(None, "Dtype of floating buffers; null leaves them as the model is built.")
    keep_in_fp32_modules: tuple[StrictStr, ...] | Literal["auto"] = key("auto", "Modules by name; auto asks the model.")


class ActivationCheckpointingConfig(unread.ActivationCheckpointingKeys):
    """``activation_checkpointing``: defaults for ``deepspeed.checkpointing.configure``."""

    cpu_checkpointing: Flag = key(False, "Saved activations rest in host memory (for models on a device).")
    synchronize_checkpoint_boundary: Flag = key(False, "Wait for the device at each checkpointed call.")
    profile: Flag = key(False, "Log the forward time of each checkpointed call.")


Activations = ActivationCheckpointingConfig


class AioConfig(unread.AioKeys):
    """``aio``: reads and writes of NVMe offload. ``thread_count`` is an old name that nothing ever read."""

    block_size: Int = key(1_048_576, "Bytes of one IO request, rounded up to a multiple of 4096.", ge=1, le=1 << 30)
    queue_depth: Int = key(8, "IO requests under way at once; absent means 32.", ge=1, le=4096)
    intra_op_parallelism: Int = key(1, "Threads for transfers that the kernel's queue cannot take.", ge=1, le=256)


class MemoryConfig(Block):
    """``memory`` (an extension): what one rank may hold, in bytes or as "3GiB"; checked before training starts."""

    host_limit: values.Bytes | None = key(None, 'Most host memory of a rank, as bytes or "3GiB". Null: see offload.md.')
    device_limit: values.Bytes | None = key(None, "Most device memory of one rank; on a CPU host_limit counts instead.")


class CheckpointConfig(unread.CheckpointKeys):
    """``checkpoint``: saving and loading. The last seven keys, and ``async``, are extensions."""

    tag_validation: _OnTags = key("WARN", "When ranks save under different tags: WARN (rank 0's counts), IGNORE, FAIL.")
    load_universal: Flag = key(False, "Load the universal format.", _INERT, "files tell their kind")
    keep_last: Positive | None = key(None, "Remove all but so many of the newest checkpoints after each save.")
    rate_limit: values.Bytes | None = key(None, "Most bytes a second of a rank in the background; absent: no limit.")
    allow_pickle: Flag = key(False, "Save and load client state that needs pickle; loading it can run any code.")
    client_files: Flag = key(True, "Write small *_states.pt files for programs that look for them.")
    restore_rng: Flag = key(True, "load_checkpoint restores the random number generators of each rank.")
    restore_data: Flag = key(True, "load_checkpoint brings the engine's data loader to where it was.")
    emergency_deadline: Num | None = key(
        25.0, "Seconds in which a save must end that SIGTERM or SIGUSR1 asks for; null: signals do not save.", gt=0
    )
    in_background: Flag = key(False, "save_checkpoint copies the state and writes it during training.", alias="async")


class CsvMonitorConfig(AutoBlock):
    """``csv_monitor``: one CSV file per metric under ``output_path``/``job_name``."""

    enabled: Flag = key(False, "Append metrics to CSV files on rank 0.")
    output_path: PathText = key("", "Folder for the files; empty is the working directory.")
    job_name: Text = key("DeepSpeedJobName", "Name of the sub-folder.")


class TensorBoardConfig(CsvMonitorConfig):
    """``tensorboard``: event files under ``output_path``/``job_name``."""

    enabled: Flag = key(False, "Write TensorBoard event files on rank 0.")


class PrometheusConfig(AutoBlock):
    """``prometheus`` (an extension): the newest value of every metric, for who scrapes text files."""

    enabled: Flag = key(False, "Write the newest metrics to a text file on rank 0, whole each time.")
    output_file: PathText = key("deepspeed.prom", "The file; node_exporter looks for names that end in .prom.")


class AnomaliesConfig(Block):
    """``anomalies`` (an extension): notes in the log about losses and gradients that are out of the ordinary."""

    enabled: Flag | None = key(
        None, "Watch loss and gradient norm; null: where a monitor reads them, or the record of a run."
    )
    per_layer: Flag = key(False, "Look at every parameter's gradient: zero, not finite, or rows that never get any.")
    window: Positive = key(100, "Updates that say what is usual; a note of one kind is made once in so many.")
    nonfinite_updates: Count = key(100, "Skipped updates in a row that end the job; 0: never. Not for adaptive scales.")


class WandbConfig(AutoBlock):
    """``wandb``: Weights and Biases."""

    enabled: Flag = key(False, "Report metrics to Weights and Biases from rank 0.")
    group: Text | None = key(None, "Group of runs.")
    team: Text | None = key(None, "Account or team that owns the run.")
    project: Text = key("deepspeed", "Name of the project.")


class CometConfig(AutoBlock):
    """``comet``: Comet. ``samples_log_interval`` counts samples."""

    enabled: Flag = key(False, "Report metrics to Comet from rank 0.")
    samples_log_interval: Positive = key(100, "Samples between two reports.")
    project: Text | None = key(None, "Name of the project.")
    workspace: Text | None = key(None, "Workspace that owns the project.")
    api_key: Text | None = key(None, "Key of the account; better kept in the environment.", repr=False)
    experiment_name: Text | None = key(None, "Name under which the run is shown.")
    experiment_key: Text | None = key(None, "Identity of the experiment to create or continue.")
    online: Flag | None = key(None, "false stores the report locally; null leaves it to the library.")
    mode: Literal["get", "create", "get_or_create"] | None = key(None, "Create the experiment, continue it, or either.")


class MonitorConfig(AutoBlock):
    """Blocks of all monitors together, as programs hand them to a ``MonitorMaster``; no block of a file."""

    tensorboard: TensorBoardConfig = TensorBoardConfig()
    wandb: WandbConfig = WandbConfig()
    csv_monitor: CsvMonitorConfig = CsvMonitorConfig()
    comet: CometConfig = CometConfig()
    prometheus: PrometheusConfig = PrometheusConfig()

    @property
    def enabled(self) -> bool:
        """Return whether any monitor is enabled."""
        return any(getattr(self, name).enabled for name in type(self).model_fields)


class CommsLoggerConfig(AutoBlock):
    """``comms_logger``: a record of every collective."""

    enabled: Flag = key(False, "Record all collectives of engine and deepspeed.comm, for deepspeed.comm.log_summary().")
    prof_all: Flag = key(True, "Record all operations.")
    prof_ops: Names = key((), "Operations to record when prof_all is false.")
    verbose: Flag = key(False, "Log each call as it happens.")
    debug: Flag = key(False, "Name the calling function in each record.")


class FlopsProfilerConfig(Block):
    """``flops_profiler``: operations and latencies of one update. ``peak_tflops`` is an extension."""

    enabled: Flag = key(False, "Time update profile_step, count the operations of the next one, and report both.")
    recompute_fwd_factor: Num = key(0.0, "Share of the forward that a backward repeats, where none is counted.", ge=0)
    profile_step: Int = key(1, "Updates before the one that is timed; 0: the first.", ge=0)
    module_depth: Int = key(-1, "Deepest level of modules in the table by class; -1: all.", ge=-1)
    top_modules: Int = key(1, "Classes shown at each level.", ge=1)
    detailed: Flag = key(True, "Show every module.")
    output_file: PathText | None = key(None, "File for the report; null writes it to the log.")
    peak_tflops: Num | None = key(None, "Peak of a device in 10**12 operations a second; null: as its name says.", gt=0)


class ObserveConfig(Block):
    """``observe``: a trace of some updates over all ranks, and the record of a run."""

    trace: PathText | None = key(None, "File for a trace of all ranks (ui.perfetto.dev); .gz compresses it.")
    steps: Updates = key((3, 5), "First and last update of the trace, counted from 1.")
    run: PathText | None = key(None, "Folder for the record of the run, which ds_report run and --job read.")
    slow_factor: Num = key(1.2, "A rank is slow whose work takes so many times that of the median rank.", gt=1)
    slow_steps: Positive = key(20, "Updates over which that is so.")


class ThroughputConfig(AutoBlock):
    """``timers.throughput``: samples per second."""

    enabled: Flag = key(True, "Measure samples per second, reported every steps_per_print steps.")
    synchronized: Flag = key(True, "Measure the device's time; only an update that reports waits. false: the host's.")


class TimersConfig(Block):
    """``timers``."""

    throughput: ThroughputConfig = Field(default_factory=ThroughputConfig)


class ZenFlowConfig(unread.ZeroOptimizationZenflowKeys):
    """``zero_optimization.zenflow``: update important gradient columns at once and the rest later on the host."""

    topk_ratio: Num = key(0.1, "Share of columns that are updated at once, on the device.", gt=0, lt=1)
    select_strategy: Literal["auto", "step", "epoch"] = key("auto", "Unit of select_interval; auto: every 4 windows.")
    select_interval: Positive | Literal["auto"] = key("auto", "Steps or epochs after which columns are chosen again.")
    update_interval: Positive | Literal["auto"] = key("auto", "Steps between updates of the rest; auto: 4 to 16.")
    overlap_step: Flag = key(False, "The host updates beside the next window's steps, a window late.")
    auto_ratio: Num = key(0.99, "Share of the squares in the columns chosen from which windows grow.", ge=0, le=1)
    full_warm_up_rounds: Count = key(0, "First steps that update everything at once.")
    pt_reserved_cores_perc: Num = key(0.5, "Share of the cores for the program, with overlap_step.", ge=0, le=1)
    steps_per_epoch: Positive | None = key(None, 'Updates per epoch; needed by select_strategy "epoch".')


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
    """Tier in which an offloaded state rests."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, Enum):
    """States that ``engine.offload_states`` can move."""

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
    """Keys that both offload blocks have in common."""

    device: _Device = key(OffloadDeviceEnum.none, "Tier of optimizer states: none, cpu or nvme.")
    nvme_path: PathText | None = key(None, "Folder on the drive; only its last part is made when missing.")
    buffer_count: Count = key(4, "Tiles of optimizer state in memory at once; 8 where nothing is set.")
    pin_memory: Flag = key(True, "Page-locked host memory, where an accelerator makes use of it.")


class OffloadOptimizerConfig(OffloadConfig, unread.ZeroOptimizationOffloadOptimizerKeys):
    """``zero_optimization.offload_optimizer``; ``ratio`` is the share of elements updated on the CPU.

    ``device_states`` is an extension: what the device updates rests there, or travels there for its update and back.
    So are ``delayed_update`` and ``delayed_update_warm_up``: the one-step delayed update of ZeRO-Offload.
    """

    ratio: Num = key(
        1.0, "Share of elements that the host updates, every so many-th unit; the device the rest.", ge=0, le=1
    )
    super_offload: Flag = key(False, "Begin updates beside the backward; the step takes those that it need not clip.")
    cpuadam_cores_perc: Num = key(0.8, "Share of the cores for the update, with super_offload.", ge=0, le=1)
    delayed_update: Flag = key(False, "Update beside the next forward and backward, whose weights are one step old.")
    delayed_update_warm_up: Count = key(0, "Updates at the beginning that are not delayed.")
    device_states: Literal["rest", "travel"] = key(
        "rest", "States that the device updates rest there, or only visit it."
    )
    pipeline = property(lambda self: self.pipeline_read or self.pipeline_write)


class OffloadParamConfig(OffloadConfig):
    """``zero_optimization.offload_param``; sizes count elements."""

    device: _Device = key(OffloadDeviceEnum.none, "Tier of sharded parameters: none, cpu or nvme.")
    buffer_count: Count = key(5, "Staging buffers for the drive.")
    buffer_size: Count = key(100_000_000, "Most elements of a staging buffer; larger shards travel in pieces.")
    max_in_cpu: Count = key(10**9, "Elements of this rank that stay in host memory before the drive is used.")


class LeafModuleConfig(AutoBlock):
    """``zero_optimization.leaf_module``: modules whose parameters are fetched together."""

    classes: values.NameList = key([*_LEAF_CLASSES], "Classes of modules that are gathered as a whole.")
    names: values.NameList = key([], "Names of modules that are gathered as a whole.")
    name_suffixes: values.NameList = key([], "Ends of names of modules that are gathered as a whole.")


class ZeroConfig(unread.ZeroOptimizationKeys):
    """``zero_optimization``: what is sharded. Bucket sizes, thresholds and live limits count elements.

    ``divergence`` is an extension: "tolerate" that ranks take different branches, "error", or "assume_none" (no check);
    so is ``separate_reduce_group``.
    """

    stage: Int = key(0, "Shard: 1 optimizer states, 2 and gradients, 3 and parameters; 0 nothing.", ge=0, le=3)
    reduce_scatter: Flag = key(True, "Reduce gradients to their owners instead of to all.", _INERT, _SCATTERS)
    reduce_bucket_size: Positive = key(500_000_000, "Elements of small modules packed into one unit of communication.")
    overlap_comm: Flag | None = key(None, "Communicate beside computation; only false switches it off.")
    separate_reduce_group: Flag = key(False, "Reduce gradients over a communicator of their own, beside gathers.")
    compute_grad_norm: Flag = key(True, "Compute the norm of all gradients at each update; false saves a reduction.")
    sub_group_size: Count = key(10**9, "Elements per tile of an update that rests on a drive; absent means 2,097,152.")
    zero_hpz_partition_size: Count = key(1, "Ranks that hold one copy of the parameters; other states spread wider.")
    prefetch_bucket_size: Count = key(50_000_000, "Elements gathered ahead of use; the next unit always is, unless 0.")
    param_persistence_threshold: Count = key(100_000, "Parameters of up to so many elements stay whole on every rank.")
    model_persistence_threshold: Count = key(_MAX_INT64, "Most elements, over all parameters, that may stay whole.")
    max_live_parameters: Count = key(10**9, "Most gathered elements that may wait for their next use.")
    max_reuse_distance: Count = key(10**9, "Keep parameters used again within so many elements; absent releases them.")
    gather_16bit_weights_on_model_save: Flag = key(False, "Let save_16bit_model gather the weights under stage 3.")
    allgather_sequential: Flag = key(False, "Gather little ahead: the same as a prefetch_bucket_size of 1.")
    pipeline_loading_checkpoint: Flag = key(False, "Ranks of a node read one after another.", _INERT, _OWN_PART)
    enable_sanity_checks: Flag = key(False, "Any in-place write in a read-only GatheredParameters is an error.")
    leaf_module: LeafModuleConfig = Field(default_factory=LeafModuleConfig)
    offload_param: OffloadParamConfig | None = key(None, "Where sharded parameters rest; absent or false: the device.")
    offload_optimizer: OffloadOptimizerConfig | None = key(None, "Where optimizer states rest; absent: the device.")
    zenflow: ZenFlowConfig | None = key(None, "Update important gradient columns at once, the rest later on the host.")
    mics_shard_size: _ShardGroup = key(-1, "Ranks that hold one copy of all states together (MiCS); -1 for all ranks.")
    divergence: _Divergence = key("tolerate", "Ranks that take different branches: tolerate, error, or no check.")

    @property
    def param_tier(self) -> OffloadDeviceEnum:
        """Return the tier of the parameters: below stage 3 the device, whatever ``offload_param`` says."""
        block = self.offload_param if self.stage == 3 else None
        return OffloadDeviceEnum.none if block is None else block.device

    @field_validator("offload_param", "offload_optimizer")
    @classmethod
    def _no_device_is_no_offload(cls, value: OffloadConfig | None) -> OffloadConfig | None:
        return None if value is None or value.device is OffloadDeviceEnum.none else value
