"""The whole configuration as one immutable object, and the function that makes it."""

import os
from typing import Any

from pydantic import Field, SkipValidation, ValidationError

from deepspeed.config.explain.messages import RESEMBLES, Judgement, fields_by_key, unknown_key
from deepspeed.config.explain.rules import resolve_batch, rule_violations
from deepspeed.config.model import blocks, unread, values
from deepspeed.config.model.elastic import ElasticityConfig
from deepspeed.config.model.optim_params import PARAM_BLOCKS, check_params
from deepspeed.config.model.settings import support_faults
from deepspeed.config.model.spelling import ALIASES, LEGACY_KEYS, ZERO_ALIASES, one_tree, removed_key, removed_parts
from deepspeed.config.model.tensor_parallel import TensorParallelConfig
from deepspeed.config.model.values import DtypeName, Flag, Int, Num, OptionalDtype, Period, Positive, key
from deepspeed.config.parse import ConfigSource, read_source
from deepspeed.errors import DeepSpeedConfigError, nearest_hint
from deepspeed.observe.log import logger

_DEEPEST = 64  # levels; a dict that contains itself has no end
_SCHEMA = "$schema"  # for editors: names the file that describes this format
_ModelMeta: Any = type(blocks.ZeroConfig)


class _LoadsWhenCalled(_ModelMeta):
    """Gives the model the constructor that clients know; pydantic itself never calls the class."""

    def __call__(cls, config: Any, mpu: Any = None, mesh_device: Any = None) -> "DeepSpeedConfig":
        """``load_config`` for the ranks of ``mpu``, of ``mesh_device``'s "data_parallel" axis, of WORLD_SIZE, or 1."""
        if mpu is not None:
            return load_config(config, world_size=int(mpu.get_data_parallel_world_size()), ways=1)
        if mesh_device is not None:
            return load_config(config, world_size=int(mesh_device["data_parallel"].size()), ways=1)
        ranks = os.environ.get("WORLD_SIZE", "1")
        if not ranks.isdecimal():
            raise DeepSpeedConfigError(f"The variable WORLD_SIZE must be the number of ranks, not {ranks!r}.")
        return load_config(config, world_size=int(ranks))


class DeepSpeedConfig(unread.Keys, metaclass=_LoadsWhenCalled):
    """Everything a training run is told, resolved and checked; ``load_config`` makes it.

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
    comms_logger: blocks.CommsLoggerConfig = Field(default_factory=blocks.CommsLoggerConfig)
    csv_monitor: blocks.CsvMonitorConfig = Field(default_factory=blocks.CsvMonitorConfig)
    elasticity: ElasticityConfig = Field(default_factory=ElasticityConfig)
    flops_profiler: blocks.FlopsProfilerConfig = Field(default_factory=blocks.FlopsProfilerConfig)
    hybrid_engine: blocks.HybridEngineConfig = Field(default_factory=blocks.HybridEngineConfig)
    anomalies: blocks.AnomaliesConfig = Field(default_factory=blocks.AnomaliesConfig)
    prometheus: blocks.PrometheusConfig = Field(default_factory=blocks.PrometheusConfig)
    memory: blocks.MemoryConfig = Field(default_factory=blocks.MemoryConfig)
    observe: blocks.ObserveConfig = Field(default_factory=blocks.ObserveConfig)
    tensor_parallel: TensorParallelConfig = Field(default_factory=TensorParallelConfig)
    tensorboard: blocks.TensorBoardConfig = Field(default_factory=blocks.TensorBoardConfig)
    timers: blocks.TimersConfig = Field(default_factory=blocks.TimersConfig)
    wandb: blocks.WandbConfig = Field(default_factory=blocks.WandbConfig)

    @property
    def compute_dtype(self) -> DtypeName:
        """The dtype of the forward and backward pass."""
        return "bf16" if self.bf16.enabled else "fp16" if self.fp16.enabled else "fp32"

    @property
    def grad_accum_dtype(self) -> DtypeName | None:
        """The dtype gradients are accumulated in, or None when the configuration leaves it open."""
        return self.data_types.grad_accum_dtype

    @property
    def dtype_policy(self) -> values.DtypePolicy:
        """The dtype of each quantity of a training step."""
        return values.DtypePolicy(
            compute=None if self.compute_dtype == "fp32" else self.compute_dtype,
            low=self.torch_autocast.dtype,
            accumulation=self.grad_accum_dtype or "fp32",
            reduction=self.communication_data_type,
            master="fp32",
            buffers=self.data_types.buffer_dtype,
        )

    # what programs read them by
    zero_config = property(lambda self: self.zero)
    flops_profiler_config = property(lambda self: self.flops_profiler)
    monitor_config = property(
        lambda self: blocks.MonitorConfig(**{name: getattr(self, name) for name in blocks.MonitorConfig.model_fields})
    )

    @property
    def zero_stage(self) -> int:
        """ZeRO level 0 to 3."""
        return self.zero.stage


_KEYS = frozenset(fields_by_key(DeepSpeedConfig)) - {"source", "world_size"}
TOP_LEVEL_KEYS = _KEYS | {"bfloat16", "allgather_size"}
_ALIASES = {**ALIASES, "zero_optimization": (*ZERO_ALIASES, *LEGACY_KEYS)}


def _unknown(report: Judgement) -> None:
    """Top-level names that are none; programs may add keys of their own, which are only mentioned."""
    source, foreign = report.source, []
    for name, value in source.data.items():
        path = str(name)
        if path in TOP_LEVEL_KEYS or path == _SCHEMA:
            continue
        if removed := removed_key(path):
            asked = removed_parts(path, value)
            for part in asked:
                report.fault(part, str(removed_key(part)))
            if not asked and value is not None:
                report.notes.append(f"{report.at_line(path, removed)} It only says that the feature is off here.")
        elif source.from_program and ("." in path or not nearest_hint(path, TOP_LEVEL_KEYS, RESEMBLES)):
            foreign.append(path)
        else:
            report.fault(path, unknown_key(path, TOP_LEVEL_KEYS))
    if foreign:
        report.notes.append(f"The configuration has top-level keys that are not read: {', '.join(sorted(foreign))}")
    pipeline = source.data.get("pipeline")  # the one block that may hold keys of the client's own
    for name in pipeline if isinstance(pipeline, dict) else ():
        stages = blocks.PipelineConfig.model_fields
        if name not in stages and nearest_hint(str(name), stages, RESEMBLES):
            report.fault(f"pipeline.{name}", unknown_key(f"pipeline.{name}", stages))


def _private(value: Any, source: ConfigSource, depth: int = 0) -> Any:
    """A copy of the containers in ``value``; what is neither dict, list nor tuple (a process group) stays as it is."""
    if depth > _DEEPEST:
        raise DeepSpeedConfigError(f"{source.name} is nested too deeply to be a configuration.")
    if isinstance(value, dict):
        return {name: _private(item, source, depth + 1) for name, item in value.items()}
    return type(value)([_private(item, source, depth + 1) for item in value]) if type(value) in (list, tuple) else value


def _remove(tree: dict[str, Any], place: tuple[Any, ...]) -> None:
    """Take the faulty value at ``place`` out of ``tree``, with its block where that cannot be without it."""
    holder, name = tree, place[0]
    for part in () if place[-1] == "type" and place[0] in PARAM_BLOCKS else place[1:]:
        if not isinstance(holder.get(name), dict) or part not in holder[name]:
            break
        holder, name = holder[name], part
    holder.pop(name, None)


def judge(
    source: Any, *, world_size: int, lenient: bool = False, check_support: bool = True, ways: int | None = None
) -> tuple[DeepSpeedConfig | None, Judgement]:
    """``source`` resolved, with defaults for what could not be read (else None), and all that is wrong with it."""
    read = source if isinstance(source, ConfigSource) else read_source(source)
    report, config = Judgement(read), None
    _unknown(report)
    tree = one_tree(report, _KEYS)
    for part in PARAM_BLOCKS:
        check_params(part, tree.get(part), report, lenient=lenient)
    # A private copy: nothing in the result may share a list or dict with the caller's object, except ``source`` itself.
    tree = _private(tree, read) | {"source": read.data, "world_size": world_size}
    for _ in range(2):  # once more without the values that are faulty, for what can be told of the others
        try:
            config = DeepSpeedConfig.model_validate(tree, context={"lenient": lenient})
            break
        except ValidationError as error:
            for place in report.validation(error, DeepSpeedConfig, _ALIASES):
                _remove(tree, place)
    if config is None:
        return None, report
    ways = config.tensor_parallel.ways if ways is None else ways
    if world_size % ways and not lenient:
        text = f"tensor_parallel.autotp_size {ways} does not divide the number of ranks, {world_size}. Use a divisor."
        report.fault("tensor_parallel.autotp_size", text)
    config = config.model_copy(update={"world_size": max(1, world_size // ways)})
    try:
        config = config.model_copy(update=resolve_batch(config, lenient=lenient))
    except (LookupError, ValueError) as error:
        # A misspelt batch key must not be reported as a triangle that does not close as well.
        if not report.follows(str(error)):
            report.batch = report.at_line(values.TRAIN, str(error)) if isinstance(error, ValueError) else ""
            report.fault(values.TRAIN, str(error))
    wrong = rule_violations(config, lenient=lenient)
    report.conflict = bool(wrong)
    wrong += support_faults(config) if check_support else []
    for path, sentence in [(path, sentence) for path, sentence in wrong if not report.follows(sentence)]:
        report.fault(path, sentence, unread=False)
    return config, report


def load_config(
    source: dict[str, Any] | str | os.PathLike[str] | ConfigSource | DeepSpeedConfig,
    *,
    world_size: int,
    lenient: bool = False,
    check_support: bool = True,
    ways: int | None = None,
) -> DeepSpeedConfig:
    """Read, check and resolve a configuration for ``world_size`` ranks, ``ways`` of which share one batch (None: as
    many as share layers by tensor_parallel.autotp_size; 1: ``world_size`` counts data-parallel ranks already).

    ``source`` is a dict (kept as ``config.source``, never changed), a path to JSON with comments, URL-safe base64 of
    JSON, or a configuration made earlier, which is resolved anew. ``lenient`` is for ``zero.Init``, which runs before
    an integration has filled in "auto" and the batch sizes. ``check_support`` false accepts what this release lacks.

    Raises DeepSpeedConfigError (a ValueError) with every fault, its key, the nearest valid name and, for files, the
    line; BatchConfigError when the batch sizes do not fit together.
    """
    if world_size < 1:
        raise DeepSpeedConfigError(f"The data-parallel world size must be at least 1, not {world_size}.")
    source = source.source if isinstance(source, DeepSpeedConfig) else source
    config, report = judge(source, world_size=world_size, lenient=lenient, check_support=check_support, ways=ways)
    for note in [] if lenient else report.notes:  # zero.Init reads the same configuration first; one mention is enough
        logger.warning("%s", note)
    report.raise_faults()
    assert config is not None, "without one there are faults"
    return config


class _ReadsKeys(_ModelMeta):
    """Gives the block the constructor that clients know: keys as a file spells them, or settings of other blocks."""

    def __call__(cls, **keys: Any) -> blocks.ZeroConfig:
        alone = {"stage": 3, **keys}  # without a stage no other key contradicts it
        zero = load_config({values.TRAIN: 1, "zero_optimization": alone}, world_size=1, lenient=True).zero
        stage = zero.stage if "stage" in keys else 0
        overlap = stage == 3 if zero.overlap_comm is None else zero.overlap_comm
        return zero.model_copy(update={"stage": stage, "overlap_comm": overlap})

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, blocks.ZeroConfig)


class ZeroBlockOfPrograms(blocks.ZeroConfig, metaclass=_ReadsKeys):
    """``zero_optimization`` as a program builds it: ``overlap_comm`` is true or false, by the stage where not given."""
