"""Every documented key: its default, the types and numbers it refuses, "auto" and null, and where its value lands."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from deepspeed.config import DeepSpeedConfig, DeepSpeedConfigError, load_config
from deepspeed.config.model.optim_params import (
    NOT_ON_DEVICE,
    OPTIMIZER_NAMES,
    PARAM_FIELDS,
    REQUIRED,
    SCHEDULER_NAMES,
    accepts,
)
from deepspeed.config.model.settings import all_keys, declared_fields, default_of, settings
from deepspeed.config.model.values import FrozenDict, Support
from tests.harness.rows import for_each

DOCUMENTED = json.loads((Path(__file__).parents[1] / "data" / "config_keys.json").read_text())
ENTRIES = {entry["path"]: entry for entry in DOCUMENTED if entry["status"] in ("current", "docs-only")}
# Spellings of other keys, and blocks as a whole: test_config_keys.py and test_config_removed.py are about these.
ELSEWHERE = {
    *("zero_optimization", "allgather_size", "zero_optimization.legacy_stage1"),
    *("zero_optimization.stage3_gather_fp16_weights_on_model_save", "zero_optimization.cpu_offload"),
    *("zero_optimization.cpu_offload_param", "zero_optimization.cpu_offload_use_pin_memory"),
    *("zero_optimization.offload_param", "zero_optimization.offload_optimizer", "zero_optimization.zenflow"),
    *("optimizer.params", "scheduler.params", "optimizer.params.max_grad_norm", "pipeline.<any>"),
    *(path for path, entry in ENTRIES.items() if entry["status"] == "docs-only" and path != "aio.thread_count"),
}
KEYS = sorted(set(ENTRIES) - ELSEWHERE)
LOADED = {path: key for path, key in all_keys(DeepSpeedConfig).items() if path in ENTRIES}
BY_PROGRAM = ("tensor_parallel.tensor_parallel.mpu", "tensor_parallel.tensor_parallel.tp_group")
OFFLOADED = [path for path in KEYS if path.startswith("zero_optimization.zenflow.") or path.endswith(".device")]
BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
FIELDS = {field.path: field for field in declared_fields(DeepSpeedConfig)}
MARKERS = ("REQUIRED", "UNSET", "OPTIMIZER_DEFAULT", "REQUIRED_IF_ENABLED", "EXTERNAL")
# The documented default is an absence that this package spells as the value it stands for.
ABSENT = {"torch_autocast.dtype": "bf16", "tensor_parallel.dtype": "fp16"}

WRONG: dict[str, tuple[Any, ...]] = {
    "bool": ("true", 1, [], {}),
    "int": ("3", 1.5, True, float("nan"), [[]], {}),
    "float": ("0.5", True, float("nan"), float("inf"), {}),
    "enum": (17, "no such value", [], {}),
    "string": (17, True, {}),
    "path": (17, True, [], {}),
    "list": (17, True, {}),
    "object": ([1, 2],),
    "null": ([1, 2], {"a": 1}),
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
    **{"tensor_parallel.autotp_size": 1, "tensor_parallel.dtype": "bf16"},
    "tensor_parallel.injection_policy_tuple": [["Layer", ["out"]]],
    "tensor_parallel.partition_config": {"strict_mode": True},
    "tensor_parallel.partition_config.layer_specs[].shape": [-1, [2, 1], 4],
    **{"expert_parallel.expert_tensor_parallel_size": 1, "expert_parallel.load_balance_coeff": None},
    **{"checkpoint.writer": {"type": "PYTHON"}, "datastates_ckpt": {"host_cache_size": 16}},
    "autotuning.arg_mappings": {"train_micro_batch_size_per_gpu": "--batch"},
    "autotuning.model_info": {"num_layers": 2},
    "weight_quantization.quantized_initialization": {
        **{"num_bits": 4, "group_size": 64, "group_dim": 0, "symmetric": False}
    },
    "weight_quantization.post_init_quant": {"fc": {"num_bits": 8}},
    "compile.passes": ["autosp"],
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
    if path == "compile.deepcompile":
        flat["compile.passes"] = ["autosp"]
    block = re.match(r"zero_optimization\.(offload_\w+|zenflow)\.", path)
    if block is not None:
        flat |= {"zero_optimization.stage": 3, "zero_optimization.offload_optimizer.device": "cpu"}
        flat |= {"zero_optimization.offload_param.device": "cpu"} if block[1] == "offload_param" else {}
    if path in ("optimizer.legacy_fusion", "scheduler.type"):
        flat |= {"optimizer.type": "Adam"}
    place, _, rest = path.partition("[].")
    if rest:
        value = [{rest: value}]
    out: dict[str, Any] = {}
    for key, item in (flat | BESIDE.get(path, {}) | {place.replace("<metric>", "seqlen"): value}).items():
        *parents, name = key.split(".")
        inner = out
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[name] = item
    return out


def load(path: str, value: Any) -> DeepSpeedConfig:
    return load_config(document(path, value), world_size=1, check_support=False)


def landed(path: str, value: Any) -> Any:
    """What ``path`` is in a configuration that says ``value``, as JSON has it; blocks with what they were given."""
    config = load(path, value)
    if path in FIELDS and isinstance(value, dict):
        found: Any = config
        for name in path.split("."):
            found = getattr(found, name)
        return plain(found)
    item = {item.pattern: item for item in settings(config)}[path]
    changeable = isinstance(item.value, dict | list) and not isinstance(item.value, FrozenDict)
    assert not changeable or ".leaf_module." in path  # programs compare these with lists
    assert item.origin == ("auto" if value == "auto" != item.value else "file")
    return plain(item.value)


def plain(value: Any) -> Any:
    """``value`` as JSON has it."""
    if isinstance(value, BaseModel):
        return {name: plain(getattr(value, name)) for name in value.model_fields_set}
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, tuple) else getattr(value, "value", value)


def refused(path: str, value: Any) -> str:
    """What is said of ``path``, as a sentence names it: a list element has its position."""
    with pytest.raises(DeepSpeedConfigError) as caught:
        load(path, value)
    text = str(caught.value)
    assert "pydantic" not in text and "Input should" not in text
    name = path.replace("[]", ".0").replace("<metric>", "seqlen")
    assert any(fault.startswith(name) for fault in caught.value.faults or (text.partition(": ")[2],)), (value, text)
    return text


def kinds(path: str) -> list[str]:
    return [kind.partition("[")[0] for kind in ENTRIES[path]["type"].split("|")]


def test_the_groups_are_whole() -> None:
    assert len(KEYS) == len(ENTRIES) - len(ELSEWHERE) > 380
    assert {path for path in KEYS if ".params." in path} | {"optimizer.params.max_grad_norm"} == set(PARAM_FIELDS)


@for_each("path", KEYS)
def test_default(path: str) -> None:
    documented = ENTRIES[path]["default"]
    if ".params." in path:
        found: Any = PARAM_FIELDS[path].default
        if documented in MARKERS:
            assert found in (None, "required", "the optimizer's own")
            return
    elif path in (*BATCH, "optimizer.type", "scheduler.type"):
        assert FIELDS[path].info.is_required() or default_of(FIELDS[path].info) is None
        return
    else:
        found = default_of(FIELDS[path].info)
    if documented in MARKERS:
        documented = None
    found, wanted = plain(found), ABSENT.get(path, documented)
    assert found == wanted and isinstance(found, bool) == isinstance(wanted, bool)


def accepted_kinds(path: str, value: Any) -> bool:
    """Whether ``value`` is of one of the types of ``path`` after all."""
    kind = kinds(path)
    return (
        (isinstance(value, str) and "string" in kind)
        or (isinstance(value, list) and "list" in kind)
        or (isinstance(value, dict) and "object" in kind)
        or ((isinstance(value, bool) or (type(value) is int and value in (0, 1))) and "bool" in kind)
        or (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and ("float" in kind or ("int" in kind and value in (17, 1)))
        )
        or (value in ("cpu", float("inf")) and path == "steps_per_print")
    )


def wrong(path: str) -> list[Any]:
    """Values of a type that ``path`` does not take."""
    return [value for kind in kinds(path) for value in WRONG.get(kind, ()) if not accepted_kinds(path, value)]


@for_each("path", KEYS)
def test_wrong_types_are_refused_by_name(path: str) -> None:
    assert wrong(path)
    for value in wrong(path):
        refused(path, value)
    null = kinds(path)[-1] != "null" and None not in ENTRIES[path].get("allowed", []) and LOADED[path].gate != path
    default = ENTRIES[path]["default"] not in (None, *MARKERS)
    if null and default and "." in path and path not in (*RIGHT, "optimizer.legacy_fusion"):
        refused(path, None)


MINUS_ONE = ("flops_profiler.module_depth",)
BELOW_ZERO = ("scheduler.params.decay_mom_rate", "expert_parallel.route_scale", "expert_parallel.routed_scaling_factor")


def beyond(path: str) -> list[float]:
    """Numbers that ``path`` must refuse."""
    if path in ("zero_optimization.mics_shard_size", "scheduler.params.last_batch_iteration"):
        return [-2, -5]
    low: list[float] = [] if path in BELOW_ZERO else [-2] if path in MINUS_ONE else [-1, -3]
    text = ENTRIES[path].get("range", "")
    low += [int(text[2:]) - 1] if text.startswith(">=") else []
    low += [0] if text.startswith(">0") or path in BATCH else []
    return low + ([1.5] if text == "0..1" else []) + ([1] if text.endswith("<1") else [])


NUMBERS = [path for path in KEYS if {"int", "float"} & set(kinds(path)) and beyond(path)]


@for_each("path", NUMBERS)
def test_numbers_out_of_range_are_refused_by_name(path: str) -> None:
    for value in beyond(path):
        refused(path, value)


def right(path: str) -> Any:
    """A value that differs from the default and is in order."""
    if path in RIGHT:
        return RIGHT[path]
    entry, kind = ENTRIES[path], kinds(path)[0]
    if kind == "list":
        return [0.5, 0.6] if path.endswith("betas") else [1, 2] if "[int]" in entry["type"] else ["a", "b"]
    if kind == "object":
        return object()
    if kind == "enum":
        return next(item for item in reversed(entry["allowed"]) if item not in (entry["default"], None))
    if kind == "string":
        return entry["allowed"][-1] if path == "log_level" else 4 if "int" in kinds(path) else "x"
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
    found = landed(path, value)
    assert found == value and (type(found) is type(value) or isinstance(found, float))


SPELT = ("optimizer.type", "scheduler.type", "torch_autocast.dtype")
CHOICES = [path for path in KEYS if ENTRIES[path].get("allowed") and path not in (*BESIDE, *SPELT)]


@for_each("path", [path for path in CHOICES if not path.endswith(".device")])
def test_every_allowed_value_is_taken(path: str) -> None:
    for item in filter(None, ENTRIES[path]["allowed"]):
        value = [item] if "list" in ENTRIES[path]["type"] else item
        assert landed(path, value) == value


@for_each("path", [path for path in KEYS if ENTRIES[path].get("aliases") and path.count(".") == 1])
def test_aliases(path: str) -> None:
    value = right(path)
    for alias in ENTRIES[path]["aliases"]:
        config = document(path, value)
        (old_block, old), (new_block, new) = path.split("."), alias.split(".")
        config[new_block] = config.pop(old_block)
        config[new_block][new] = config[new_block].pop(old)
        found = load_config(config, world_size=1, check_support=False)
        assert {item.path: item.value for item in settings(found)}[path] == value


AUTO = [path for path in KEYS if ENTRIES[path].get("auto_runtime") in ("unset", "native") and path not in OFFLOADED]


@for_each("path", AUTO)
def test_auto_is_the_default_or_a_value_where_the_format_says_so(path: str) -> None:
    native = ENTRIES[path]["auto_runtime"] == "native"
    assert landed(path, "auto") == ("auto" if native else plain(default_of(FIELDS[path].info)))


NO_AUTO = [path for path in KEYS if "auto_runtime" not in ENTRIES[path] and not {"object", "list"} & set(kinds(path))]


@for_each("path", NO_AUTO)
def test_auto_is_an_error_elsewhere(path: str) -> None:
    refused(path, "auto")


INNER = ("timers.throughput", "checkpoint.parallel_write", "data_efficiency.data_sampling")


@for_each("path", [*sorted({path.split(".")[0] for path in KEYS if "." in path}), *INNER])
def test_null_blocks_are_absent(path: str) -> None:
    config, plainly = (load_config(d, world_size=1) for d in (document(path, None), {"train_batch_size": 1}))
    assert config.model_copy(update={"source": {}}) == plainly.model_copy(update={"source": {}})


WANTS = [path for path, key in LOADED.items() if key.support is Support.NOT_YET and not key.gate and path not in BESIDE]


@for_each("path", WANTS)
def test_asking_for_what_is_missing_is_one_sentence(path: str) -> None:
    sentence = r"^configuration dict: [^\n]* is not in this release yet[^\n]*$"
    with pytest.raises(DeepSpeedConfigError, match=sentence) as caught:
        load_config(document(path, right(path)), world_size=1)
    assert path in str(caught.value)


@for_each("path", [p for p in KEYS if LOADED[p].gate and "<" not in p and not p.startswith(f"{LOADED[p].gate}.")])
def test_details_of_what_is_off_ask_for_nothing(path: str) -> None:
    load_config(document(path, None if path in BY_PROGRAM else right(path)), world_size=1)
