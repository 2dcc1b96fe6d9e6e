"""The whole configuration as one immutable object, and the function that makes it."""

import os
from typing import Any

from pydantic import ValidationError

from deepspeed.config.explain.messages import RESEMBLES, Judgement, fields_by_key, unknown_key
from deepspeed.config.explain.rules import resolve_batch, rule_violations
from deepspeed.config.model import blocks, values
from deepspeed.config.model.keys import Configuration
from deepspeed.config.model.optim_params import PARAM_BLOCKS, check_params
from deepspeed.config.model.settings import support_faults
from deepspeed.config.model.spelling import ALIASES, LEGACY_KEYS, ZERO_ALIASES, one_tree, removed_key, removed_parts
from deepspeed.config.parse import ConfigSource, read_source
from deepspeed.errors import DeepSpeedConfigError, nearest_hint
from deepspeed.monitor.log import logger

_DEEPEST = 64  # levels; a dict that contains itself has no end
_SCHEMA = "$schema"  # for editors: names the file that describes this format
_ModelMeta: Any = type(blocks.ZeroConfig)


class _LoadsWhenCalled(_ModelMeta):
    """Give the model the constructor that clients know; pydantic itself never calls the class."""

    def __call__(cls, config: Any, mpu: Any = None, mesh_device: Any = None) -> "DeepSpeedConfig":
        """Load ``config`` for the ranks of ``mpu``, of ``mesh_device``'s "data_parallel" axis, of WORLD_SIZE, or 1."""
        if mpu is not None:
            return load_config(config, world_size=int(mpu.get_data_parallel_world_size()), tp=1, sp=1)
        if mesh_device is not None:
            return load_config(config, world_size=int(mesh_device["data_parallel"].size()), tp=1, sp=1)
        ranks = os.environ.get("WORLD_SIZE", "1")
        if not ranks.isdecimal():
            raise DeepSpeedConfigError(f"The variable WORLD_SIZE must be the number of ranks, not {ranks!r}.")
        return load_config(config, world_size=int(ranks))


class DeepSpeedConfig(Configuration, metaclass=_LoadsWhenCalled):
    """Configuration of a run; calling the class loads and checks its argument."""


_KEYS = frozenset(fields_by_key(DeepSpeedConfig)) - {"source", "world_size"}
TOP_LEVEL_KEYS = _KEYS | {"bfloat16", "allgather_size"}
_ALIASES = {**ALIASES, "zero_optimization": (*ZERO_ALIASES, *LEGACY_KEYS)}


def _unknown(report: Judgement) -> None:
    """Report top-level keys that do not exist; for a program's source, keys of its own are only mentioned."""
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
    """Copy the containers in ``value``; all but dicts, lists and tuples (a process group) is kept as it is."""
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
    source: Any,
    *,
    world_size: int,
    lenient: bool = False,
    check_support: bool = True,
    tp: int | None = None,
    sp: int | None = None,
) -> tuple[DeepSpeedConfig | None, Judgement]:
    """Resolve ``source``, with defaults for what could not be read; return it (None if that failed) and all faults."""
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
    degrees = {
        "tensor_parallel.autotp_size": config.tensor_parallel.ways if tp is None else tp,
        "sequence_parallel_size": config.sequence_ways if sp is None else sp,
    }
    ranks = world_size
    for path, degree in degrees.items():
        if ranks % degree and not lenient:
            of = "number of ranks" if ranks == world_size else "ranks that layers leave"
            report.fault(path, f"{path} {degree} does not divide the {of}, {ranks}. Use a divisor.")
        ranks = max(1, ranks // degree)
    config = config.model_copy(update={"world_size": ranks})
    try:
        config = config.model_copy(update=resolve_batch(config, lenient=lenient))
    except (LookupError, ValueError) as error:
        # A misspelt batch key must not be reported as a triangle that does not close as well.
        if not report.follows(str(error)):
            report.batch = report.at_line(values.TRAIN, str(error)) if isinstance(error, ValueError) else ""
            report.fault(values.TRAIN, str(error))
    wrong = [fault for fault in rule_violations(config, lenient=lenient) if not report.follows(fault[1])]
    report.conflict = bool(wrong)
    unsupported = support_faults(config) if check_support else []
    for path, sentence in wrong + [fault for fault in unsupported if not report.follows(fault[1])]:
        report.fault(path, sentence, unread=False)
    return config, report


def load_config(
    source: dict[str, Any] | str | os.PathLike[str] | ConfigSource | DeepSpeedConfig,
    *,
    world_size: int,
    lenient: bool = False,
    check_support: bool = True,
    tp: int | None = None,
    sp: int | None = None,
) -> DeepSpeedConfig:
    """Read, check and resolve a configuration for ``world_size`` ranks; ``tp`` share a layer and ``sp`` each sequence.
    None: as the configuration says; 1 for both: ``world_size`` counts data-parallel ranks already.

    ``source`` is a dict (kept as ``config.source``, never changed), a path to JSON with comments, URL-safe base64 of
    JSON, or a configuration made earlier, which is resolved anew. ``lenient`` is for ``zero.Init``, which runs before
    an integration has filled in "auto" and the batch sizes. ``check_support`` false accepts what this release lacks.

    Raises DeepSpeedConfigError (a ValueError) with every fault, its key, the nearest valid name and, for files, the
    line; BatchConfigError when the batch sizes do not fit together.
    """
    if world_size < 1:
        raise DeepSpeedConfigError(f"The data-parallel world size must be at least 1, not {world_size}.")
    source = source.source if isinstance(source, DeepSpeedConfig) else source
    config, report = judge(source, world_size=world_size, lenient=lenient, check_support=check_support, tp=tp, sp=sp)
    for note in [] if lenient else report.notes:  # zero.Init reads the same configuration first; one mention is enough
        logger.warning("%s", note)
    report.raise_faults()
    assert config is not None, "without one there are faults"
    return config


class _ReadsKeys(_ModelMeta):
    """Give the block the constructor that clients know: keys as a file spells them, or settings of other blocks."""

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
