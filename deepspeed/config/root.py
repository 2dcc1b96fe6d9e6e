"""The whole configuration as one immutable object, and the function that makes it."""

import copy
import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SkipValidation, ValidationError, field_validator

from deepspeed.config.batch import BATCH_KEYS, resolve_batch
from deepspeed.config.explain import at_line, explain_validation, fail, nearest, unknown_key
from deepspeed.config.parse import ConfigSource, read_source
from deepspeed.config.removed import removed_key
from deepspeed.config.rules import rule_violations
from deepspeed.config.training import (
    ActivationCheckpointingConfig,
    Bf16Config,
    DataTypesConfig,
    Fp16Config,
    OptimizerConfig,
    SchedulerConfig,
    TorchAutocastConfig,
)
from deepspeed.config.values import AUTO, Block, DtypeName, Flag, Int, Num, OptionalDtype, Period
from deepspeed.config.zero import LEGACY_KEYS, ZERO_ALIASES, ZeroConfig, canonical_zero, drop_auto
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.observe.log import logger

OTHER_BLOCKS = (
    "aio",
    "autotuning",
    "checkpoint",
    "comet",
    "comms_logger",
    "compile",
    "compression_training",
    "csv_monitor",
    "data_efficiency",
    "elasticity",
    "expert_parallel",
    "flops_profiler",
    "hybrid_engine",
    "inference",
    "moe",
    "pipeline",
    "tensor_parallel",
    "tensorboard",
    "timers",
    "wandb",
    "weight_quantization",
)
OTHER_SCALARS = ("datastates_ckpt", "use_data_before_expert_parallelism")
_STRICT_BLOCKS = ("fp16", "bf16")  # blocks where "auto" means: as if absent
_NAMED_BLOCKS = ("optimizer", "scheduler")
_RESEMBLES = 0.8


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


class DeepSpeedConfig(Block):
    """Everything a training run is told, resolved and checked.

    Made by ``load_config``. ``source`` is the very dict the caller gave (or the parsed file); ``other`` holds the raw
    blocks that no part of this package has typed yet. Batch sizes count samples; ``world_size`` counts data-parallel ranks.
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
    log_level: str | None = None
    disable_python_gc: Flag = False
    vocabulary_size: Int | None = None
    seed: Int | None = None
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
    other: dict[str, Any] = Field(default_factory=dict)

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


_OWN_FIELDS = frozenset({"source", "world_size", "zero", "other"})
_TYPED_KEYS = frozenset(DeepSpeedConfig.model_fields) - _OWN_FIELDS
TOP_LEVEL_KEYS = frozenset({*_TYPED_KEYS, *OTHER_BLOCKS, *OTHER_SCALARS, "zero_optimization", "bfloat16", "allgather_size"})
_ALIASES: Mapping[str, tuple[str, ...]] = MappingProxyType({"zero": (*ZERO_ALIASES, *LEGACY_KEYS)})


def _unknown_top_level(source: ConfigSource, *, lenient: bool) -> list[str]:
    """Problems with top-level names; programs may add keys of their own, which are only mentioned."""
    problems, foreign = [], []
    for key in source.data:
        if key in TOP_LEVEL_KEYS:
            continue
        removed = removed_key(key) if isinstance(key, str) else None
        path = str(key)
        if removed is not None:
            problems.append(at_line(source, path, removed))
        elif source.from_program and ("." in path or nearest(path, TOP_LEVEL_KEYS, _RESEMBLES) is None):
            foreign.append(path)
        else:
            problems.append(at_line(source, path, unknown_key(path, TOP_LEVEL_KEYS)))
    if foreign and not lenient:  # zero.Init reads the same configuration first; one mention is enough
        logger.warning("The configuration has top-level keys that are not read: %s", ", ".join(sorted(foreign)))
    return problems


def _zero_tree(data: dict[str, Any], renames: dict[str, str], problems: list[str]) -> Any:
    """The ``zero_optimization`` block in canonical form."""
    block = data.get("zero_optimization")
    legacy_size = data.get("allgather_size")
    renames["zero"] = "zero_optimization"
    if isinstance(block, bool):
        logger.warning("zero_optimization: %s is deprecated. Write zero_optimization: {stage: %d}.", str(block).lower(), int(block))
        block = {"stage": int(block)}
    if block is None:
        block = {}
    if not isinstance(block, dict):
        return block
    out = canonical_zero(block, renames, problems)
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


def _other_tree(source: ConfigSource, problems: list[str]) -> dict[str, Any]:
    out = {}
    for key in (*OTHER_BLOCKS, *OTHER_SCALARS):
        value = source.data.get(key)
        if value is None:
            continue
        if key in OTHER_BLOCKS and not isinstance(value, dict):
            problems.append(at_line(source, key, f"{key} must be a block {{...}}, not {value!r}."))
        out[key] = copy.deepcopy(value)
    return out


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
                {"keep_in_fp32_modules": value["keep_in_fp32_modules"]} if key == "data_types" and "keep_in_fp32_modules" in value else {}
            )
            tree[key] = drop_auto(value) | native
        elif lenient and isinstance(value, str) and value == AUTO:
            del tree[key]
    return tree


def _validated(tree: dict[str, Any], source: ConfigSource, renames: dict[str, str], problems: list[str]) -> DeepSpeedConfig:
    """The model of ``tree``; raises with ``problems`` and everything the models object to."""
    try:
        config = DeepSpeedConfig.model_validate(tree)
    except ValidationError as error:
        found = explain_validation(error, DeepSpeedConfig, source=source, renames=renames, aliases=_ALIASES)
        fail(source, problems + found)
        raise
    fail(source, problems)
    return config


def load_config(source: dict[str, Any] | str | os.PathLike[str], *, world_size: int, lenient: bool = False) -> DeepSpeedConfig:
    """Read, check and resolve a configuration for ``world_size`` data-parallel ranks.

    ``source`` is a dict (kept as ``config.source``, never changed), a path to JSON with comments, or URL-safe base64 of
    JSON. ``lenient`` is for ``zero.Init``, which runs before an integration has filled in "auto" and the batch sizes.

    Raises DeepSpeedConfigError (a ValueError) that lists every fault as a sentence with the key, the nearest valid name
    and, for files, the line; BatchConfigError when the batch sizes do not fit together.
    """
    if world_size < 1:
        raise DeepSpeedConfigError(f"The data-parallel world size must be at least 1, not {world_size}.")
    read = read_source(source)
    problems = _unknown_top_level(read, lenient=lenient)
    renames: dict[str, str] = {}
    tree = _typed_tree(read, renames, lenient=lenient)
    tree["zero"] = _zero_tree(read.data, renames, problems)
    tree["other"] = _other_tree(read, problems)
    # A private copy: nothing in the result may share a list or dict with the caller's object, except ``source`` itself.
    tree = copy.deepcopy(tree) | {"source": read.data, "world_size": world_size}
    # Types and names first: a misspelt batch key must not be reported as a triangle that does not close.
    unsized = _validated(tree | dict.fromkeys(BATCH_KEYS, 1), read, renames, problems)
    batch = resolve_batch(read, world_size=world_size, lenient=lenient)
    config = unsized.model_copy(update=dict(zip(BATCH_KEYS, batch, strict=True)))
    fail(read, rule_violations(config, lenient=lenient))
    return config
