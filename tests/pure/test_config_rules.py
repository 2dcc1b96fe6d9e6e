"""Rules between keys are sentences; what merely has no effect beside the others is named by ``inert_under``."""

from pathlib import Path

import pytest

from deepspeed.config import DeepSpeedConfig, DeepSpeedConfigError, load_config
from deepspeed.config.explain.check import explained
from deepspeed.config.explain.rules import inert_under
from deepspeed.config.model.settings import settings
from deepspeed.errors import ConflictingKeysError
from tests.harness.rows import for_each

CPU = {"device": "cpu"}
DRIVE = {"device": "nvme", "nvme_path": "/x"}


def load(world_size: int = 4, *, lenient: bool = False, **keys: object) -> DeepSpeedConfig:
    return load_config(
        {"train_batch_size": world_size, **keys}, world_size=world_size, lenient=lenient, check_support=False
    )


def z(**keys: object) -> dict[str, object]:
    return {"zero_optimization": keys}


def offloaded(stage: int, **optimizer: object) -> dict[str, object]:
    return z(stage=stage, offload_optimizer={**CPU, **optimizer})


def zenflow(**keys: object) -> dict[str, object]:
    return z(stage=2, zenflow=keys, offload_optimizer=CPU)


@for_each("wrong", [{"stgae": 3}, {"stage": "3"}])
def test_only_contradicting_keys_raise_the_error_for_contradictions(wrong: dict[str, object]) -> None:
    with pytest.raises(DeepSpeedConfigError) as caught:
        load(**z(pipeline_loading_checkpoint=True, **wrong))
    assert not isinstance(caught.value, ConflictingKeysError)
    with pytest.raises(ConflictingKeysError):
        load(**z(pipeline_loading_checkpoint=True))


FP16, BF16 = {"fp16": {"enabled": True}}, {"bf16": {"enabled": True}}
BROKEN: list[tuple[dict[str, object], str]] = [
    ({**FP16, **BF16}, "fp16.enabled and bf16.enabled are both true"),
    ({"fp16": {"enabled": True, "loss_scale_window": 0}}, "fp16.loss_scale_window must be at least 1"),
    ({"fp16": {"enabled": True, "min_loss_scale": 0}}, "fp16.min_loss_scale must be at least 1"),
    ({"fp16": {"enabled": True, "hysteresis": 0}}, "fp16.hysteresis must be at least 1"),
    (
        {"fp16": {"enabled": True, "initial_scale_power": 2, "min_loss_scale": 8}},
        "fp16.min_loss_scale 8 is above the first loss scale",
    ),
    ({**FP16, "torch_autocast": {"enabled": True}}, "torch_autocast.dtype is bf16, but fp16.enabled is true"),
    ({**BF16, "torch_autocast": {"enabled": True, "dtype": "fp16"}}, "torch_autocast.dtype is fp16, but bf16.enabled"),
    (
        {**BF16, "data_types": {"param_dtype": "fp32"}},
        "data_types.param_dtype is fp32, but the fp16 and bf16 blocks say bf16",
    ),
    *(
        (
            {"prescale_gradients": True, **z(stage=stage)},
            f"prescale_gradients cannot be combined with zero_optimization.stage {stage}",
        )
        for stage in (2, 3)
    ),
    ({"gradient_predivide_factor": 2.0, **z(stage=2)}, "gradient_predivide_factor must be 1.0"),
    ({"gradient_allreduce_op": "sum", **z(stage=3)}, 'gradient_allreduce_op "sum" cannot be combined'),
    ({"normalize": "tokens", "gradient_allreduce_op": "sum"}, 'normalize "tokens" cannot be combined'),
    ({"managed_gradient_accumulation": False, **z(stage=1, overlap_comm=True)}, "only from stage 2 on"),
    (z(compute_grad_norm=False, stage=2), "needs gradient_clipping 0"),
    ({"gradient_clipping": 0, **z(compute_grad_norm=False, stage=3)}, "needs stage 1 or 2, not 3"),
    (
        {"gradient_clipping": 0, **z(compute_grad_norm=False, stage=2, offload_optimizer=CPU)},
        "cannot be combined with offload_optimizer",
    ),
    (z(stage=3, offload_param={"device": "nvme"}), "needs offload_param.nvme_path"),
    (offloaded(2, ratio=0.5), "ratio below 1.0 needs stage 3"),
    (offloaded(3, **DRIVE, device_states="travel"), "states on a drive do not travel"),
    (
        z(stage=3, offload_optimizer={**CPU, "device_states": "travel"}, offload_param=CPU),
        "cannot be combined with offload_param",
    ),
    (offloaded(1, **DRIVE, delayed_update=True), "an update on a drive is not delayed"),
    (
        offloaded(3, ratio=0.5, delayed_update=True),
        "delayed_update cannot be combined with an update that the device shares",
    ),
    (offloaded(1, **DRIVE, super_offload=True), "an update on a drive does not begin beside the backward"),
    (
        offloaded(3, delayed_update=True, super_offload=True),
        "super_offload cannot be combined with an update that is delayed",
    ),
    (z(stage=2, zenflow={}), 'zenflow needs offload_optimizer.device "cpu"'),
    (z(stage=2, zenflow={}, offload_optimizer=DRIVE), 'zenflow needs offload_optimizer.device "cpu"'),
    (z(stage=3, zenflow={}, offload_optimizer=CPU, offload_param=CPU), "zenflow cannot be combined with offload_param"),
    *(
        (
            z(stage=3, zenflow={}, offload_optimizer={**CPU, **other}),
            "zenflow cannot be combined with offload_optimizer.",
        )
        for other in ({"ratio": 0.5}, {"delayed_update": True}, {"super_offload": True}, {"device_states": "travel"})
    ),
    ({"gradient_allreduce_op": "sum", **zenflow()}, 'gradient_allreduce_op "sum"'),
    (zenflow(select_interval=4), "select_interval is a number, so"),
    (zenflow(select_strategy="step"), "select_interval must be a number with"),
    (zenflow(select_strategy="epoch", select_interval=1), 'steps_per_epoch is needed by select_strategy "epoch"'),
    (
        zenflow(select_strategy="step", select_interval=2, update_interval=4),
        "select_interval of 2 steps must not be below update_interval 4",
    ),
    (z(stage=2, pipeline_loading_checkpoint=True), "pipeline_loading_checkpoint needs stage 3"),
    ({"sequence": {"plan": "auto", "offload_activations": True}}, 'sequence.plan "auto" chooses what goes to the host'),
    (z(stage=3, mics_shard_size=4, zero_hpz_partition_size=2), "both choose the shard group. Keep one"),
    (z(stage=3, mics_shard_size=3), "mics_shard_size 3 does not divide the 4 data-parallel ranks"),
    (z(stage=3, mics_shard_size=0), "mics_shard_size must be -1 (off)"),
    (z(stage=3, zero_hpz_partition_size=8), "zero_hpz_partition_size 8 does not divide the 4"),
    ({"optimizer": {"type": "OneBitAdam"}}, "'OneBitAdam' was removed with compressed communication. Use 'Adam'"),
    ({"optimizer": {"type": "Lamb", "params": {"max_grad_norm": 1.0}}}, "Set the top-level key gradient_clipping"),
]


@for_each(("keys", "text"), BROKEN)
def test_contradictions_are_sentences(keys: dict[str, object], text: str) -> None:
    with pytest.raises(DeepSpeedConfigError) as caught:
        load(**keys)
    assert text in str(caught.value)


@for_each(
    "keys",
    [
        {"prescale_gradients": True, **z(stage=1)},
        {"prescale_gradients": True, "gradient_allreduce_op": "sum", **z(stage=2)},
        {"prescale_gradients": True, **z(stage=3, reduce_scatter=False)},
        {"gradient_clipping": 0, **z(compute_grad_norm=False, stage=1)},
        {"bf16": {"enabled": True}, "fp16": {"enabled": False, "loss_scale_window": 0}},
        z(stage=3, mics_shard_size=2, zero_hpz_partition_size=2, mics_hierarchical_params_gather=True),
        z(stage=3, offload_param=CPU, offload_optimizer=DRIVE),
    ],
)
def test_legal_combinations(keys: dict[str, object]) -> None:
    """Accepted, and every value as it was written."""
    found = {item.path: item.value for item in settings(load(**keys)) if item.origin == "file"}
    assert found == {"train_batch_size": 4, **leaves(keys)}


@for_each("zero", [{"stage": 0}, {}])
def test_an_offloaded_optimizer_at_stage_0_has_no_effect(zero: dict[str, object]) -> None:
    """Clients copy a policy's configuration and set the stage, for a reference model."""
    for more in ({}, {"zenflow": {}}):
        found = load(**z(**zero, offload_optimizer={**DRIVE, "ratio": 0.5}, **more)).zero
        assert (found.stage, found.offload_optimizer, found.zenflow) == (0, None, None)


def leaves(block: dict[str, object], prefix: str = "") -> dict[str, object]:
    """Dotted path -> value of everything in ``block``."""
    found: dict[str, object] = {}
    for name, value in block.items():
        found |= leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


def test_lenient_ignores_ranks_and_unfinished_params() -> None:
    load(lenient=True, optimizer={"type": "Lamb", "params": {"max_grad_norm": "auto"}}, **z(stage=3, mics_shard_size=3))
    with pytest.raises(DeepSpeedConfigError, match="both true"):
        load(lenient=True, fp16={"enabled": True}, bf16={"enabled": True})


def test_all_contradictions_are_listed() -> None:
    with pytest.raises(DeepSpeedConfigError, match="has 2 problems"):
        load(**FP16, **BF16, **offloaded(2, ratio=0.5))


RULES = '"train_batch_size": 1, "fp16": {"enabled": true},\n"bfloat16": {\n"enabled": true},\n'
RULES += '"zero_optimization": {"stage": 1,\n"pipeline_loading_checkpoint": true,'
RULES += '"offload_optimizer": {\n"device": "nvme"}}'
ZERO = '"train_batch_size": 1,\n"zero_optimization": {\n'
ZERO += '"legacy_stage1": true,\n"max_live_parameters": 1,\n"stage3_max_live_parameters": 2}'


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (RULES, ["line 1)", "line 5)", "line 6)"]),
        (ZERO, ["line 3)", "line 5)"]),
        ('"train_micro_batch_size_per_gpu": 3,\n"train_batch_size": 10', ["line 2)"]),
    ],
    ids=["rules", "spellings and removed keys", "a batch that does not close"],
)
def test_faults_name_their_line(tmp_path: Path, text: str, lines: list[str]) -> None:
    path = tmp_path / "ds.json"
    path.write_text(f"{{{text}}}")
    with pytest.raises(DeepSpeedConfigError, match="ds.json") as caught:
        load_config(path, world_size=1, check_support=False)
    faults = getattr(caught.value, "faults", ()) or (str(caught.value),)
    assert sorted(fault.rpartition(" (")[2] for fault in faults) == lines


# --- without effect beside the others ---

STAGE = "does not shard parameters"
SHARDED_ONLY = {
    "allgather_sequential",
    "gather_16bit_weights_on_model_save",
    "leaf_module.classes",
    "leaf_module.names",
    "leaf_module.name_suffixes",
    "max_live_parameters",
    *("max_reuse_distance", "separate_reduce_group"),
    "mics_shard_size",
    "model_persistence_threshold",
    "param_persistence_threshold",
    "prefetch_bucket_size",
    "zero_hpz_partition_size",
    *("offload_param.device", "offload_param.nvme_path", "offload_param.pin_memory", "offload_param.max_in_cpu"),
    *("offload_param.buffer_count", "offload_param.buffer_size"),
}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_keys_of_sharded_parameters_are_named_below_stage_three(stage: int) -> None:
    found = inert_under(load(**z(stage=stage)))
    idle = {path.removeprefix("zero_optimization.") for path, why in found.items() if STAGE in why}
    assert idle == (SHARDED_ONLY if stage < 3 else set())


@for_each(
    ("keys", "expected"),
    [
        ({}, []),
        (z(stage=2), []),
        (z(stage=3, stage3_max_live_parameters=5), []),
        (z(stage=2, stage3_max_live_parameters=5), [("zero_optimization.max_live_parameters", STAGE)]),
        (z(stage=1, leaf_module={"names": ["a"]}), [("zero_optimization.leaf_module.names", STAGE)]),
        (z(stage=2, max_live_parameters="auto"), []),
        ({"fp16": {"enabled": False, "loss_scale": 0}}, [("fp16.loss_scale", "fp16.enabled is false")]),
        ({"fp16": {"enabled": True, "loss_scale": 8, "hysteresis": 2}}, [("fp16.hysteresis", "fixed number")]),
        ({"fp16": {"enabled": True, "loss_scale": 0, "hysteresis": 2}}, []),
        ({"bfloat16": {"check_grad_overflow": False}}, [("bf16.check_grad_overflow", "bf16.enabled is false")]),
        ({"torch_autocast": {"dtype": "fp16"}}, [("torch_autocast.dtype", "torch_autocast.enabled is false")]),
        ({"data_types": {"keep_in_fp32_modules": []}}, [("data_types.keep_in_fp32_modules", "nothing is cast")]),
        (
            {"prescale_gradients": True, "gradient_predivide_factor": 2.0},
            [("gradient_predivide_factor", "prescale_gradients divides")],
        ),
        ({"gradient_predivide_factor": 2.0, "gradient_allreduce_op": "sum"}, [("gradient_predivide_factor", '"sum"')]),
        (
            {"hybrid_engine": {"enabled": True, "inference_tp_size": 2, "tp_gather_partition_size": 4}},
            [("hybrid_engine.tp_gather_partition_size", "inference_tp_size lets no layer be gathered")],
        ),
    ],
)
def test_keys_without_effect_beside_the_others(keys: dict[str, object], expected: list[tuple[str, str]]) -> None:
    idle = {path: item.idle for path, item in explained(load(**keys)).items() if item.origin == "file" and item.idle}
    assert list(idle) == [path for path, _ in expected]
    assert all(said in idle[path] for path, said in expected)
