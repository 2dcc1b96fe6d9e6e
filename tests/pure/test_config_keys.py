"""Which keys exist, what their defaults are, which other spellings are understood, and what is said about the rest."""

import copy
import json
import logging
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import deepspeed
from deepspeed.config import (
    DeepSpeedConfig,
    DeepSpeedConfigError,
    OffloadDeviceEnum,
    OffloadStateTypeEnum,
    ZeroConfig,
    load_config,
)
from deepspeed.config.model.settings import declared_fields
from deepspeed.monitor.log import logger
from tests.harness.rows import for_each


def load(world_size: int = 1, *, lenient: bool = False, **keys: object) -> DeepSpeedConfig:
    return load_config(
        {"train_batch_size": world_size, **keys}, world_size=world_size, lenient=lenient, check_support=False
    )


def zero(**keys: object) -> ZeroConfig:
    return load(zero_optimization=keys).zero


def message(**keys: object) -> str:
    with pytest.raises(DeepSpeedConfigError) as caught:
        load(**keys)
    return str(caught.value)


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    logger.addHandler(caplog.handler)
    caplog.set_level(logging.WARNING)
    yield caplog
    logger.removeHandler(caplog.handler)


def test_frozen_all_the_way_down() -> None:
    """That values are, test_config_values.py shows key by key."""
    cfg = load(zero_optimization={"stage": 1}, pipeline={"mine": {"list": [1, {"deep": []}]}, "other": None})
    for block, key in ((cfg, "train_batch_size"), (cfg.zero, "stage")):
        with pytest.raises(ValueError, match="frozen"):
            setattr(block, key, 2)
    assert all(field.block.model_config["frozen"] for field in declared_fields(DeepSpeedConfig))
    assert cfg.pipeline.model_extra == {"mine": {"list": (1, {"deep": ()})}, "other": None}, "a client's own keys"
    assert pickle.loads(pickle.dumps(cfg)) == copy.deepcopy(cfg) == cfg
    assert json.dumps(cfg.model_dump(exclude={"tensor_parallel"})) and cfg.model_dump()["datastates_ckpt"] is False


# --- what clients hand over and the parser must take ---


def test_auto_inside_zero_and_its_offload_blocks_is_the_default() -> None:
    """Of plain keys test_config_values.py shows it."""
    assert zero(stage="auto", offload_param="auto") == ZeroConfig()
    param = {"device": "auto", "nvme_path": "auto"}
    block = zero(stage=3, offload_optimizer={"device": "cpu", "pin_memory": "auto"}, offload_param=param)
    assert block.offload_optimizer.pin_memory and block.offload_param is None


def test_lenient_keeps_auto_in_params() -> None:
    keys = {
        "train_batch_size": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
        "bf16": {"enabled": "auto"},
        "gradient_clipping": "auto",
        "communication_data_type": "auto",
        "activation_checkpointing": {"profile": "auto"},
        "data_types": {"keep_in_fp32_modules": "auto", "grad_accum_dtype": "auto"},
    }
    cfg = load(lenient=True, **keys)
    assert cfg.optimizer.params == {"lr": "auto", "betas": "auto"} and cfg.compute_dtype == "fp32"
    text = message(**keys | {"train_batch_size": 1})
    for key in ("communication_data_type", "activation_checkpointing.profile", "data_types.grad_accum_dtype"):
        assert f'{key} is still "auto"' in text


@for_each("name", ["offload_optimizer", "offload_param"])
def test_no_offload(name: str) -> None:
    for off in (False, None, {"device": "none", "nvme_path": None}, {"device": None}, {}):
        assert getattr(zero(**{name: off}), name) is None


def test_devices_paths_and_states_of_offload() -> None:
    param = {"device": "nvme", "nvme_path": Path("/x")}
    block = zero(stage=3, offload_optimizer={"device": "cpu"}, offload_param=param)
    assert block.offload_optimizer.device is OffloadDeviceEnum.cpu
    assert block.offload_param.device == "nvme" and block.offload_param.nvme_path == "/x"
    states = "optim_states hp_params lp_params lp_grads contiguous_grad_buffer"
    assert " ".join(item.value for item in OffloadStateTypeEnum) == states


def test_whole_floats_and_infinity(tmp_path: Path) -> None:
    block = zero(reduce_bucket_size=5e8, stage3_max_live_parameters=1e9, sub_group_size=10**12, stage=2.0)
    assert (block.reduce_bucket_size, block.max_live_parameters, block.stage) == (500_000_000, 1_000_000_000, 2)
    assert all(type(value) is int for value in (block.reduce_bucket_size, block.max_live_parameters, block.stage))
    assert load(steps_per_print=float("inf")).steps_per_print == float("inf")
    assert load(steps_per_print=10.0).steps_per_print == 10
    path = tmp_path / "ds.json"
    for spelling in ("Infinity", "inf"):
        path.write_text(f"{{\n steps_per_print: {spelling}\n train_batch_size: 1\n}}")
        assert load_config(path, world_size=1).steps_per_print == float("inf")


def test_stage3_spellings() -> None:
    """Of each key with another spelling test_config_values.py shows that it lands."""
    assert zero(stage3_allgather_sequential=True).prefetch_bucket_size == 1
    assert "means a zero_optimization.prefetch_bucket_size of 1" in message(
        zero_optimization={"allgather_sequential": True, "prefetch_bucket_size": 7}
    )
    text = message(zero_optimization={"max_live_parameters": 1, "stage3_max_live_parameters": 2})
    assert "two spellings of one setting" in text


def test_bfloat16_spelling() -> None:
    assert load(bfloat16={"enabled": True}).compute_dtype == "bf16"
    assert load(bf16={"enabled": False}, bfloat16={"enabled": True}).compute_dtype == "fp32"
    assert "bfloat16.enabeld: unknown key, did you mean 'enabled'" in message(bfloat16={"enabeld": True})


def test_boolean_zero_block(warnings: pytest.LogCaptureFixture) -> None:
    cfg = load(zero_optimization=True, allgather_size=1e6)
    assert (cfg.zero_stage, cfg.zero.allgather_bucket_size) == (1, 1_000_000)
    assert load(zero_optimization=False).zero_stage == 0
    assert "deprecated" in warnings.text


def test_legacy_offload_flags() -> None:
    block = zero(stage=3, cpu_offload=True, cpu_offload_param=True, cpu_offload_use_pin_memory=False)
    assert block.offload_optimizer.device == "cpu" and not block.offload_optimizer.pin_memory
    assert block.offload_param.device == "cpu" and not block.offload_param.pin_memory
    assert zero(cpu_offload=False, cpu_offload_param=None) == ZeroConfig()
    text = message(zero_optimization={"stage": 2, "cpu_offload": True, "offload_optimizer": {"device": "cpu"}})
    assert "both are given. Keep offload_optimizer" in text
    for key, value in (("cpu_offload", 2), ("cpu_offload_use_pin_memory", "yes")):
        said = message(zero_optimization={key: value})
        assert f"zero_optimization.{key} must be true or false, not {value!r}" in said


def test_optimizer_and_scheduler_blocks() -> None:
    assert load(optimizer={"type": "AdamW"}, scheduler={"type": "WarmupLR"}).scheduler.params == {}
    assert load(optimizer={}, scheduler={"type": None, "params": None}).optimizer is None
    assert "optimizer.type is required" in message(optimizer={"params": {"lr": 1}})


def test_precision_names() -> None:
    for name in ("BF16", torch.bfloat16):
        assert load(communication_data_type=name).communication_data_type == "bf16"
    assert load(data_types={"grad_accum_dtype": "fp32"}).dtype_policy.accumulation == "fp32"
    assert load(torch_autocast={"enabled": True, "dtype": "torch.float16"}).torch_autocast.dtype == "fp16"
    assert load(torch_autocast={"dtype": None}).torch_autocast.dtype == "bf16"
    assert "torch_autocast.dtype must be one of" in message(torch_autocast={"dtype": "int8"})
    assert load(gradient_allreduce_op="SUM").gradient_allreduce_op == "sum"


def test_names_in_any_case() -> None:
    writer = {"type": "fast", "data_parallel": "socket"}
    block = load(checkpoint={"tag_validation": "Warn", "writer": writer}).checkpoint
    assert (block.tag_validation, block.writer.type, block.writer.data_parallel) == ("WARN", "FAST", "SOCKET")
    assert "tensor_parallel.preset_model must be" in message(tensor_parallel={"preset_model": "LLAMA"})


def test_other_spellings_of_tensor_parallel_keys() -> None:
    block = load(tensor_parallel={"autotp_size": 1, "tp": {"tp_size": 2}, "kernel_inject": True}).tensor_parallel
    assert block.tensor_parallel.tp_size == 2 and block.replace_with_kernel_inject
    for keys, words in (
        ({"tp": {"tp_size": 2}, "tensor_parallel": {"tp_size": 3}}, "two spellings of one setting"),
        ({"tp": {"tp_size": "2"}}, "tensor_parallel.tp.tp_size must be a whole number, not '2'"),
        ({"tp": {"tp_sizes": 2}}, "tensor_parallel.tp.tp_sizes: unknown key, did you mean 'tp_size'?"),
        ({"tp": {"tp_group": "world"}}, "only a program can pass"),
        ({"tp": {"mpu": "world"}}, "only a program can pass"),
    ):
        assert words in message(tensor_parallel=keys)


def test_null_third_weight_differs_from_an_absent_one() -> None:
    assert "expert_w3" in load(expert_parallel={"expert_w3": None}).expert_parallel.model_fields_set
    assert "expert_w3" not in load(expert_parallel={}).expert_parallel.model_fields_set


def test_what_no_file_can_hold() -> None:
    endless: dict[str, object] = {}
    endless["again"] = endless
    assert "nested too deeply" in message(pipeline={"mine": endless})
    assert "aio has the key 3, which is not a text" in message(aio={3: 1})
    learning = {"curriculum_learning": {"curriculum_metrics": {3: {}}}}
    text = message(data_efficiency={"data_sampling": learning})
    assert "curriculum_metrics has the key 3, which is not a text" in text


def test_datastates_is_a_block_or_false() -> None:
    assert load(datastates_ckpt=False).datastates_ckpt is False
    assert "datastates_ckpt must be a block" in message(datastates_ckpt=True)
    assert "datastates_ckpt.host_cache_size is required" in message(datastates_ckpt={})


# --- what is refused, and how ---


def test_misspelt_keys_inside_blocks_lists_and_maps_have_their_line(tmp_path: Path) -> None:
    """Of other keys and faults test_ds_config.py shows it."""
    path = tmp_path / "bad.json"
    path.write_text(
        '{"train_batch_size": 1,\n"tensor_parallel": {"partition_config": {"layer_specs": [\n{"patterns": '
        '["a"]},\n{"paterns": []}]}},\n'
        '"data_efficiency": {"data_sampling": {"curriculum_learning": {"curriculum_metrics": {"seqlen": '
        '{\n"min_dificulty": 1}}}}},\n'
        '"zero_optimization": {"offload_param": {"devise": "cpu"}}, "msamp": {}}'
    )
    with pytest.raises(DeepSpeedConfigError) as caught:
        load_config(path, world_size=1, check_support=False)
    text = str(caught.value)
    assert "bad.json' has 4 problems:" in text
    assert "partition_config.layer_specs.1.paterns: unknown key, did you mean 'patterns'? (line 4)" in text
    assert "curriculum_metrics.seqlen.min_dificulty: unknown key, did you mean 'min_difficulty'? (line 6)" in text
    assert "zero_optimization.offload_param.devise: unknown key, did you mean 'device'? (line 7)" in text
    assert "msamp: unknown key" in text, "that of another program too, beside those that are misspelt"


def test_foreign_keys_of_programs_are_mentioned_once(warnings: pytest.LogCaptureFixture) -> None:
    keys = {
        "msamp": {"enabled": True},
        "zero_optimization.reduce_bucket_size": 4,
        "zero_optimization.stage3_prefetch_bucket_size": 0.9,
    }
    load(lenient=True, **keys)
    assert warnings.records == []
    load(**keys)
    assert len(warnings.records) == 1
    assert "msamp, zero_optimization.reduce_bucket_size" in warnings.text


def test_documented_key_without_reader(warnings: pytest.LogCaptureFixture) -> None:
    assert zero(legacy_stage1=False) == zero(grad_hooks=True) == ZeroConfig()
    assert "zero_optimization.grad_hooks is described in published documentation" in warnings.text


# One of each sentence; that every key of a type is refused, test_config_values.py shows.
@for_each(
    ("keys", "text"),
    [
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage must be less than or equal to 3, not 4"),
        ({"zero_optimization": {"stage": "3"}}, "must be a whole number, not '3'; write it without quotes"),
        ({"zero_optimization": {"stage": True}}, "zero_optimization.stage must be a whole number, not True"),
        ({"zero_optimization": {"overlap_comm": "yes"}}, "overlap_comm must be true or false, not 'yes'"),
        ({"zero_optimization": {"offload_optimizer": "cpu"}}, "zero_optimization.offload_optimizer must be a block"),
        ({"zero_optimization": {"offload_param": {"device": "gpu"}}}, "device must be 'none', 'cpu' or 'nvme'"),
        ({"zero_optimization": {"grad_hooks": 3}}, "zero_optimization.grad_hooks: unknown key"),
        ({"zero_optimization": [3]}, "zero_optimization must be a block"),
        ({"fp16": True}, "fp16 must be a block"),
        ({"fp16": {"loss_scale": float("inf")}}, "fp16.loss_scale must be a finite number"),
        ({"gradient_clipping": "1"}, "gradient_clipping must be a finite number, not '1'; write it without quotes"),
        ({"gradient_clipping": -1}, "gradient_clipping must be greater than or equal to 0"),
        ({"gradient_clipping": None}, "gradient_clipping must be a finite number, not None"),
        ({"zero_optimization": {"divergence": "crash"}}, "must be 'tolerate', 'error' or 'assume_none'"),
        ({"zero_optimization": {"stage3_prefetch_buket_size": 1}}, "did you mean 'stage3_prefetch_bucket_size'?"),
        ({"zero_optimization": {"legacy_stage1": True}}, "zero_optimization.legacy_stage1 was removed. Delete the key"),
        ({"pipeline": {"seed_layer": True}}, "pipeline.seed_layer: unknown key, did you mean 'seed_layers'?"),
        ({"pipeline": {"stages": 0}}, "pipeline.stages must be"),
        ({"gradient_allreduce_op": "max"}, "gradient_allreduce_op must be 'mean' or 'sum'"),
        ({"communication_data_type": "int4"}, "communication_data_type must be one of fp32, fp16, bf16 or null"),
        ({"steps_per_print": 0}, "steps_per_print must be at least 1, not 0"),
        ({"wall_clock_breakdown": "auto"}, 'wall_clock_breakdown is still "auto"'),
        ({"activation_checkpointing": {"profil": True}}, "profil: unknown key, did you mean 'profile'"),
        ({"optimizer": {"type": "Adam", "params": {"lr": "1e-3"}}}, "optimizer.params.lr must be a finite number"),
    ],
)
def test_wrong_values(keys: dict[str, object], text: str) -> None:
    found = message(**keys)
    assert text in found
    assert "pydantic" not in found


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

    units, mesh = SimpleNamespace(get_data_parallel_world_size=lambda: 2), SimpleNamespace(size=lambda: 8)
    assert DeepSpeedConfig({"train_batch_size": 8}, mpu=units).world_size == 2
    assert DeepSpeedConfig({"train_batch_size": 8}, None, {"data_parallel": mesh}).world_size == 8


@pytest.mark.parametrize(("steps", "what"), [([3], "few"), ([1, 2, 3], "many"), ([], "few")])
def test_a_list_of_another_length_is_told_so(steps: list[int], what: str) -> None:
    with pytest.raises(DeepSpeedConfigError, match=rf"observe\.steps has too {what} values: \["):
        load_config({"train_batch_size": 1, "observe": {"steps": steps}}, world_size=1)
