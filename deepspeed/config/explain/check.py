"""What is wrong with a file, and what is worth saying about it, for people."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from deepspeed.config.explain.messages import UNFILLED
from deepspeed.config.explain.rules import inert_under
from deepspeed.config.model.batch import ACCUMULATION, BATCH_KEYS, MICRO, TRAIN
from deepspeed.config.model.optim_params import PARAM_FIELDS, REQUIRED
from deepspeed.config.model.root import DeepSpeedConfig, judge
from deepspeed.config.model.settings import canonical_path, notes_of, settings
from deepspeed.config.model.values import is_auto
from deepspeed.config.parse import ConfigSource

# The keys whose "auto" Transformers and Accelerate replace before the configuration reaches the engine.
_FILLED: Mapping[str, tuple[str, ...]] = {
    "optimizer.params": ("lr", "betas", "eps", "weight_decay"),
    "scheduler.params": ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"),
    "fp16": ("enabled",),
    "bf16": ("enabled",),
    "zero_optimization": (
        *("stage", "reduce_bucket_size", "prefetch_bucket_size", "param_persistence_threshold"),
        "gather_16bit_weights_on_model_save",
    ),
    "zero_optimization.offload_param": ("device", "nvme_path"),
    "zero_optimization.offload_optimizer": ("device", "nvme_path"),
}
FILLED_BY_INTEGRATIONS = frozenset(
    {*BATCH_KEYS, "gradient_clipping", *(f"{block}.{name}" for block, names in _FILLED.items() for name in names)}
)


@dataclass(frozen=True)
class Findings:
    """The judgement of one source; no ``config`` where there are faults. ``autos`` are paths an integration fills."""

    source: ConfigSource
    config: DeepSpeedConfig | None
    faults: tuple[str, ...]
    notes: tuple[str, ...] = ()
    autos: tuple[str, ...] = ()


def _without_autos(block: Mapping[str, Any], prefix: str, autos: list[str]) -> dict[str, Any]:
    """A copy of ``block`` without each "auto" that an integration replaces, whose paths as written go to ``autos``."""
    out = {}
    for name, value in block.items():
        path = f"{prefix}{name}"
        if not is_auto(value) or canonical_path(path) not in FILLED_BY_INTEGRATIONS:
            out[name] = _without_autos(value, f"{path}.", autos) if isinstance(value, dict) else value
            continue
        autos.append(path)
        if path in PARAM_FIELDS and PARAM_FIELDS[path].default == REQUIRED:
            out[name] = 1  # stands for the number to come
    return out


def examine(source: ConfigSource, *, world_size: int, resolved: bool = False) -> Findings:
    """All faults of ``source`` for ``world_size`` data-parallel ranks, and what is worth saying when there are none.

    "auto" is accepted where an integration fills it in, unless ``resolved``.
    """
    autos: list[str] = []
    data = _without_autos(source.data, "", autos)
    if set(autos) & set(BATCH_KEYS) and TRAIN not in data and MICRO not in data:
        data[MICRO] = 1
    config, report, _ = judge(replace(source, data=data), world_size=world_size)
    for path in autos if resolved else ():
        report.fault(path, f"{path} {UNFILLED}")
    if config is None or report.faults:
        return Findings(source, None, tuple(report.faults))
    config = config.model_copy(update={"source": source.data})
    if "pipeline" in source.data:
        nothing = "models are not cut into pipeline stages in this release"
        report.notes.append(f"the block 'pipeline' is valid and asks for nothing: {nothing}")
    ineffective = notes_of({item.path: item for item in settings(config, source)}, idle=inert_under(config))
    return Findings(source, config, (), (*dict.fromkeys(report.notes), *ineffective), tuple(autos))


def batch_is_open(findings: Findings) -> bool:
    """Whether the batch sizes wait for an integration."""
    return any(path in findings.autos for path in (TRAIN, MICRO, ACCUMULATION))
