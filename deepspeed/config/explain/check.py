"""What is wrong with a file, what is worth saying about it, and what each key comes to, as text for people."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel

from deepspeed.config.explain.messages import UNFILLED
from deepspeed.config.explain.rules import inert_under
from deepspeed.config.model.optim_params import PARAM_FIELDS, REQUIRED
from deepspeed.config.model.root import DeepSpeedConfig, judge
from deepspeed.config.model.settings import Setting, gate_open, plain, settings
from deepspeed.config.model.spelling import canonical_path
from deepspeed.config.model.values import AUTO, BATCH_KEYS, MICRO, TRAIN, Support, is_auto
from deepspeed.config.parse import ConfigSource
from deepspeed.monitor.program import columns

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
WIDTH = 120
_VALUE_WIDTH, _SHORT, _NAME_WIDTH = 28, 11, 48  # of a value in front of a remark: at most, and the usual; of a name


@dataclass(frozen=True)
class Findings:
    """Hold the result of checking a valid source. ``autos``: paths an integration fills; ``settings``: keys by path."""

    config: DeepSpeedConfig
    notes: tuple[str, ...]
    autos: tuple[str, ...]
    settings: Mapping[str, Setting]


def _without_autos(block: Mapping[str, Any], prefix: str, autos: list[str]) -> dict[str, Any]:
    """Copy ``block`` without each "auto" that an integration replaces; add the paths of these to ``autos``."""
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
    """Return why ``item`` has no effect (its class, a switch around it, other keys), or "" where it has one."""
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
    """Return every key of ``config`` by path, with the reason if it has no effect; a block only if it has no keys."""
    values, idle = {item.path: item for item in settings(config, source)}, inert_under(config)
    parents = {path.rpartition(".")[0] for path in values}
    return {
        path: replace(item, idle=_without_effect(item, values, idle))
        for path, item in values.items()
        if not isinstance(item.value, BaseModel) and (path not in parents or item.value)
    }


def examine(source: ConfigSource, *, world_size: int | None = None, resolved: bool = False) -> Findings:
    """Check ``source`` for ``world_size`` ranks; return the findings or raise DeepSpeedConfigError with its faults.

    ``world_size`` None means one data-parallel rank, whatever else the ranks are cut into. "auto" is accepted where an
    integration fills it in, unless ``resolved``.
    """
    autos: list[str] = []
    data = _without_autos(source.data, "", autos)
    if set(autos) & set(BATCH_KEYS) and TRAIN not in data and MICRO not in data:
        data[MICRO] = 1
    one = None if world_size else 1
    config, report = judge(replace(source, data=data), world_size=world_size or 1, tp=one, sp=one)
    for path in autos if resolved else ():
        report.fault(path, f"{path} {UNFILLED}")
    report.raise_faults()
    assert config is not None, "without one there are faults"
    config = config.model_copy(update={"source": source.data})
    notes, shown = dict.fromkeys(report.notes), explained(config, source)
    for item in shown.values():
        asks = plain(item.value) != plain(item.default) or not item.idle.startswith("not yet")
        if item.origin == "file" and item.idle and asks:
            line = f" (line {item.line})" if item.line is not None else ""
            why = item.idle.removeprefix("inert here: ").removeprefix("off: ")
            notes[f"{item.path} has no effect: {why}{line}"] = None
    for path in autos:
        if ".params." in path:
            shown[path] = Setting(path, path, None, AUTO, None, "auto", source.lines.get(path, [None])[-1])
        elif path in BATCH_KEYS:
            shown[path] = replace(shown[path], value=AUTO)
    return Findings(config, tuple(notes), tuple(autos), shown)


def _value_text(value: Any) -> str:
    return "inf (never)" if value == float("inf") else json.dumps(plain(value), default=str)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


def _table(items: list[Setting], remarks: dict[str, str], indent: int) -> list[str]:
    """Format one aligned line per setting, without the first ``indent`` characters of its path."""
    width, lines = min(max((len(item.path) - indent for item in items), default=0), _NAME_WIDTH), []
    for item in items:
        origin = f"line {item.line}" if item.origin == "file" and item.line is not None else item.origin
        value, remark = _value_text(item.value), remarks[item.path]
        value = f"{_cut(value, _VALUE_WIDTH):<{_SHORT}}  {remark}" if remark else value
        lines.append(_cut(f"  {item.path[indent:]:<{width}}  {origin:<9}  {value}", WIDTH))
    return lines


def values_text(findings: Findings, *, everything: bool = False) -> str:
    """Format the table of all values; blocks with nothing but defaults take one line unless ``everything``."""
    waiting = {canonical_path(path) for path in findings.autos}
    automatic = {True: "until an integration fills it in", False: '"auto" means the default here'}
    remarks, blocks = {}, dict[str, list[Setting]]()
    several = {path.partition(".")[0] for path in findings.settings if "." in path}
    for path, item in findings.settings.items():  # a block that may be absent as a whole is a line of its own then
        remarks[path] = automatic[path in waiting] if item.origin == "auto" else item.idle
        head = path.partition(".")[0]
        blocks.setdefault(head if head in several else "", []).append(item)
    lines, quiet = _table(blocks.pop(""), remarks, 0), []
    for block, items in blocks.items():
        if not everything and all(item.origin == "default" for item in items):
            one = f"{_value_text(items[0].value)} (default)"
            off = any(item.path == f"{block}.enabled" and item.value is False for item in items)
            count = f"{len(items)} keys at their defaults" if len(items) > 1 else one
            quiet.append(f"  {block}: {'off, ' if off else ''}{count}")
            continue
        # What is set comes in full; a run of defaults below a switch that is off is of no use to anybody.
        off_by_default = [item.origin == "default" and remarks[item.path].startswith("off: ") for item in items]
        listed = [item for item, hidden in zip(items, off_by_default, strict=True) if everything or not hidden]
        lines += ["", block, *_table(listed, remarks, len(block) + 1)]
        if len(listed) < len(items):
            lines.append(f"  ... {len(items) - len(listed)} more at their defaults, off (--all shows them)")
    return "\n".join([*lines, *(["", "at their defaults (--all lists the keys)", *quiet] if quiet else [])])


def dtype_rows(cfg: DeepSpeedConfig) -> list[tuple[str, str, str]]:
    """Return the rows of the dtype table: the quantity, its dtype in words, and the keys that decide it."""
    policy, autocast, keep = cfg.dtype_policy, cfg.torch_autocast, cfg.data_types.keep_in_fp32_modules
    built, same = "as the model is built", policy.compute or "as the parameter"
    switch = f"{policy.compute}.enabled" if policy.compute else "no fp16 or bf16 block is on"
    kept = "those the model lists" if keep == "auto" else ", ".join(keep) or "none"
    kept = kept if policy.compute else "no matter: nothing is cast"
    master = policy.master if policy.compute else f"{policy.master}; the parameters themselves where they are"
    norms = "as the running statistics, which are buffers"
    forward = f"autocast to {autocast.dtype}" if autocast.enabled else same
    decides = "torch_autocast" if autocast.enabled else "follow the parameters"
    wire = "seq_parallel_communication_data_type" if cfg.sequence_ways > 1 else "communication_data_type"
    rows = [
        ("parameters", policy.compute or built, switch),
        ("modules kept in fp32", kept, "data_types.keep_in_fp32_modules"),
        ("parameters of batch norms", norms, "fixed: torch computes with both in one"),
        ("forward arithmetic", forward, decides),
        ("gradients (autograd)", same, "follow the parameters"),
        ("accumulation", policy.accumulation, "data_types.grad_accum_dtype"),
        ("reduction (wire)", policy.reduction or same, f"{wire}, else the parameters"),
        ("master weights", master, "fixed"),
        ("optimizer states", policy.master, "follow the master weights"),
        ("buffers", policy.buffers or built, "data_types.buffer_dtype"),
    ]
    if autocast.enabled and autocast.lower_precision_safe_modules:
        listed = f"{policy.low}, gradients and wire too: {', '.join(autocast.lower_precision_safe_modules)}"
        rows.insert(1, ("modules autocast lists", listed, "torch_autocast.lower_precision_safe_modules"))
    return rows


def dtypes_text(findings: Findings) -> str:
    """Format the dtype table: the dtype of each quantity of a step, and the key that decides it."""
    rows = [("quantity", "dtype", "decided by"), *dtype_rows(findings.config)]
    waiting = [path for path in findings.autos if canonical_path(path) in ("bf16.enabled", "fp16.enabled")]
    notes = [f'{path} is "auto": this is the table while it is false.' for path in waiting]
    return "\n".join([*columns(rows, left=3), *notes])


def as_json(findings: Findings) -> dict[str, Any]:
    """Return the settings and dtypes as a dict for JSON, which has no infinity: such a value is "inf"."""
    names = ("path", "value", "default", "origin", "line", "class", "without_effect")
    rows = []
    for item in findings.settings.values():
        value, support = "inf" if item.value == float("inf") else plain(item.value), item.key and item.key.support.value
        facts = (item.path, value, plain(item.default), item.origin, item.line, support, item.idle or None)
        rows.append(dict(zip(names, facts, strict=True)))
    dtypes = [dict(zip(("quantity", "dtype", "decided_by"), row, strict=True)) for row in dtype_rows(findings.config)]
    return {"world_size": findings.config.world_size, "settings": rows, "dtypes": dtypes}
