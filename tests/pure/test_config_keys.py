"""Which keys exist, what their defaults are, which other spellings are understood, and what is said about the rest."""

import logging
from pathlib import Path

import pytest

from deepspeed.config import (
    DeepSpeedConfig,
    DeepSpeedConfigError,
    OffloadDeviceEnum,
    OffloadStateTypeEnum,
    ZeroConfig,
    load_config,
)
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


def test_frozen() -> None:
    cfg = load()
    with pytest.raises(ValueError, match="frozen"):
        cfg.train_batch_size = 2
    with pytest.raises(ValueError, match="frozen"):
        cfg.zero.stage = 3


def test_null_blocks_are_absent() -> None:
    cfg = load(
        fp16=None, zero_optimization=None, optimizer=None, scheduler=None, tensorboard=None, steps_per_print=None
    )
    assert cfg.model_copy(update={"source": {}}) == load().model_copy(update={"source": {}})


def test_null_clipping_is_ambiguous() -> None:
    assert "gradient_clipping must be a finite number, not None" in message(gradient_clipping=None)


# --- what clients hand over and the parser must take ---


@pytest.mark.parametrize(
    "key",
    [
        "reduce_bucket_size",
        "stage3_prefetch_bucket_size",
        "stage3_param_persistence_threshold",
        "stage",
        "overlap_comm",
        "offload_param",
    ],
)
def test_auto_inside_zero_is_the_default(key: str) -> None:
    assert zero(**{key: "auto"}) == ZeroConfig()


def test_auto_inside_offload_blocks() -> None:
    block = zero(
        stage=3,
        offload_optimizer={"device": "cpu", "pin_memory": "auto"},
        offload_param={"device": "auto", "nvme_path": "auto"},
    )
    assert block.offload_optimizer.pin_memory and block.offload_param is None


def test_auto_clipping() -> None:
    assert load(gradient_clipping="auto").gradient_clipping == 1.0


def test_auto_enabled_is_false() -> None:
    assert load(bf16={"enabled": "auto"}, fp16={"enabled": "auto", "loss_scale": 0}).compute_dtype == "fp32"


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


def test_auto_in_params_does_not_reach_the_engine() -> None:
    text = message(
        optimizer={"type": "AdamW", "params": {"lr": "auto"}},
        scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}},
    )
    assert 'optimizer.params.lr is still "auto"' in text and 'scheduler.params.warmup_max_lr is still "auto"' in text


@pytest.mark.parametrize("off", [False, None, {"device": "none", "nvme_path": None}, {"device": None}, {}])
@pytest.mark.parametrize("name", ["offload_optimizer", "offload_param"])
def test_no_offload(name: str, off: object) -> None:
    assert getattr(zero(**{name: off}), name) is None


def test_offload_blocks() -> None:
    block = zero(
        stage=3,
        offload_optimizer={"device": "cpu", "ratio": 0.5},
        offload_param={"device": "nvme", "nvme_path": Path("/tmp/x")},
    )
    assert block.offload_optimizer.device is OffloadDeviceEnum.cpu and block.offload_optimizer.buffer_count == 4
    assert (
        block.offload_param.device == "nvme"
        and block.offload_param.nvme_path == "/tmp/x"
        and block.offload_param.buffer_count == 5
    )
    assert [item.value for item in OffloadStateTypeEnum] == [
        "optim_states",
        "hp_params",
        "lp_params",
        "lp_grads",
        "contiguous_grad_buffer",
    ]


def test_whole_floats_and_infinity() -> None:
    block = zero(
        reduce_bucket_size=5e8,
        allgather_bucket_size=2e8,
        stage3_max_live_parameters=1e9,
        sub_group_size=10**12,
        stage=2.0,
    )
    assert (block.reduce_bucket_size, block.allgather_bucket_size, block.stage) == (500_000_000, 200_000_000, 2)
    assert all(type(value) is int for value in (block.reduce_bucket_size, block.max_live_parameters, block.stage))
    assert load(steps_per_print=float("inf")).steps_per_print == float("inf")
    assert load(steps_per_print=10.0).steps_per_print == 10


def test_infinity_in_files(tmp_path: Path) -> None:
    for spelling in ("Infinity", "inf"):
        path = tmp_path / "ds.json"
        path.write_text(f"{{\n steps_per_print: {spelling}\n train_batch_size: 1\n}}")
        assert load_config(path, world_size=1).steps_per_print == float("inf")


def test_stage3_spellings() -> None:
    for name, value in {
        "prefetch_bucket_size": 7,
        "param_persistence_threshold": 7,
        "model_persistence_threshold": 7,
        "max_live_parameters": 7,
        "max_reuse_distance": 7,
        "gather_16bit_weights_on_model_save": True,
        "module_granularity_threshold": 7,
        "use_all_reduce_for_fetch_params": True,
    }.items():
        assert zero(**{name: value}) == zero(**{f"stage3_{name}": value})
    assert zero(stage3_allgather_sequential=True).prefetch_bucket_size == 1
    assert "means a zero_optimization.prefetch_bucket_size of 1" in message(
        zero_optimization={"allgather_sequential": True, "prefetch_bucket_size": 7}
    )
    assert zero(stage3_gather_fp16_weights_on_model_save=True).gather_16bit_weights_on_model_save
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
        assert f"zero_optimization.{key} must be true or false, not {value!r}" in message(
            zero_optimization={key: value}
        )


def test_mics_leaf_and_extension_keys() -> None:
    block = load(
        4,
        zero_optimization={
            "stage": 3,
            "mics_shard_size": 2,
            "mics_hierarchical_params_gather": True,
            "divergence": "error",
        },
    ).zero
    assert (block.mics_shard_size, block.mics_hierarchical_params_gather, block.divergence) == (2, True, "error")
    leaf = zero(leaf_module={"classes": "Moe", "names": ["a", "a", "b"]}).leaf_module
    assert (leaf.classes, leaf.names, leaf.name_suffixes) == (["Moe"], ["a", "b"], [])
    assert "must be 'tolerate', 'error' or 'assume_none'" in message(zero_optimization={"divergence": "crash"})


def test_optimizer_and_scheduler_blocks() -> None:
    cfg = load(
        optimizer={"type": "AdamW", "params": {"lr": 1e-3}, "legacy_fusion": True}, scheduler={"type": "WarmupLR"}
    )
    assert cfg.optimizer.type == "AdamW" and cfg.optimizer.legacy_fusion and cfg.scheduler.params == {}
    assert load(optimizer={}, scheduler={"type": None, "params": None}).optimizer is None
    assert "optimizer.type is required" in message(optimizer={"params": {"lr": 1}})


def test_precision_names() -> None:
    assert load(communication_data_type="BF16").communication_data_type == "bf16"
    assert load(data_types={"grad_accum_dtype": "fp32"}).grad_accum_dtype == "fp32"
    autocast = load(
        torch_autocast={"enabled": True, "dtype": "torch.float16", "lower_precision_safe_modules": ["torch.nn.Linear"]}
    ).torch_autocast
    assert (autocast.dtype, autocast.lower_precision_safe_modules) == ("fp16", ("torch.nn.Linear",))
    assert load(torch_autocast={"dtype": None}).torch_autocast.dtype == "bf16"
    assert "torch_autocast.dtype must be one of" in message(torch_autocast={"dtype": "int8"})
    assert load(gradient_allreduce_op="SUM").gradient_allreduce_op == "sum"


def test_torch_dtype_objects() -> None:
    torch = pytest.importorskip("torch")
    assert load(communication_data_type=torch.bfloat16).communication_data_type == "bf16"


# --- what is refused, and how ---


def test_unknown_keys_in_a_file_have_the_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(
        '{\n  // c\n  "train_batch_size": 1,\n  "gradient_clipp1ng": 1.0,\n  "zero_optimization": {\n    "stge": 3,\n'
        '    "offload_param": {"devise": "cpu"},\n    "stage3_prefetch_bucket_size": -5\n  },\n  "msamp": {}\n}'
    )
    with pytest.raises(DeepSpeedConfigError) as caught:
        load_config(path, world_size=1)
    text = str(caught.value)
    assert "bad.json' has 5 problems:" in text
    assert "gradient_clipp1ng: unknown key, did you mean 'gradient_clipping'? (line 4)" in text
    assert "zero_optimization.stge: unknown key, did you mean 'stage'? (line 6)" in text
    assert "zero_optimization.offload_param.devise: unknown key, did you mean 'device'? (line 7)" in text
    assert "zero_optimization.stage3_prefetch_bucket_size must be greater than or equal to 0, not -5. (line 8)" in text
    assert "msamp: unknown key" in text and "(line 10)" in text


def test_nearest_name_includes_aliases() -> None:
    text = message(zero_optimization={"stage3_prefetch_buket_size": 1})
    assert "did you mean 'stage3_prefetch_bucket_size'?" in text


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


def test_misspelt_key_of_a_program_is_an_error() -> None:
    assert "gradient_clippng: unknown key, did you mean 'gradient_clipping'?" in message(gradient_clippng=1)


def test_harmless_legacy_flag() -> None:
    assert zero(legacy_stage1=False) == ZeroConfig()
    assert "zero_optimization.legacy_stage1 was removed. Delete the key" in message(
        zero_optimization={"legacy_stage1": True}
    )


def test_documented_key_without_reader(warnings: pytest.LogCaptureFixture) -> None:
    assert zero(grad_hooks=True) == ZeroConfig()
    assert "zero_optimization.grad_hooks is described in published documentation" in warnings.text


# One of each sentence; that every key of a type is refused, test_config_values.py and test_config_blocks.py show.
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
