"""What is wrong with a file, and what is worth saying about it, for people."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel

from deepspeed.config.explain.messages import UNFILLED
from deepspeed.config.explain.rules import inert_under
from deepspeed.config.model.batch import BATCH_KEYS, MICRO, TRAIN
from deepspeed.config.model.optim_params import PARAM_FIELDS, REQUIRED
from deepspeed.config.model.root import DeepSpeedConfig, judge
from deepspeed.config.model.settings import Setting, gate_open, plain, settings
from deepspeed.config.model.spelling import canonical_path
from deepspeed.config.model.values import AUTO, Support, is_auto
from deepspeed.config.parse import ConfigSource

# The keys whose "auto" Transformers and Accelerate replace before the configuration reaches the engine.
_FILLED: Mapping[str, str] = {
    "optimizer.params": "lr betas eps weight_decay",
    "scheduler.params": "warmup_min_lr warmup_max_lr warmup_num_steps total_num_steps",
    "fp16": "enabled",
    "bf16": "enabled",
    "zero_optimization": "stage reduce_bucket_size prefetch_bucket_size param_persistence_threshold "
    "gather_16bit_weights_on_model_save",
    "zero_optimization.offload_param": "device nvme_path",
    "zero_optimization.offload_optimizer": "device nvme_path",
}
_FILLED_INSIDE = {f"{block}.{name}" for block, names in _FILLED.items() for name in names.split()}
FILLED_BY_INTEGRATIONS = frozenset({*BATCH_KEYS, "gradient_clipping", *_FILLED_INSIDE})


@dataclass(frozen=True)
class Findings:
    """The judgement of a faultless source. ``autos``: what an integration fills; ``settings``: every key by path."""

    config: DeepSpeedConfig
    notes: tuple[str, ...]
    autos: tuple[str, ...]
    settings: Mapping[str, Setting]


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


def _without_effect(item: Setting, values: Mapping[str, Setting], idle: Mapping[str, str]) -> str:
    """Why ``item`` changes nothing in its configuration: its class, the switches around it, other keys; or nothing."""
    key, parts = item.key, item.path.split(".")
    if key is not None and key.support is Support.INERT:
        return f"inert here: {key.note}"
    for depth in range(len(parts) - 1, 0, -1):
        switch = ".".join([*parts[:depth], "enabled"])
        if switch != item.path and switch in values and values[switch].value is False:
            return f"off: {switch} is false"
    if item.path in idle:
        return f"off: {idle[item.path]}"
    if key is not None and not gate_open(key, values):
        return f"off: {key.gate} is not set"
    return "not yet in this release" if key is not None and key.support is Support.NOT_YET else ""


def explained(config: DeepSpeedConfig, source: ConfigSource | None = None) -> dict[str, Setting]:
    """By path, every key of ``config`` with the reason why it has no effect; a block only where it has no keys."""
    values, idle = {item.path: item for item in settings(config, source)}, inert_under(config)
    parents = {path.rpartition(".")[0] for path in values}
    return {
        path: replace(item, idle=_without_effect(item, values, idle))
        for path, item in values.items()
        if not isinstance(item.value, BaseModel) and (path not in parents or item.value)
    }


def examine(source: ConfigSource, *, world_size: int, resolved: bool = False) -> Findings:
    """What is worth saying of ``source`` for ``world_size`` data-parallel ranks; DeepSpeedConfigError with its faults.

    "auto" is accepted where an integration fills it in, unless ``resolved``.
    """
    autos: list[str] = []
    data = _without_autos(source.data, "", autos)
    if set(autos) & set(BATCH_KEYS) and TRAIN not in data and MICRO not in data:
        data[MICRO] = 1
    config, report = judge(replace(source, data=data), world_size=world_size)
    for path in autos if resolved else ():
        report.fault(path, f"{path} {UNFILLED}")
    report.raise_faults()
    assert config is not None, "without one there are faults"
    config = config.model_copy(update={"source": source.data})
    if "pipeline" in source.data:
        nothing = "models are not cut into pipeline stages in this release"
        report.notes.append(f"the block 'pipeline' is valid and asks for nothing: {nothing}")
    notes, shown = dict.fromkeys(report.notes), explained(config, source)
    for item in shown.values():
        asks = plain(item.value) != plain(item.default) or not item.idle.startswith("not yet")
        if item.origin == "file" and item.idle and asks:
            line = f" (line {item.line})" if item.line is not None else ""
            notes[f"{item.path} has no effect, {item.idle}{line}"] = None
    for path in autos:
        if ".params." in path:
            shown[path] = Setting(path, path, None, AUTO, None, "auto", source.lines.get(path, [None])[-1])
        elif path in BATCH_KEYS:
            shown[path] = replace(shown[path], value=AUTO)
    return Findings(config, tuple(notes), tuple(autos), shown)
