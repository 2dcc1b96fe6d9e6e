"""Rules between keys are sentences; what this release lacks is named, not ignored."""

import pytest

from deepspeed.config import DeepSpeedConfig, DeepSpeedConfigError, inert_features, load_config, unsupported_features

CPU = {"device": "cpu"}


def load(world_size: int = 4, *, lenient: bool = False, **keys: object) -> DeepSpeedConfig:
    return load_config({"train_batch_size": world_size, **keys}, world_size=world_size, lenient=lenient)


def z(**keys: object) -> dict[str, object]:
    return {"zero_optimization": keys}


BROKEN = [
    ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16.enabled and bf16.enabled are both true"),
    ({"fp16": {"enabled": True, "loss_scale_window": 0}}, "fp16.loss_scale_window must be at least 1"),
    ({"fp16": {"enabled": True, "min_loss_scale": 0}}, "fp16.min_loss_scale must be at least 1"),
    ({"fp16": {"fp16_master_weights_and_grads": True}}, "fp16_master_weights_and_grads needs zero_optimization.stage"),
    ({"fp16": {"fp16_master_weights_and_grads": True}, **z(stage=2)}, 'needs zero_optimization.offload_optimizer.device "cpu"'),
    ({"bf16": {"bf16_optimizer_states": True}, **z(stage=2)}, "bf16_optimizer_states needs bf16.bf16_master_weights_and_grads"),
    ({"bf16": {"bf16_master_weights_and_grads": True}, **z(stage=1)}, 'needs zero_optimization.offload_optimizer.device "cpu"'),
    (
        {"bf16": {"enabled": True}, "data_types": {"param_dtype": "fp32"}},
        "data_types.param_dtype is fp32, but the fp16 and bf16 blocks say bf16",
    ),
    ({"torch_autocast": {"enabled": True}, **z(zero_quantized_weights=True)}, "exclude each other"),
    ({"prescale_gradients": True, **z(stage=3)}, "prescale_gradients cannot be combined with zero_optimization.stage 3"),
    ({"prescale_gradients": True, **z(stage=2)}, "prescale_gradients cannot be combined with zero_optimization.stage 2"),
    ({"gradient_predivide_factor": 2.0, **z(stage=2)}, "gradient_predivide_factor must be 1.0"),
    ({"gradient_allreduce_op": "sum", **z(stage=3)}, 'gradient_allreduce_op "sum" cannot be combined'),
    (z(zero_quantized_gradients=True, reduce_scatter=False), "needs zero_optimization.reduce_scatter true"),
    ({"managed_gradient_accumulation": False, **z(stage=1, overlap_comm=True)}, "only from stage 2 on"),
    (z(compute_grad_norm=False, stage=2), "needs gradient_clipping 0"),
    ({"gradient_clipping": 0, **z(compute_grad_norm=False, stage=3)}, "needs stage 1 or 2, not 3"),
    ({"gradient_clipping": 0, **z(compute_grad_norm=False, stage=2, offload_optimizer=CPU)}, "cannot be combined with offload_optimizer"),
    (z(stage=2, offload_param=CPU), "offload_param needs stage 3"),
    (z(stage=3, offload_param={"device": "nvme"}), "needs offload_param.nvme_path"),
    (z(stage=2, offload_optimizer={"device": "cpu", "ratio": 0.5}), "ratio below 1.0 needs stage 3"),
    (z(stage=2, offload_optimizer={"device": "cpu", "super_offload": True}), "super_offload needs stage 3"),
    (z(stage=2, pipeline_loading_checkpoint=True), "pipeline_loading_checkpoint needs stage 3"),
    (z(stage=2, zenflow={}), 'zenflow needs offload_optimizer.device "cpu"'),
    (z(stage=2, zenflow={"offload": True}, offload_optimizer=CPU), "zenflow.offload needs overlap_comm true"),
    (z(stage=3, mics_shard_size=3), "mics_shard_size 3 does not divide the 4 data-parallel ranks"),
    (z(stage=3, mics_shard_size=0), "mics_shard_size must be -1 (off)"),
    (z(stage=3, zero_hpz_partition_size=8), "zero_hpz_partition_size 8 does not divide the 4"),
    ({"optimizer": {"type": "OneBitAdam"}}, "'OneBitAdam' was removed with compressed communication. Use 'Adam'"),
    ({"optimizer": {"type": "Lamb", "params": {"max_grad_norm": 1.0}}}, "Set the top-level key gradient_clipping"),
]


@pytest.mark.parametrize(("keys", "text"), BROKEN)
def test_contradictions_are_sentences(keys: dict[str, object], text: str) -> None:
    with pytest.raises(DeepSpeedConfigError) as caught:
        load(**keys)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    "keys",
    [
        {"prescale_gradients": True, **z(stage=1)},
        {"prescale_gradients": True, "gradient_allreduce_op": "sum", **z(stage=2)},
        {"prescale_gradients": True, **z(stage=3, reduce_scatter=False)},
        {"gradient_clipping": 0, **z(compute_grad_norm=False, stage=1)},
        {"bf16": {"enabled": True}, "fp16": {"enabled": False, "loss_scale_window": 0}},
        {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}, **z(stage=1)},
        z(stage=3, mics_shard_size=2, zero_hpz_partition_size=2),
        z(stage=3, offload_param=CPU, offload_optimizer={"device": "nvme", "nvme_path": "/x"}),
    ],
)
def test_legal_combinations(keys: dict[str, object]) -> None:
    load(**keys)


def test_lenient_ignores_ranks_and_unfinished_params() -> None:
    load(lenient=True, optimizer={"type": "Lamb", "params": {"max_grad_norm": "auto"}}, **z(stage=3, mics_shard_size=3))
    with pytest.raises(DeepSpeedConfigError, match="both true"):
        load(lenient=True, fp16={"enabled": True}, bf16={"enabled": True})


def test_all_contradictions_are_listed() -> None:
    with pytest.raises(DeepSpeedConfigError, match="has 2 problems"):
        load(fp16={"enabled": True}, bf16={"enabled": True}, **z(stage=1, offload_param=CPU))


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        (z(stage=2, offload_optimizer=CPU), 'zero_optimization.offload_optimizer.device "cpu"'),
        (z(stage=3, offload_param={"device": "nvme", "nvme_path": "/x"}), 'zero_optimization.offload_param.device "nvme"'),
        (z(stage=3, zero_quantized_weights=True), "zero_optimization.zero_quantized_weights"),
        (z(stage=3, zero_quantized_gradients=True), "zero_optimization.zero_quantized_gradients"),
        (z(stage=3, zero_quantized_nontrainable_weights=True), "zero_optimization.zero_quantized_nontrainable_weights"),
        (z(stage=2, zenflow={}, offload_optimizer=CPU), "zero_optimization.zenflow"),
        ({"fp16": {"fp16_master_weights_and_grads": True}, **z(stage=2, offload_optimizer=CPU)}, "fp16.fp16_master_weights_and_grads"),
        ({"bf16": {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}, **z(stage=2)}, "bf16.bf16_optimizer_states"),
        ({"compression_training": {"layer_reduction": {"enabled": True}}}, "compression_training"),
        ({"autotuning": {"enabled": True}}, "autotuning"),
        ({"hybrid_engine": {"enabled": True}}, "hybrid_engine"),
        ({"elasticity": {"enabled": True}}, "elasticity"),
        ({"expert_parallel": {"enabled": True}}, "expert_parallel"),
        ({"data_efficiency": {"enabled": True}}, "data_efficiency"),
        ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel.autotp_size"),
        ({"tensor_parallel": {"tp": {"tp_size": 2}}}, "tensor_parallel.tp.tp_size"),
        ({"sequence_parallel_size": 2}, "sequence_parallel_size"),
        ({"pipeline": {"stages": 2}}, "pipeline.stages"),
        ({"compile": {"deepcompile": True}}, "compile.deepcompile"),
        ({"datastates_ckpt": {"host_cache_size": 1}}, "datastates_ckpt"),
    ],
)
def test_unsupported_features_are_named(keys: dict[str, object], name: str) -> None:
    assert any(item.startswith(f"{name} is not supported") for item in unsupported_features(load(**keys)))


def test_a_plain_configuration_is_supported() -> None:
    off = {"enabled": False}
    names = ("compression_training", "autotuning", "hybrid_engine", "elasticity", "expert_parallel", "data_efficiency")
    cfg = load(
        **z(stage=3, mics_shard_size=2, offload_param={"device": "none"}),
        **dict.fromkeys(names, off),
        tensor_parallel={"autotp_size": 1},
        pipeline={"stages": "auto"},
        datastates_ckpt=False,
        sequence_parallel_size=1,
    )
    assert unsupported_features(cfg) == [] and inert_features(cfg) == []


def test_reports_without_effect_are_named() -> None:
    cfg = load(tensorboard={"enabled": True}, wandb={"enabled": False}, comms_logger={})
    assert [item.split()[0] for item in inert_features(cfg)] == ["tensorboard", "comms_logger"]
