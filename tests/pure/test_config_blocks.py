"""Every documented key of the service, parallelism and data blocks: default, accepted values, refused values,
immutability.
"""

import copy
import json
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

import deepspeed
from deepspeed.config import DeepSpeedConfig, DeepSpeedConfigError, load_config
from deepspeed.config.model.settings import all_keys
from deepspeed.config.model.values import FrozenDict, Support, dtype_name
from tests.harness.rows import for_each
from tests.pure.test_config_table import EXTENSIONS

BLOCKS = {
    *(
        "aio",
        "autotuning",
        "checkpoint",
        "comet",
        "comms_logger",
        "compile",
        "csv_monitor",
        "data_efficiency",
        "datastates_ckpt",
    ),
    *(
        "expert_parallel",
        "flops_profiler",
        "hybrid_engine",
        "memory",
        "pipeline",
        "tensor_parallel",
        "tensorboard",
        "timers",
    ),
    *("use_data_before_expert_parallelism", "wandb", "weight_quantization"),
}
SERVICES = {path: key for path, key in all_keys(DeepSpeedConfig).items() if path.split(".")[0] in BLOCKS}
DOCUMENTED = json.loads((Path(__file__).parents[1] / "data" / "config_keys.json").read_text())
KEYS = {entry["path"]: entry for entry in DOCUMENTED if entry["status"] != "removed" and entry["path"] in SERVICES}
METRIC = "curriculum_metrics.<metric>"
TYPED = {path: entry for path, entry in KEYS.items() if path != "pipeline.<any>"}
BY_PROGRAM = ("tensor_parallel.tensor_parallel.mpu", "tensor_parallel.tensor_parallel.tp_group")
OTHER: dict[str, Any] = {  # where no rule below finds a second valid value
    "tensor_parallel.autotp_size": 1,
    "tensor_parallel.dtype": "bf16",
    "tensor_parallel.injection_policy_tuple": [["Layer", ["out"]]],
    "tensor_parallel.partition_config": {"strict_mode": True},
    "tensor_parallel.partition_config.layer_specs[].shape": [-1, [2, 1], 4],
    "expert_parallel.expert_tensor_parallel_size": 1,
    "expert_parallel.load_balance_coeff": None,
    "checkpoint.writer": {"type": "PYTHON"},
    "datastates_ckpt": {"host_cache_size": 16},
    "autotuning.arg_mappings": {"train_micro_batch_size_per_gpu": "--batch"},
    "autotuning.model_info": {"num_layers": 2},
    "weight_quantization.quantized_initialization": {
        "num_bits": 4,
        "group_size": 64,
        "group_dim": 0,
        "symmetric": False,
    },
    "weight_quantization.post_init_quant": {"fc": {"num_bits": 8}},
    "compile.passes": ["z1", "autosp"],
}
BLOCKS = [path for path in TYPED if isinstance(OTHER.get(path), dict)]


def document(path: str, value: Any) -> dict[str, Any]:
    """A configuration with ``value`` at ``path``."""
    parents = path.replace("[]", ".[]").split(".")
    for at in range(len(parents) - 1, -1, -1):
        name = parents[at]
        value = [value] if name == "[]" else {"seqlen" if name == "<metric>" else name: value}
    assert isinstance(value, dict)
    return {"train_batch_size": 1, **value}


def parse(path: str, value: Any) -> DeepSpeedConfig:
    return load_config(document(path, value), world_size=1, check_support=False)


def found(config: Any, path: str) -> Any:
    """The value of ``path`` in ``config``."""
    for name in (
        path.replace("[]", ".0")
        .replace("<metric>", "seqlen")
        .replace("checkpoint.async", "checkpoint.in_background")
        .split(".")
    ):
        config = (
            config[name]
            if isinstance(config, Mapping)
            else config[int(name)]
            if isinstance(config, tuple)
            else getattr(config, name)
        )
    return config


def plain(value: Any) -> Any:
    """``value`` as JSON has it."""
    if isinstance(value, BaseModel):
        return {name: plain(getattr(value, name)) for name in value.model_fields_set}
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, tuple) else value


def kinds(entry: dict[str, Any]) -> list[str]:
    return str(entry["type"]).split("|")


def other_value(entry: dict[str, Any]) -> Any:
    """A valid value that is not the default."""
    path, default = entry["path"], entry["default"]
    if path in OTHER:
        return OTHER[path]
    if entry.get("allowed"):
        return next(item for item in entry["allowed"] if item not in (default, None))
    kind = kinds(entry)[0]
    return {
        "bool": default is not True,
        "int": default + 1 if isinstance(default, int) else 3,
        "float": 0.25,
        "string": 4 if "int" in kinds(entry) else "chosen",
        "path": "/some/where",
        "list[int]": [1, 2],
        "list[string]": ["one", "two"],
        "object": object(),
    }[kind]


def refused(path: str, value: Any) -> str:
    with pytest.raises(DeepSpeedConfigError) as caught:
        parse(path, value)
    return str(caught.value)


def written(path: str) -> str:
    """``path`` as a sentence names it; a list element has its position."""
    return path.replace("[]", ".0").replace("<metric>", "seqlen")


def test_every_key_of_these_groups_is_here() -> None:
    groups = {
        "aio",
        "pipeline",
        "tensor_parallel",
        "moe",
        "checkpoint",
        "monitor",
        "autotuning",
        "data_efficiency",
        "compile",
        "inference",
    }
    heads = {"comms_logger", "flops_profiler", "timers"}
    wanted = {
        e["path"]
        for e in DOCUMENTED
        if e["status"] != "removed" and (e["group"] in groups or e["path"].split(".")[0] in heads)
    }
    assert set(KEYS) == wanted == set(SERVICES) - EXTENSIONS


@for_each("path", TYPED)
def test_default(path: str) -> None:
    entry = TYPED[path]
    if "layer_specs[]" in path:
        config = parse("tensor_parallel.partition_config.layer_specs[]", {})
    elif path.startswith("tensor_parallel.partition_config."):
        config = parse("tensor_parallel.partition_config", {})
    elif path.startswith(("checkpoint.writer.", "autotuning.model_info.")):
        config = parse(path.rpartition(".")[0], {})
    elif METRIC in path:
        config = parse(f"data_efficiency.data_sampling.curriculum_learning.{METRIC}", {})
    elif path == "datastates_ckpt.host_cache_size":
        assert "datastates_ckpt.host_cache_size is required" in refused("datastates_ckpt", {})
        return
    else:
        config = load_config({"train_batch_size": 1}, world_size=1)
    value = plain(found(config, path))
    if entry["default"] in ("REQUIRED_IF_ENABLED", "UNSET"):
        assert value is None
    elif path == "tensor_parallel.dtype":
        assert value == dtype_name(entry["default"])
    else:
        assert value == entry["default"] and type(value) is type(entry["default"])


@for_each("path", TYPED)
def test_another_value_is_taken_as_written(path: str) -> None:
    value = other_value(TYPED[path])
    result = found(parse(path, value), path)
    assert plain(result) == value
    assert type(plain(result)) is type(value)


@for_each("path", [path for path, entry in TYPED.items() if entry.get("allowed")])
def test_every_allowed_value_is_taken(path: str) -> None:
    for item in TYPED[path]["allowed"]:
        value = [item] if "list" in TYPED[path]["type"] else item
        assert plain(found(parse(path, value), path)) == value


def wrong_values(entry: dict[str, Any]) -> Iterator[Any]:
    """Values of a wrong type, quoted numbers among them."""
    names = set(kinds(entry))
    if "object" not in names:
        yield {"a": 1}
    if not names & {"list", "list[int]", "list[string]"}:
        yield [1, 2]
    if "bool" in names:
        yield from ("true", 2, "yes")
    elif "false" not in names:
        yield True
    if names & {"int", "float"} and entry.get("auto_runtime") != "native":
        yield "8"
    if names & {"string", "path", "enum", "list[string]"} and not names & {"int", "float"}:
        yield 8
    if names & {"int"}:
        yield from (1.5, "8", float("nan"), float("inf"))
    if entry.get("allowed"):
        yield "no such value"
    if (
        "null" not in names
        and None not in entry.get("allowed", [])
        and entry["default"] not in (None, "REQUIRED_IF_ENABLED")
    ):
        yield None


def absent_when_null(path: str) -> bool:
    """Whether null says that a key is not there: at the top level, and for a block."""
    return "." not in path or path in BLOCKS


@for_each("path", TYPED)
def test_a_wrong_type_is_refused_by_its_path(path: str) -> None:
    for value in wrong_values(TYPED[path]):
        if value is None and absent_when_null(path):
            continue
        text = refused(path, value)
        assert written(path) in text and "pydantic" not in text and "Input should" not in text


COUNTED = [path for path, entry in TYPED.items() if "int" in kinds(entry)]
MINUS_ONE = {"flops_profiler.module_depth"}


@for_each("path", COUNTED)
def test_sizes_and_counts_are_not_negative(path: str) -> None:
    text = refused(path, -2 if path in MINUS_ONE else -1)
    assert f"{written(path)} must be" in text and "-" in text


@pytest.mark.parametrize("path", [path for path, entry in TYPED.items() if entry.get("range")])
def test_documented_ranges(path: str) -> None:
    sign, bound = TYPED[path]["range"].rstrip("0123456789"), int(TYPED[path]["range"].lstrip(">="))
    lowest = bound + 1 if sign == ">" else bound
    assert found(parse(path, lowest), path) == lowest
    assert f"{path} must be" in refused(path, lowest - 1)


@for_each("path", [path for path, entry in TYPED.items() if entry.get("auto_runtime") == "unset"])
def test_auto_is_the_default_where_the_format_says_so(path: str) -> None:
    config, default = parse(path, "auto"), load_config({"train_batch_size": 1}, world_size=1)
    assert found(config, path) == found(default, path)


NATIVE_AUTO = [path for path, entry in TYPED.items() if entry.get("auto_runtime") == "native"]


@pytest.mark.parametrize("path", NATIVE_AUTO)
def test_auto_is_a_value_where_the_format_says_so(path: str) -> None:
    assert found(parse(path, "auto"), path) == "auto"


NO_AUTO = [
    path for path, e in TYPED.items() if "auto_runtime" not in e and not {"object", "list[string]"} & set(kinds(e))
]


@for_each("path", NO_AUTO)
def test_auto_is_an_error_elsewhere(path: str) -> None:
    assert written(path) in refused(path, "auto")


@for_each("head", sorted({path.split(".")[0] for path in TYPED}))
def test_null_blocks_are_absent(head: str) -> None:
    plainly = load_config({"train_batch_size": 1}, world_size=1)
    assert getattr(load_config({"train_batch_size": 1, head: None}, world_size=1), head) == getattr(plainly, head)


@pytest.mark.parametrize(
    "path",
    [
        "timers.throughput",
        "checkpoint.parallel_write",
        "data_efficiency.data_sampling",
        "tensor_parallel.tensor_parallel",
    ],
)
def test_null_inner_blocks_are_absent(path: str) -> None:
    assert found(parse(path, None), path) == found(load_config({"train_batch_size": 1}, world_size=1), path)


def blocks_of(value: Any) -> Iterator[Any]:
    """Every container below ``value``."""
    if isinstance(value, BaseModel):
        yield value
        for name in [*type(value).model_fields, *(value.model_extra or {})]:
            yield from blocks_of(getattr(value, name))
    elif isinstance(value, Mapping | tuple | list):
        yield value
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from blocks_of(item)


def full() -> DeepSpeedConfig:
    """A configuration with another value at every documented key of these groups."""
    whole: dict[str, Any] = {}

    def merge(into: dict[str, Any], tree: dict[str, Any]) -> None:
        for name, item in tree.items():
            if isinstance(item, dict) and isinstance(into.get(name), dict):
                merge(into[name], item)
            elif isinstance(item, list) and item and isinstance(item[0], dict) and name in into:
                merge(into[name][0], item[0])
            else:
                into[name] = copy.copy(item)

    for path, entry in TYPED.items():
        if not path.endswith(".enabled"):
            merge(whole, document(path, None if path in BY_PROGRAM else other_value(entry)))
    whole["pipeline"]["mine"] = {"list": [1, {"deep": []}]}
    return load_config(whole, world_size=1, check_support=False)


def test_frozen_all_the_way_down() -> None:
    config = full()
    assert config.tensor_parallel.partition_config is not None
    assert isinstance(config.tensor_parallel.partition_config.layer_specs[0], BaseModel)
    for name in config.__class__.model_fields:
        if name in ("source", "optimizer", "scheduler"):
            continue
        for block in blocks_of(getattr(config, name)):
            if isinstance(block, list) and any(block is x for x in vars(config.zero.leaf_module).values()):
                continue  # programs compare these with lists; nothing reads them after initialize
            assert isinstance(block, BaseModel | FrozenDict | tuple), (name, block)
            if isinstance(block, BaseModel) and type(block).model_fields:
                key = next(iter(type(block).model_fields))
                with pytest.raises(ValueError, match="frozen"):
                    setattr(block, key, getattr(block, key))


def test_a_frozen_dict_cannot_be_changed_but_travels() -> None:
    block = FrozenDict({"a": 1})
    for change in (
        lambda: block.update(b=2),
        lambda: block.pop("a"),
        lambda: block.__setitem__("a", 2),
        lambda: block.clear(),
    ):
        with pytest.raises(TypeError, match="cannot be changed"):
            change()
    assert copy.deepcopy(block) == pickle.loads(pickle.dumps(block)) == {"a": 1} and json.dumps(block) == '{"a": 1}'
    config = full()
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config
    assert (
        load_config({"train_batch_size": 1}, world_size=1).model_dump()["datastates_ckpt"] is False
    )  # and no serializer warns
    assert json.dumps(config.model_dump(exclude={"tensor_parallel"}))


# --- particular keys ---


def test_names_in_any_case() -> None:
    block = parse(
        "checkpoint", {"tag_validation": "Warn", "writer": {"type": "fast", "data_parallel": "socket"}}
    ).checkpoint
    assert block.writer is not None
    assert (block.tag_validation, block.writer.type, block.writer.data_parallel) == ("WARN", "FAST", "SOCKET")
    assert "tensor_parallel.preset_model must be" in refused("tensor_parallel.preset_model", "LLAMA")


def test_own_keys_of_a_client_are_kept_in_the_pipeline_block() -> None:
    block = parse("pipeline", {"stages": 4, "my_option": {"a": [1]}, "other": None}).pipeline
    assert block.stages == 4 and block.model_extra == {"my_option": {"a": (1,)}, "other": None}
    assert "pipeline.seed_layer: unknown key, did you mean 'seed_layers'?" in refused("pipeline", {"seed_layer": True})
    assert "pipeline.stages must be" in refused("pipeline.stages", 0)


def test_misspelt_keys_inside_lists_and_maps(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(
        '{"train_batch_size": 1,\n"tensor_parallel": {"partition_config": {"layer_specs": [\n{"patterns": '
        '["a"]},\n{"paterns": []}]}},\n'
        '"data_efficiency": {"data_sampling": {"curriculum_learning": {"curriculum_metrics": {"seqlen": '
        '{\n"min_dificulty": 1}}}}}}'
    )
    with pytest.raises(DeepSpeedConfigError) as caught:
        load_config(path, world_size=1, check_support=False)
    text = str(caught.value)
    assert (
        "tensor_parallel.partition_config.layer_specs.1.paterns: unknown key, did you mean 'patterns'? (line 4)" in text
    )
    assert "curriculum_metrics.seqlen.min_dificulty: unknown key, did you mean 'min_difficulty'? (line 6)" in text


def test_other_spellings_of_tensor_parallel_keys() -> None:
    block = parse("tensor_parallel", {"autotp_size": 1, "tp": {"tp_size": 2}, "kernel_inject": True}).tensor_parallel
    assert block.tensor_parallel.tp_size == 2 and block.replace_with_kernel_inject
    assert "two spellings of one setting" in refused(
        "tensor_parallel", {"tp": {"tp_size": 2}, "tensor_parallel": {"tp_size": 3}}
    )
    assert "tensor_parallel.tp.tp_size must be a whole number, not '2'" in refused("tensor_parallel.tp.tp_size", "2")
    assert "tensor_parallel.tp.tp_sizes: unknown key, did you mean 'tp_size'?" in refused(
        "tensor_parallel.tp.tp_sizes", 2
    )


def test_python_objects_stay_what_they_are() -> None:
    group = object()
    assert parse("tensor_parallel.tensor_parallel.tp_group", group).tensor_parallel.tensor_parallel.tp_group is group
    for path in BY_PROGRAM:
        assert "only a program can pass" in refused(path, "world")


def test_null_third_weight_differs_from_an_absent_one() -> None:
    assert "expert_w3" in parse("expert_parallel", {"expert_w3": None}).expert_parallel.model_fields_set
    assert "expert_w3" not in parse("expert_parallel", {}).expert_parallel.model_fields_set


def test_what_no_file_can_hold() -> None:
    endless: dict[str, Any] = {}
    endless["again"] = endless
    assert "nested too deeply" in refused("pipeline.mine", endless)
    assert "aio has the key 3, which is not a text" in refused("aio", {3: 1})
    path = "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics"
    assert f"{path} has the key 3, which is not a text" in refused(path, {3: {}})


def test_datastates_is_a_block_or_false() -> None:
    assert load_config({"train_batch_size": 1, "datastates_ckpt": False}, world_size=1).datastates_ckpt is False
    assert "datastates_ckpt must be a block" in refused("datastates_ckpt", value=True)


# --- what this release does with them ---

# Beside the files of test_client_configs.py.
WRITTEN_BY_CLIENTS: dict[str, dict[str, Any]] = {
    "Transformers": {"checkpoint": {"use_node_local_storage": True}, "tensor_parallel": {"autotp_size": 1}},
    "DeepSpeed-Chat": {
        "hybrid_engine": {
            "enabled": False,
            "max_out_tokens": 1024,
            "inference_tp_size": 2,
            "release_inference_cache": True,
            "pin_parameters": False,
            "tp_gather_partition_size": 4,
        },
        "tensorboard": {"enabled": False, "output_path": "tb/ds/", "job_name": "step1_tensorboard"},
    },
    "switched off": {
        "flops_profiler": {"enabled": False, "profile_step": 5, "top_modules": 3, "output_file": "f.txt"},
        "autotuning": {"enabled": False, "metric": "latency"},
        "comms_logger": {"enabled": False, "verbose": True},
        "data_efficiency": {"enabled": False, "data_sampling": {"enabled": True, "num_workers": 4}},
        "weight_quantization": {"enabled": True},
        "compile": {"deepcompile": False, "double_buffer": False},
    },
}


@pytest.mark.parametrize("client", WRITTEN_BY_CLIENTS)
def test_what_clients_always_write_asks_for_nothing(client: str) -> None:
    load_config({"train_micro_batch_size_per_gpu": 1, **WRITTEN_BY_CLIENTS[client]}, world_size=2)


WANTS = [path for path, key in SERVICES.items() if key.support is Support.NOT_YET and not key.gate]


@for_each("path", WANTS)
def test_asking_for_what_is_missing_is_one_sentence(path: str) -> None:
    value = "FAIL" if path == "checkpoint.tag_validation" else other_value(KEYS[path])
    with pytest.raises(
        DeepSpeedConfigError, match=r"^configuration dict: [^\n]* is not in this release yet[^\n]*$"
    ) as caught:
        load_config(document(path, value), world_size=1)
    assert path in str(caught.value)


@for_each(
    "path",
    [p for p, key in SERVICES.items() if key.gate and "<" not in p and not p.startswith(f"{key.gate}.")],
)
def test_details_of_what_is_off_ask_for_nothing(path: str) -> None:
    load_config(document(path, None if path in BY_PROGRAM else other_value(KEYS[path])), world_size=1)


# --- the constructor that clients call ---


def test_the_class_loads_when_it_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 8}')
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    config = deepspeed.DeepSpeedConfig(str(path))
    assert isinstance(config, DeepSpeedConfig) and config.train_micro_batch_size_per_gpu == 8
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert deepspeed.DeepSpeedConfig({"train_batch_size": 8}).train_micro_batch_size_per_gpu == 2
    monkeypatch.setenv("WORLD_SIZE", "four")
    with pytest.raises(DeepSpeedConfigError, match="WORLD_SIZE"):
        deepspeed.DeepSpeedConfig(str(path))

    class Units:
        @staticmethod
        def get_data_parallel_world_size() -> int:
            return 2

    assert DeepSpeedConfig({"train_batch_size": 8}, mpu=Units()).world_size == 2
    assert DeepSpeedConfig({"train_batch_size": 8}, None, _Mesh()).world_size == 8


class _Mesh:
    def __getitem__(self, axis: str) -> Any:
        assert axis == "data_parallel"
        return self

    def size(self) -> int:
        return 8


@pytest.mark.parametrize(("steps", "what"), [([3], "few"), ([1, 2, 3], "many"), ([], "few")])
def test_a_list_of_another_length_is_told_so(steps: list[int], what: str) -> None:
    with pytest.raises(DeepSpeedConfigError, match=rf"observe\.steps has too {what} values: \["):
        load_config({"train_batch_size": 1, "observe": {"steps": steps}}, world_size=1)
