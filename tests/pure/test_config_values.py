"""Every documented key of the training groups: its default, the types and numbers it refuses, and where its value
lands.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from deepspeed.config import DeepSpeedConfig, DeepSpeedConfigError, load_config
from deepspeed.config.model.optim_params import (
    NOT_ON_DEVICE,
    OPTIMIZER_NAMES,
    PARAM_FIELDS,
    REQUIRED,
    SCHEDULER_NAMES,
    accepts,
)
from deepspeed.config.model.settings import declared_fields, default_of, settings
from tests.harness.rows import for_each

GROUPS = (
    "batch",
    "sequence",
    "optimizer",
    "scheduler",
    "precision",
    "comm",
    "zero",
    "offload",
    "activation_checkpointing",
    "other",
)
REPORTS = ("wall_clock_breakdown", "memory_breakdown", "steps_per_print", "dump_state", "log_level")
DOCUMENTED = json.loads((Path(__file__).parents[1] / "data" / "config_keys.json").read_text())
ENTRIES = {
    entry["path"]: entry
    for entry in DOCUMENTED
    if entry["status"] == "current"
    and (entry["group"] in GROUPS or entry["path"] in REPORTS)
    and "comms_logger" not in entry["path"]
}
# Spellings of other keys, and blocks as a whole: test_config_keys.py and test_config_removed.py are about these.
ELSEWHERE = {
    *("zero_optimization", "allgather_size", "zero_optimization.legacy_stage1"),
    *("zero_optimization.stage3_gather_fp16_weights_on_model_save", "zero_optimization.cpu_offload"),
    *("zero_optimization.cpu_offload_param", "zero_optimization.cpu_offload_use_pin_memory"),
    *("zero_optimization.offload_param", "zero_optimization.offload_optimizer", "zero_optimization.zenflow"),
    *("optimizer.params", "scheduler.params", "optimizer.params.max_grad_norm"),
}
KEYS = sorted(set(ENTRIES) - ELSEWHERE)
BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
FIELDS = {field.path: field for field in declared_fields(DeepSpeedConfig)}
MARKERS = ("REQUIRED", "UNSET", "OPTIMIZER_DEFAULT")
# The documented default is an absence that this package spells as the value it stands for.
ABSENT = {"torch_autocast.dtype": "bf16"}

WRONG: dict[str, tuple[Any, ...]] = {
    "bool": ("true", 1, [], {}),
    "int": ("3", 1.5, True, [[]], {}),
    "float": ("0.5", True, float("nan"), float("inf"), {}),
    "enum": (17, "no such value", [], {}),
    "string": (17, True, {}),
    "path": (17, True, [], {}),
    "list": (17, True, {}),
}
# What a key means only beside others.
BESIDE: dict[str, dict[str, Any]] = {
    "zero_optimization.compute_grad_norm": {"gradient_clipping": 0, "zero_optimization.stage": 1},
    "zero_optimization.zero_hpz_partition_size": {"zero_optimization.stage": 3},
    "zero_optimization.pipeline_loading_checkpoint": {"zero_optimization.stage": 3},
    "data_types.param_dtype": {"bf16.enabled": True},
    "bf16.bf16_optimizer_states": {"bf16.bf16_master_weights_and_grads": True, "zero_optimization.stage": 1},
    "fp16.fp16_master_weights_and_grads": {
        "zero_optimization.stage": 1,
        "zero_optimization.offload_optimizer.device": "cpu",
    },
    "bf16.bf16_master_weights_and_grads": {
        "zero_optimization.stage": 1,
        "zero_optimization.offload_optimizer.device": "cpu",
    },
    "optimizer.params.min_coeff": {"optimizer.params.max_coeff": 20.0},
    "zero_optimization.zenflow.offload": {"zero_optimization.overlap_comm": True},
    "zero_optimization.zenflow.select_interval": {"zero_optimization.zenflow.select_strategy": "step"},
    "zero_optimization.zenflow.select_strategy": {
        "zero_optimization.zenflow.select_interval": 3,
        "zero_optimization.zenflow.steps_per_epoch": 5,
    },
}
RIGHT: dict[str, Any] = {
    **{
        "sequence_parallel_size": 1,
        "optimizer.type": "Lion",
        "scheduler.type": "StepLR",
        "data_types.param_dtype": "bf16",
        "data_types.keep_in_fp32_modules": ["a"],
    },
    **{"zero_optimization.offload_optimizer.device": "cpu", "zero_optimization.offload_param.device": "cpu"},
    **{"zero_optimization.zenflow.select_strategy": "step", "zero_optimization.zero_hpz_partition_size": 1},
    **{"zero_optimization.zenflow.select_interval": 3, "zero_optimization.zenflow.update_interval": 3},
    **{"torch_autocast.lower_precision_safe_modules": ["torch.nn.Linear"], "torch_autocast.dtype": "fp16"},
}


def owner(path: str) -> str:
    """A name whose parameters include ``path``."""
    part, _, key = path.split(".")
    names = OPTIMIZER_NAMES if part == "optimizer" else SCHEDULER_NAMES
    return next(name for name in names if (taken := accepts(part, name)) is not None and key in taken)


def document(path: str, value: Any) -> dict[str, Any]:
    """A configuration with ``value`` at ``path`` and what the key needs beside it."""
    flat: dict[str, Any] = {"train_batch_size": 1}
    if ".params." in path:
        part, name = path.partition(".")[0], owner(path)
        flat[f"{part}.type"] = name
        taken = accepts(part, name)
        beside = [f"{part}.params.{key}" for key in taken]
        flat |= {key: 1 for key in beside if key in PARAM_FIELDS and PARAM_FIELDS[key].default == REQUIRED}
        if path.rpartition(".")[2] in NOT_ON_DEVICE.get(name.lower(), ()):
            flat |= {"zero_optimization.offload_optimizer.device": "cpu", "zero_optimization.stage": 1}
    block = re.match(r"zero_optimization\.(offload_\w+|zenflow)\.", path)
    if block is not None:
        flat |= {"zero_optimization.stage": 3, "zero_optimization.offload_optimizer.device": "cpu"}
        flat |= {"zero_optimization.offload_param.device": "cpu"} if block[1] == "offload_param" else {}
    if path in ("optimizer.legacy_fusion", "scheduler.type"):
        flat |= {"optimizer.type": "Adam"}
    out: dict[str, Any] = {}
    for key, item in (flat | BESIDE.get(path, {}) | {path: value}).items():
        *parents, name = key.split(".")
        inner = out
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[name] = item
    return out


def load(path: str, value: Any) -> DeepSpeedConfig:
    return load_config(document(path, value), world_size=1, check_support=False)


def kinds(path: str) -> list[str]:
    return [kind.partition("[")[0] for kind in ENTRIES[path]["type"].split("|")]


def test_the_groups_are_whole() -> None:
    assert len(KEYS) == len(ENTRIES) - len(ELSEWHERE) > 150
    assert {path for path in KEYS if ".params." in path} | {"optimizer.params.max_grad_norm"} == set(PARAM_FIELDS)


@for_each("path", KEYS)
def test_default(path: str) -> None:
    documented = ENTRIES[path]["default"]
    if ".params." in path:
        found: Any = PARAM_FIELDS[path].default
        if documented in MARKERS:
            assert found in (None, "required", "the optimizer's own")
            return
    elif path in BATCH or path.endswith(".type"):
        assert FIELDS[path].info.is_required() or default_of(FIELDS[path].info) is None
        return
    else:
        found = default_of(FIELDS[path].info)
    if documented in MARKERS:
        documented = None
    assert (list(found) if isinstance(found, tuple) else getattr(found, "value", found)) == ABSENT.get(path, documented)


def accepted_kinds(path: str, value: Any) -> bool:
    """Whether ``value`` is of one of the types of ``path`` after all."""
    kind = kinds(path)
    return (
        (isinstance(value, str) and "string" in kind)
        or ((isinstance(value, bool) or (type(value) is int and value in (0, 1))) and "bool" in kind)
        or (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and ("float" in kind or ("int" in kind and value in (17, 1)))
        )
        or (value in ("cpu", float("inf")) and path == "steps_per_print")
    )


@for_each("path", KEYS)
def test_wrong_types_are_refused_by_name(path: str) -> None:
    values = [value for kind in kinds(path) for value in WRONG.get(kind, ()) if not accepted_kinds(path, value)]
    assert values
    for value in values:
        with pytest.raises(DeepSpeedConfigError) as caught:
            load(path, value)
        assert any(
            fault.startswith(path) for fault in caught.value.faults or (str(caught.value).partition(": ")[2],)
        ), value


def beyond(path: str) -> list[float]:
    """Numbers that ``path`` must refuse."""
    if path in ("zero_optimization.mics_shard_size", "scheduler.params.last_batch_iteration"):
        return [-2, -5]
    low: list[float] = [] if path == "scheduler.params.decay_mom_rate" else [-1, -3]
    text = ENTRIES[path].get("range", "")
    low += [0] if text.startswith(">0") or path in BATCH else []
    return low + ([1.5] if text == "0..1" else []) + ([1] if text.endswith("<1") else [])


NUMBERS = [path for path in KEYS if {"int", "float"} & set(kinds(path)) and beyond(path)]


@for_each("path", NUMBERS)
def test_numbers_out_of_range_are_refused_by_name(path: str) -> None:
    for value in beyond(path):
        with pytest.raises(DeepSpeedConfigError) as caught:
            load(path, value)
        assert path in str(caught.value), value


def right(path: str) -> Any:
    """A value that differs from the default and is in order."""
    if path in RIGHT:
        return RIGHT[path]
    entry, kind = ENTRIES[path], kinds(path)[0]
    if kind == "list":
        return [0.5, 0.6] if path.endswith("betas") else ["a", "b"]
    if kind == "enum":
        return next(item for item in reversed(entry["allowed"]) if item not in (entry["default"], None))
    if kind == "string":
        return entry["allowed"][-1] if path == "log_level" else "x"
    if kind == "path":
        return "/tmp/x"
    if kind == "bool":
        return entry["default"] is not True
    if path in BATCH:
        return 1
    return 3 if kind == "int" else 0.25


@for_each("path", KEYS)
def test_right_values_land(path: str) -> None:
    value = right(path)
    found = {item.path: item for item in settings(load(path, value))}[path]
    landed = getattr(found.value, "value", found.value)
    assert (list(landed) if isinstance(landed, tuple) else landed) == value and found.origin == "file"


@for_each("path", [path for path in KEYS if ENTRIES[path].get("aliases")])
def test_aliases(path: str) -> None:
    value = right(path)
    for alias in ENTRIES[path]["aliases"]:
        config = document(path, value)
        (old_block, old), (new_block, new) = path.split("."), alias.split(".")
        config[new_block] = config.pop(old_block)
        config[new_block][new] = config[new_block].pop(old)
        found = load_config(config, world_size=1, check_support=False)
        assert {item.path: item.value for item in settings(found)}[path] == value
