"""The whole configuration as one immutable object, and the function that makes it."""

import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    SkipValidation,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
)

from deepspeed.config.explain.messages import at_line, explain_validation, fail, nearest, unknown_key, written_path
from deepspeed.config.explain.rules import rule_violations
from deepspeed.config.model.batch import BATCH_KEYS, resolve_batch
from deepspeed.config.model.data_efficiency import DataEfficiencyConfig
from deepspeed.config.model.features import support_faults
from deepspeed.config.model.optim_params import Part, param_violations
from deepspeed.config.model.parallel import (
    TENSOR_PARALLEL_ALIASES,
    ExpertParallelConfig,
    PipelineConfig,
    TensorParallelConfig,
    canonical_tensor_parallel,
)
from deepspeed.config.model.removed import removed_key, removed_parts
from deepspeed.config.model.services import (
    AioConfig,
    AutotuningConfig,
    CheckpointConfig,
    CometConfig,
    CommsLoggerConfig,
    CompileConfig,
    CsvMonitorConfig,
    DataStatesConfig,
    FlopsProfilerConfig,
    HybridEngineConfig,
    MemoryConfig,
    TensorBoardConfig,
    TimersConfig,
    WandbConfig,
    WeightQuantizationConfig,
)
from deepspeed.config.model.training import (
    ActivationCheckpointingConfig,
    Bf16Config,
    DataTypesConfig,
    Fp16Config,
    OptimizerConfig,
    SchedulerConfig,
    TorchAutocastConfig,
)
from deepspeed.config.model.values import (
    AUTO,
    Block,
    Count,
    DtypeName,
    Flag,
    Int,
    LogLevel,
    Num,
    OptionalDtype,
    Period,
    Positive,
    Violation,
)
from deepspeed.config.model.zero import LEGACY_KEYS, ZERO_ALIASES, ZeroConfig, canonical_zero, drop_auto
from deepspeed.config.parse import ConfigSource, read_source
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.observe.log import logger

_STRICT_BLOCKS = ("fp16", "bf16")  # blocks where "auto" means: as if absent
_NAMED_BLOCKS: tuple[Part, ...] = ("optimizer", "scheduler")
_RESEMBLES = 0.8
_DEEPEST = 64  # levels; a dict that contains itself has no end
_SCHEMA = "$schema"  # for editors: names the file that describes this format


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


def _block_or_false(value: Any, _union: ValidatorFunctionWrapHandler) -> Any:
    """A block, or false as a value of its own; a union would report every fault once per member."""
    return value if value is False else DataStatesConfig.model_validate(value)


_ModelMeta: Any = type(Block)


class _LoadsWhenCalled(_ModelMeta):
    """Gives the model the constructor that clients know; pydantic itself never calls the class."""

    def __call__(cls, config: Any, mpu: Any = None, mesh_device: Any = None) -> "DeepSpeedConfig":
        """``load_config`` for the ranks of ``mpu`` or of ``mesh_device``'s "data_parallel" axis, else WORLD_SIZE or
        1.
        """
        return load_config(config, world_size=_world_size(mpu, mesh_device))


def _world_size(mpu: Any, mesh_device: Any) -> int:
    if mpu is not None:
        return int(mpu.get_data_parallel_world_size())
    if mesh_device is not None:
        return int(mesh_device["data_parallel"].size())
    written = os.environ.get("WORLD_SIZE", "1")
    if not written.isdecimal():
        raise DeepSpeedConfigError(f"The environment variable WORLD_SIZE must be the number of ranks, not {written!r}.")
    return int(written)


class DeepSpeedConfig(Block, metaclass=_LoadsWhenCalled):
    """Everything a training run is told, resolved and checked.

    Made by ``load_config``, or by ``DeepSpeedConfig(source)`` for as many ranks as WORLD_SIZE says. ``source`` is the
    very dict the caller gave (or the parsed file). Batch sizes count samples; ``world_size`` counts data-parallel
    ranks.
    """

    source: SkipValidation[dict[str, Any]] = Field(repr=False, exclude=True)
    world_size: Int = Field(ge=1)
    train_batch_size: Int
    train_micro_batch_size_per_gpu: Int
    gradient_accumulation_steps: Int
    managed_gradient_accumulation: Flag = True
    dataloader_drop_last: Flag = False
    steps_per_print: Period | None = None
    wall_clock_breakdown: Flag = False
    memory_breakdown: Flag = False
    dump_state: Flag = False
    log_level: LogLevel | None = None
    disable_python_gc: Flag = False
    vocabulary_size: Positive | None = None
    seed: Count | None = None
    gradient_clipping: Num = Field(default=1.0, ge=0)
    prescale_gradients: Flag = False
    gradient_predivide_factor: Num = Field(default=1.0, gt=0)
    gradient_allreduce_op: Annotated[Literal["mean", "sum"], BeforeValidator(_lower)] = "mean"
    communication_data_type: OptionalDtype = None
    seq_parallel_communication_data_type: OptionalDtype = "fp32"
    disable_allgather: Flag = False
    zero_allow_untested_optimizer: Flag = False
    zero_force_ds_cpu_optimizer: Flag = True
    sequence_parallel_size: Int | None = Field(default=None, ge=1)
    data_parallel_size: Int | None = Field(default=None, ge=1)
    optimizer: OptimizerConfig | None = None
    scheduler: SchedulerConfig | None = None
    fp16: Fp16Config = Field(default_factory=Fp16Config)
    bf16: Bf16Config = Field(default_factory=Bf16Config)
    torch_autocast: TorchAutocastConfig = Field(default_factory=TorchAutocastConfig)
    data_types: DataTypesConfig = Field(default_factory=DataTypesConfig)
    activation_checkpointing: ActivationCheckpointingConfig = Field(default_factory=ActivationCheckpointingConfig)
    zero: ZeroConfig = Field(default_factory=ZeroConfig)
    use_data_before_expert_parallelism: Flag = False
    datastates_ckpt: Annotated[DataStatesConfig | Literal[False] | None, WrapValidator(_block_or_false)] = False
    aio: AioConfig = Field(default_factory=AioConfig)
    autotuning: AutotuningConfig = Field(default_factory=AutotuningConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    comet: CometConfig = Field(default_factory=CometConfig)
    comms_logger: CommsLoggerConfig = Field(default_factory=CommsLoggerConfig)
    compile: CompileConfig = Field(default_factory=CompileConfig)
    csv_monitor: CsvMonitorConfig = Field(default_factory=CsvMonitorConfig)
    data_efficiency: DataEfficiencyConfig = Field(default_factory=DataEfficiencyConfig)
    expert_parallel: ExpertParallelConfig = Field(default_factory=ExpertParallelConfig)
    flops_profiler: FlopsProfilerConfig = Field(default_factory=FlopsProfilerConfig)
    memory: MemoryConfig = Field(default_factory=MemoryConfig)
    hybrid_engine: HybridEngineConfig = Field(default_factory=HybridEngineConfig)
    pipeline: PipelineConfig = Field(default_factory=PipelineConfig)
    tensor_parallel: TensorParallelConfig = Field(default_factory=TensorParallelConfig)
    tensorboard: TensorBoardConfig = Field(default_factory=TensorBoardConfig)
    timers: TimersConfig = Field(default_factory=TimersConfig)
    wandb: WandbConfig = Field(default_factory=WandbConfig)
    weight_quantization: WeightQuantizationConfig = Field(default_factory=WeightQuantizationConfig)

    @field_validator("steps_per_print", mode="before")
    @classmethod
    def _never(cls, value: Any) -> Any:
        # JSON has no infinity; relaxed-JSON files spell it as a word.
        return float("inf") if isinstance(value, str) and value.lower() in ("inf", "infinity") else value

    @property
    def compute_dtype(self) -> DtypeName:
        """The dtype of the forward and backward pass."""
        if self.bf16.enabled:
            return "bf16"
        return "fp16" if self.fp16.enabled else "fp32"

    @property
    def grad_accum_dtype(self) -> DtypeName | None:
        """The dtype gradients are accumulated in, or None when the configuration leaves it open."""
        return self.data_types.grad_accum_dtype

    @property
    def zero_stage(self) -> int:
        """ZeRO level 0 to 3."""
        return self.zero.stage


_OWN_FIELDS = frozenset({"source", "world_size", "zero"})
_TYPED_KEYS = frozenset(DeepSpeedConfig.model_fields) - _OWN_FIELDS
TOP_LEVEL_KEYS = frozenset({*_TYPED_KEYS, "zero_optimization", "bfloat16", "allgather_size"})
_ALIASES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"zero": (*ZERO_ALIASES, *LEGACY_KEYS), "tensor_parallel": tuple(TENSOR_PARALLEL_ALIASES)}
)


def _unknown_top_level(source: ConfigSource, *, lenient: bool) -> list[str]:
    """Problems with top-level names; programs may add keys of their own, which are only mentioned."""
    problems, foreign = [], []
    for key in source.data:
        if key in TOP_LEVEL_KEYS or key == _SCHEMA:
            continue
        removed = removed_key(key) if isinstance(key, str) else None
        path = str(key)
        if removed is not None:
            asked = removed_parts(path, source.data[key])
            problems += [at_line(source, part, str(removed_key(part))) for part in asked]
            if not asked and source.data[key] is not None and not lenient:
                logger.warning("%s It only says that the feature is off here.", at_line(source, path, removed))
        elif source.from_program and ("." in path or nearest(path, TOP_LEVEL_KEYS, _RESEMBLES) is None):
            foreign.append(path)
        else:
            problems.append(at_line(source, path, unknown_key(path, TOP_LEVEL_KEYS)))
    if foreign and not lenient:  # zero.Init reads the same configuration first; one mention is enough
        logger.warning("The configuration has top-level keys that are not read: %s", ", ".join(sorted(foreign)))
    return problems


def _zero_tree(source: ConfigSource, renames: dict[str, str], problems: list[str]) -> Any:
    """The ``zero_optimization`` block in canonical form."""
    data = source.data
    block = data.get("zero_optimization")
    legacy_size = data.get("allgather_size")
    renames["zero"] = "zero_optimization"
    if isinstance(block, bool):
        logger.warning(
            "zero_optimization: %s is deprecated. Write zero_optimization: {stage: %d}.", str(block).lower(), int(block)
        )
        block = {"stage": int(block)}
    if block is None:
        block = {}
    if not isinstance(block, dict):
        return block
    found: list[Violation] = []
    out = canonical_zero(block, renames, found)
    problems += [at_line(source, path, sentence) for path, sentence in found]
    if legacy_size is not None:
        logger.warning("allgather_size is deprecated. Write zero_optimization.allgather_bucket_size.")
        if "allgather_bucket_size" not in out:
            out["allgather_bucket_size"] = legacy_size
            renames["zero.allgather_bucket_size"] = "allgather_size"
    return out


def _named_block(block: Any) -> Any:
    """An optimizer or scheduler block; without a name and settings it is no block."""
    if not isinstance(block, dict):
        return block
    kept = {key: value for key, value in block.items() if value is not None}
    if not kept.get("params") and "type" not in kept and set(kept) <= {"params"}:
        return None
    return kept


def _private(value: Any, source: ConfigSource, depth: int = 0) -> Any:
    """A copy of the containers in ``value``; what is neither dict, list nor tuple (a process group) stays what it
    is.
    """
    if depth > _DEEPEST:
        raise DeepSpeedConfigError(f"{source.name} is nested too deeply to be a configuration.")
    if isinstance(value, dict):
        return {key: _private(item, source, depth + 1) for key, item in value.items()}
    return type(value)([_private(item, source, depth + 1) for item in value]) if type(value) in (list, tuple) else value


def _typed_tree(source: ConfigSource, renames: dict[str, str], *, lenient: bool) -> dict[str, Any]:
    """The typed top-level keys with null meaning absent and, where the format says so, "auto" meaning the default."""
    data = source.data
    tree = {key: data[key] for key in _TYPED_KEYS if key in data and key not in BATCH_KEYS}
    if "bf16" not in data and "bfloat16" in data:
        tree["bf16"] = data["bfloat16"]
        renames["bf16"] = "bfloat16"
    if tree.get("gradient_clipping") == AUTO:
        del tree["gradient_clipping"]
    # null there would be read as "off" by one half of the users and as "default" by the other.
    tree = {key: value for key, value in tree.items() if value is not None or key == "gradient_clipping"}
    for key, value in list(tree.items()):
        if key in _NAMED_BLOCKS:
            tree[key] = _named_block(value)
        elif isinstance(value, dict) and (lenient or key in _STRICT_BLOCKS):
            native = (
                {"keep_in_fp32_modules": value["keep_in_fp32_modules"]}
                if key == "data_types" and "keep_in_fp32_modules" in value
                else {}
            )
            tree[key] = drop_auto(value) | native
        elif lenient and isinstance(value, str) and value == AUTO:
            del tree[key]
    return tree


def _validated(
    tree: dict[str, Any], source: ConfigSource, renames: dict[str, str], problems: list[str]
) -> DeepSpeedConfig:
    """The model of ``tree``; raises with ``problems`` and everything the models object to."""
    try:
        config = DeepSpeedConfig.model_validate(tree)
    except ValidationError as error:
        found = explain_validation(error, DeepSpeedConfig, source=source, renames=renames, aliases=_ALIASES)
        fail(source, problems + found)
        raise
    fail(source, problems)
    return config


def load_config(
    source: dict[str, Any] | str | os.PathLike[str] | ConfigSource | DeepSpeedConfig,
    *,
    world_size: int,
    lenient: bool = False,
    check_support: bool = True,
) -> DeepSpeedConfig:
    """Read, check and resolve a configuration for ``world_size`` data-parallel ranks.

    ``source`` is a dict (kept as ``config.source``, never changed), a path to JSON with comments, URL-safe base64 of
    JSON, or a configuration made earlier, which is resolved anew. ``lenient`` is for ``zero.Init``, which runs before
    an integration has filled in "auto" and the batch sizes. ``check_support`` false accepts features that this release
    does not have; only tools that describe a file want that.

    Raises DeepSpeedConfigError (a ValueError) that lists every fault as a sentence with the key, the nearest valid name
    and, for files, the line; BatchConfigError when the batch sizes do not fit together.
    """
    if world_size < 1:
        raise DeepSpeedConfigError(f"The data-parallel world size must be at least 1, not {world_size}.")
    source = source.source if isinstance(source, DeepSpeedConfig) else source
    read = source if isinstance(source, ConfigSource) else read_source(source)
    problems = _unknown_top_level(read, lenient=lenient)
    renames: dict[str, str] = {}
    tree = _typed_tree(read, renames, lenient=lenient)
    tree["zero"] = _zero_tree(read, renames, problems)
    if isinstance(tree.get("tensor_parallel"), dict):
        tree["tensor_parallel"] = canonical_tensor_parallel(tree["tensor_parallel"], renames, problems)
    for part in _NAMED_BLOCKS:
        problems += [
            at_line(read, path, sentence) for path, sentence in param_violations(part, tree.get(part), lenient=lenient)
        ]
    # A private copy: nothing in the result may share a list or dict with the caller's object, except ``source`` itself.
    tree = _private(tree, read) | {"source": read.data, "world_size": world_size}
    # Types and names first: a misspelt batch key must not be reported as a triangle that does not close.
    unsized = _validated(tree | dict.fromkeys(BATCH_KEYS, 1), read, renames, problems)
    batch = resolve_batch(read, world_size=world_size, lenient=lenient)
    config = unsized.model_copy(update=dict(zip(BATCH_KEYS, batch, strict=True)))
    broken = [
        at_line(read, written_path(path, renames), sentence)
        for path, sentence in rule_violations(config, lenient=lenient)
    ]
    fail(read, broken + (support_faults(config, read) if check_support else []))
    return config
