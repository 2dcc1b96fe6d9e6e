"""Every key of the configuration: the fields of the whole, and what is read off several of them."""

from typing import Any

from pydantic import Field, SkipValidation

from deepspeed.config.model import blocks, unread, values
from deepspeed.config.model.elastic import ElasticityConfig
from deepspeed.config.model.expert_parallel import ExpertParallelConfig
from deepspeed.config.model.sequence import CompileConfig, SequenceConfig
from deepspeed.config.model.tensor_parallel import TensorParallelConfig
from deepspeed.config.model.values import DtypeName, Flag, Int, Num, OptionalDtype, Period, Positive, key


class Configuration(unread.Keys):
    """Hold everything a training run is told, resolved and checked; ``load_config`` builds it.

    ``source`` is the very dict the caller gave (or the parsed file). Batch sizes count samples; ``world_size`` counts
    data-parallel ranks.
    """

    source: SkipValidation[dict[str, Any]] = Field(repr=False, exclude=True)
    world_size: Int = Field(ge=1)
    train_batch_size: Positive = key(None, "Samples per optimizer update over all data-parallel ranks.")
    train_micro_batch_size_per_gpu: Positive = key(None, "Samples that a rank takes through one forward and backward.")
    gradient_accumulation_steps: Positive = key(None, "Micro-batches whose gradients are summed before one update.")
    managed_gradient_accumulation: Flag = key(True, "The engine counts micro-batches; false: each step() updates.")
    dataloader_drop_last: Flag = key(False, "Leave out the last, shorter batch in the loader that the engine builds.")
    steps_per_print: Period | None = key(None, "Updates between two progress lines; null and infinity mean never.")
    wall_clock_breakdown: Flag = key(False, "Time forward, backward and step, and log it with every progress line.")
    memory_breakdown: Flag = key(False, "Log memory in use after the start and after every forward, backward and step.")
    dump_state: Flag = key(False, "Log the engine's attributes and the whole configuration once at the start.")
    log_level: blocks.LogLevel | None = key(None, "Level of this package's logger; null leaves it.")
    hang_timeout: Num | None = key(
        None, "Seconds in which no rank makes progress before the job ends; null: never.", gt=0
    )
    disable_python_gc: Flag = key(False, "No cyclic garbage collection while the engine lives.")
    vocabulary_size: Positive | None = key(None, "Rows of the embedding; warns about a size that is no multiple of 8.")
    gradient_clipping: Num = key(1.0, "Largest L2 norm of all gradients together; 0 switches clipping off.", ge=0)
    prescale_gradients: Flag = key(False, "Divide by all ranks before the reduction, not by a part of them.")
    gradient_predivide_factor: Num = key(1.0, "Divide by this before the reduction, by the rest after it.", gt=0)
    gradient_allreduce_op: blocks.MeanOrSum = key("mean", "Mean or sum of gradients over data-parallel ranks.")
    normalize: blocks.Normalize = key(
        "micro_batches", "What an update is the mean over; next_tokens: labels are read one place to the left."
    )
    communication_data_type: OptionalDtype = key(None, "Dtype of gradients between ranks; null follows the parameters.")
    seq_parallel_communication_data_type: OptionalDtype = key(
        "fp32", "The same where several ranks share one sequence."
    )
    sequence_parallel_size: Positive | None = key(None, "Ranks that share one sequence; null and 1 are off.")
    data_parallel_size: Positive | None = key(
        None, "Ranks that are fed different batches, checked where sequence_parallel_size is above 1; null: the rest."
    )
    optimizer: blocks.OptimizerConfig | None = None
    scheduler: blocks.SchedulerConfig | None = None
    fp16: blocks.Fp16Config = Field(default_factory=blocks.Fp16Config)
    bf16: blocks.Bf16Config = Field(default_factory=blocks.Bf16Config)
    torch_autocast: blocks.TorchAutocastConfig = Field(default_factory=blocks.TorchAutocastConfig)
    data_types: blocks.DataTypesConfig = Field(default_factory=blocks.DataTypesConfig)
    pipeline: blocks.PipelineConfig = Field(default_factory=blocks.PipelineConfig)
    activation_checkpointing: blocks.Activations = Field(default_factory=blocks.ActivationCheckpointingConfig)
    zero: blocks.ZeroConfig = Field(default_factory=blocks.ZeroConfig, alias="zero_optimization")
    aio: blocks.AioConfig = Field(default_factory=blocks.AioConfig)
    checkpoint: blocks.CheckpointConfig = Field(default_factory=blocks.CheckpointConfig)
    comet: blocks.CometConfig = Field(default_factory=blocks.CometConfig)
    compile: CompileConfig = Field(default_factory=CompileConfig)
    comms_logger: blocks.CommsLoggerConfig = Field(default_factory=blocks.CommsLoggerConfig)
    csv_monitor: blocks.CsvMonitorConfig = Field(default_factory=blocks.CsvMonitorConfig)
    elasticity: ElasticityConfig = Field(default_factory=ElasticityConfig)
    expert_parallel: ExpertParallelConfig = Field(default_factory=ExpertParallelConfig)
    use_data_before_expert_parallelism: Flag = key(False, "Neighbouring ranks hold the same experts.")
    flops_profiler: blocks.FlopsProfilerConfig = Field(default_factory=blocks.FlopsProfilerConfig)
    hybrid_engine: blocks.HybridEngineConfig = Field(default_factory=blocks.HybridEngineConfig)
    anomalies: blocks.AnomaliesConfig = Field(default_factory=blocks.AnomaliesConfig)
    prometheus: blocks.PrometheusConfig = Field(default_factory=blocks.PrometheusConfig)
    memory: blocks.MemoryConfig = Field(default_factory=blocks.MemoryConfig)
    observe: blocks.ObserveConfig = Field(default_factory=blocks.ObserveConfig)
    sequence: SequenceConfig = Field(default_factory=SequenceConfig)
    tensor_parallel: TensorParallelConfig = Field(default_factory=TensorParallelConfig)
    tensorboard: blocks.TensorBoardConfig = Field(default_factory=blocks.TensorBoardConfig)
    timers: blocks.TimersConfig = Field(default_factory=blocks.TimersConfig)
    wandb: blocks.WandbConfig = Field(default_factory=blocks.WandbConfig)

    @property
    def compute_dtype(self) -> DtypeName:
        """Return the dtype of the forward and backward pass."""
        return "bf16" if self.bf16.enabled else "fp16" if self.fp16.enabled else "fp32"

    @property
    def ways(self) -> int:
        """Return how many ranks share one batch: its sequences, and each layer."""
        return self.sequence_ways * self.tensor_parallel.ways

    @property
    def sequence_ways(self) -> int:
        """Return how many ranks share one sequence."""
        return self.sequence_parallel_size or 1

    @property
    def dtype_policy(self) -> values.DtypePolicy:
        """Return the dtype of each quantity of a training step."""
        shared = self.sequence_ways > 1
        return values.DtypePolicy(
            compute=None if self.compute_dtype == "fp32" else self.compute_dtype,
            low=self.torch_autocast.dtype,
            accumulation=self.data_types.grad_accum_dtype or "fp32",
            reduction=self.seq_parallel_communication_data_type if shared else self.communication_data_type,
            master="fp32",
            buffers=self.data_types.buffer_dtype,
        )

    # what programs read them by
    zero_config = property(lambda self: self.zero)
    flops_profiler_config = property(lambda self: self.flops_profiler)
    monitor_config = property(
        lambda self: blocks.MonitorConfig(**{name: getattr(self, name) for name in blocks.MonitorConfig.model_fields})
    )
    zero_stage = property(lambda self: self.zero.stage)
