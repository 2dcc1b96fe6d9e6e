"""The probes of test_config_keys_matter.py: for each key a configuration, a changed value and the run that shows the
change.
"""

from dataclasses import dataclass, replace
from typing import Any

from tests.harness.fingerprint import WORKDIR


@dataclass(frozen=True)
class Probe:
    """``config`` against the same with ``value`` at the key (at ``path`` when the file writes it there), in
    ``scenario``.
    """

    config: dict[str, Any]
    value: Any
    scenario: str = "train"
    world: int = 2
    path: str = ""


ADAMW = {"type": "AdamW", "params": {"lr": 0.01}}


def base(
    stage: int = 1, *, zero: dict[str, Any] | None = None, drop: tuple[str, ...] = (), **blocks: Any
) -> dict[str, Any]:
    """A small configuration; ``blocks`` replace or add top-level keys."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "optimizer": ADAMW,
        "zero_optimization": {
            "stage": stage,
            "param_persistence_threshold": 20,
            "reduce_bucket_size": 200,
            **(zero or {}),
        },
        **blocks,
    }
    return {key: value for key, value in config.items() if key not in drop}


def optimizer(name: str, **params: Any) -> dict[str, Any]:
    """A configuration with that optimizer."""
    return base(optimizer={"type": name, "params": {"lr": 0.01, **params}})


def schedule(name: str, **params: Any) -> dict[str, Any]:
    """A configuration with that schedule."""
    return base(scheduler={"type": name, "params": params})


FP16 = {"enabled": True, "initial_scale_power": 4}
CYCLE = {"cycle_min_lr": 0.001, "cycle_max_lr": 0.01, "cycle_first_step_size": 2}
ENDED = {**CYCLE, "cycle_first_step_size": 1, "decay_step_size": 1}  # the cycle is over after two of the four steps
RANGE = {"lr_range_test_min_lr": 0.001, "lr_range_test_step_size": 2}
WARMUP = {"warmup_max_lr": 0.01, "warmup_num_steps": 3}


def _optimizer_probes() -> dict[str, Probe]:
    lamb = {"min_coeff": 0.3, "max_coeff": 0.4, "weight_decay": 0.1}
    return {
        "type": Probe(base(), "Lion"),
        "params": Probe(base(), {"lr": 0.02}),
        "params.lr": Probe(base(), 0.02),
        "params.betas": Probe(base(), [0.5, 0.9]),
        "params.eps": Probe(base(), 0.1),
        "params.weight_decay": Probe(base(), 0.3),
        "params.torch_adam": Probe(base(), value=True),
        # Torch refuses the two together; what each computes may be equal to the last bit on a processor.
        "params.foreach": Probe(optimizer("AdamW", torch_adam=True, fused=True), value=True),
        "params.adam_w_mode": Probe(optimizer("Adam", weight_decay=0.3), value=False),
        "params.bias_correction": Probe(base(), value=False),
        "params.amsgrad": Probe(base(), value=True),
        "params.momentum": Probe(optimizer("SGD"), 0.9),
        "params.muon_lr": Probe(optimizer("Muon"), 0.05),
        "params.adam_lr": Probe(optimizer("Muon"), 0.05),
        "params.ns_method": Probe(optimizer("Muon", ns_method="gram"), "standard"),
        "params.max_coeff": Probe(optimizer("Lamb", **lamb), 0.35),
        "params.min_coeff": Probe(optimizer("Lamb", **{**lamb, "min_coeff": 20.0, "max_coeff": 40.0}), 30.0),
        "params.eps_inside_sqrt": Probe(optimizer("Lamb", eps=0.01, **lamb), value=True),
        "params.max_grad_norm": Probe(base(), 1.0),
    }


def _schedule_probes() -> dict[str, Probe]:
    cycle, ended = schedule("OneCycle", **CYCLE), schedule("OneCycle", **ENDED)
    warm, cosine = schedule("WarmupLR", **WARMUP), schedule("WarmupCosineLR", total_num_steps=8, warmup_num_steps=3)
    return {
        "type": Probe(schedule("ConstantLR", total_iters=2), "LinearLR"),
        "params": Probe(warm, {**WARMUP, "warmup_num_steps": 2}),
        "params.lr_range_test_min_lr": Probe(schedule("LRRangeTest", **RANGE), 0.002),
        "params.lr_range_test_step_size": Probe(schedule("LRRangeTest", **RANGE), 3),
        "params.lr_range_test_step_rate": Probe(schedule("LRRangeTest", **RANGE), 2.0),
        "params.lr_range_test_staircase": Probe(schedule("LRRangeTest", **RANGE), value=True),
        "params.cycle_min_lr": Probe(cycle, 0.002),
        "params.cycle_max_lr": Probe(cycle, 0.02),
        "params.decay_lr_rate": Probe(ended, 0.5),
        "params.cycle_first_step_size": Probe(cycle, 3),
        "params.cycle_second_step_size": Probe(cycle, 5),
        "params.cycle_first_stair_count": Probe(cycle, 1),
        "params.cycle_second_stair_count": Probe(schedule("OneCycle", **CYCLE, cycle_first_stair_count=2), 1),
        "params.decay_step_size": Probe(schedule("OneCycle", **ENDED, decay_lr_rate=0.5), 3),
        "params.cycle_momentum": Probe(cycle, value=False),
        "params.cycle_min_mom": Probe(cycle, 0.7),
        "params.cycle_max_mom": Probe(cycle, 0.95),
        "params.decay_mom_rate": Probe(ended, 0.01),
        "params.warmup_min_lr": Probe(warm, 0.001),
        "params.warmup_max_lr": Probe(warm, 0.02),
        "params.warmup_num_steps": Probe(warm, 2),
        "params.warmup_type": Probe(warm, "linear"),
        "params.total_num_steps": Probe(cosine, 5),
        "params.warmup_min_ratio": Probe(cosine, 0.3),
        "params.cos_min_ratio": Probe(schedule("WarmupCosineLR", total_num_steps=4, warmup_num_steps=2), 0.5),
        "params.last_batch_iteration": Probe(warm, 1),
    }


def _precision_probes() -> dict[str, Probe]:
    autocast = base(torch_autocast={"enabled": True})
    overflow = base(fp16=FP16)
    return {
        "fp16.enabled": Probe(base(), value=True),
        "fp16.auto_cast": Probe(base(fp16={**FP16, "auto_cast": True}), value=False, scenario="uncast"),
        "fp16.loss_scale": Probe(base(fp16=FP16), 8.0),
        "fp16.initial_scale_power": Probe(base(fp16=FP16), 6),
        "fp16.loss_scale_window": Probe(base(fp16=FP16), 1),
        "fp16.hysteresis": Probe(overflow, 1, scenario="overflow"),
        "fp16.consecutive_hysteresis": Probe(overflow, value=True, scenario="apart"),
        "fp16.min_loss_scale": Probe(base(fp16={**FP16, "hysteresis": 1}), 8, scenario="overflow"),
        "bf16.enabled": Probe(base(), value=True),
        "bf16.check_grad_overflow": Probe(base(bf16={"enabled": True}), value=False, scenario="overflow"),
        "torch_autocast.enabled": Probe(base(), value=True),
        "torch_autocast.dtype": Probe(autocast, "fp16"),
        "torch_autocast.lower_precision_safe_modules": Probe(autocast, ["torch.nn.Linear"]),
        "data_types.grad_accum_dtype": Probe(base(2, bf16={"enabled": True}), "bf16"),
        "data_types.param_dtype": Probe(base(), "bf16"),
        "data_types.buffer_dtype": Probe(base(), "bf16"),
        "data_types.keep_in_fp32_modules": Probe(base(bf16={"enabled": True}), ["head"]),
    }


def _tensor_probes() -> dict[str, Probe]:
    two = {"autotp_size": 2}
    split = base(tensor_parallel=two)

    def ruled(*specs: dict[str, Any]) -> dict[str, Any]:
        return base(tensor_parallel={**two, "partition_config": {"layer_specs": list(specs)}})

    def of_rule(name: str, value: Any, *specs: dict[str, Any]) -> Probe:
        return Probe(ruled(*specs), value, path=f"tensor_parallel.partition_config.layer_specs.0.{name}")

    head = {"patterns": ["head"], "gather_output": True}
    up, down = {"patterns": [r"layers\.\d\.up"]}, {"patterns": [".*down"], "partition_type": "row"}
    rules = {
        "patterns": of_rule("patterns", ["inp"], head),
        "partition_type": of_rule("partition_type", "skip", head),
        "shape": of_rule("shape", [2, -1], head),
        "partition_dim": of_rule("partition_dim", 1, {**head, "shape": [1, -1]}),
        "model_types": of_rule("model_types", ["gpt2"], head),
        "gather_output": of_rule("gather_output", True, up, down),
        "grad_allreduce": of_rule("grad_allreduce", True, {"patterns": ["head"], "partition_type": "skip"}),
    }
    return {
        "autotp_size": Probe(base(), 2),
        "vocab_parallel_lm_head": Probe(split, value=True),
        "sequence_parallel_norms": Probe(split, value=True),
        "tensor_parallel.tp_size": Probe(split, 4),
        "partition_config": Probe(split, {"layer_specs": [head]}),
        "partition_config.use_default_specs": Probe(ruled(head), value=False),
        "partition_config.strict_mode": Probe(ruled(head), value=True),
        "partition_config.lm_head_patterns": Probe(split, ["head"]),
        **_under("partition_config.layer_specs[]", rules),
    }


def _expert_probes() -> dict[str, Probe]:
    def of(value: Any, **block: Any) -> Probe:
        return Probe(base(expert_parallel={"enabled": True, **block}), value, scenario="experts")

    return {
        "enabled": of(True, enabled=False, autoep_size=2),
        "autoep_size": of(2),
        "expert_tensor_parallel_size": of(2),
        "moe_layer_pattern": of(r"layers\.2", autoep_size=2),
        "expert_pattern": of("others", autoep_size=2, moe_layer_pattern=r"layers\.[23]"),
        "load_balance_coeff": of(0.5),
    }


def _sequence_probes() -> dict[str, Probe]:
    two = base(sequence_parallel_size=2)
    return {
        "sequence_parallel_size": Probe(base(), 2),
        "data_parallel_size": Probe(two, 2),
        "seq_parallel_communication_data_type": Probe(two, "bf16"),
        "sequence.attention": Probe(two, "ulysses"),
        "compile.passes": Probe(two, ["autosp"]),
        "compile.deepcompile": Probe(base(compile={"passes": ["z1"]}), value=True),
        "sequence.loss": Probe(base(), "tiled"),
        "sequence.mlp_tiles": Probe(base(), 4),
        "sequence.offload_activations": Probe(base(), value=True),
        "sequence.plan": Probe(base(), "auto"),
    }


def _reduction_probes() -> dict[str, Probe]:
    return {
        "communication_data_type": Probe(base(), "bf16"),
        "prescale_gradients": Probe(base(gradient_predivide_factor=3.0), value=True),
        "gradient_predivide_factor": Probe(base(), 3.0),
        "gradient_allreduce_op": Probe(base(), "sum"),
        "normalize": Probe(base(), "tokens"),
        "gradient_clipping": Probe(base(), 0.01),
    }


def _zero_probes() -> dict[str, Probe]:
    three = base(3)
    leaf = {"classes": [], "names": [], "name_suffixes": []}
    return {
        "stage": Probe(base(1), 3),
        "reduce_bucket_size": Probe(base(2), 2000),
        "overlap_comm": Probe(three, value=False),
        "separate_reduce_group": Probe(three, value=True),
        "compute_grad_norm": Probe(base(2), value=False),
        "prefetch_bucket_size": Probe(three, 0),
        "allgather_sequential": Probe(three, value=True),
        "param_persistence_threshold": Probe(three, 0),
        "model_persistence_threshold": Probe(three, 40),
        "max_live_parameters": Probe(base(3, zero={"max_reuse_distance": 10_000}), 100),
        "max_reuse_distance": Probe(three, 10_000),
        "gather_16bit_weights_on_model_save": Probe(three, value=True, scenario="save"),
        "stage3_gather_fp16_weights_on_model_save": Probe(three, value=True, scenario="save"),
        "legacy_stage1": Probe(base(), value=True),
        "leaf_module.classes": Probe(base(3, zero={"leaf_module": leaf}), ["ProbeModel"]),
        "leaf_module.names": Probe(base(3, zero={"leaf_module": leaf}), ["head"]),
        "leaf_module.name_suffixes": Probe(base(3, zero={"leaf_module": leaf}), ["side"]),
        "zero_hpz_partition_size": Probe(three, 2, world=4),
        "mics_shard_size": Probe(three, 1),
        "divergence": Probe(three, "error", scenario="diverge"),
        "enable_sanity_checks": Probe(three, value=True, scenario="rewrite"),
    }


def _offload_probes() -> dict[str, Probe]:
    drive = {"device": "nvme", "nvme_path": WORKDIR}
    on_host = {"device": "cpu"}
    optim, param = (
        base(3, zero={"offload_optimizer": drive}),
        base(3, zero={"offload_param": {**drive, "max_in_cpu": 0}}),
    )
    old = base(3, zero={"cpu_offload": True})
    block, other, half = "zero_optimization.offload_", f"{WORKDIR}/elsewhere", {**on_host, "ratio": 0.5}
    late, early = {**on_host, "delayed_update": True}, {**on_host, "super_offload": True}
    return {
        "zero_optimization.sub_group_size": Probe(optim, 4096),
        "zero_optimization.cpu_offload": Probe(base(3), value=True),
        "zero_optimization.cpu_offload_param": Probe(base(3), value=True),
        "zero_optimization.cpu_offload_use_pin_memory": Probe(old, value=False),
        f"{block}optimizer": Probe(base(3), on_host),
        f"{block}optimizer.device": Probe(optim, "cpu"),
        f"{block}optimizer.nvme_path": Probe(optim, other),
        f"{block}optimizer.buffer_count": Probe(optim, 2),
        f"{block}optimizer.pin_memory": Probe(optim, value=False),
        f"{block}optimizer.ratio": Probe(base(3, zero={"offload_optimizer": on_host}), 0.4),
        f"{block}optimizer.device_states": Probe(base(3, zero={"offload_optimizer": half}), "travel"),
        f"{block}optimizer.super_offload": Probe(base(3, zero={"offload_optimizer": on_host}), value=True),
        f"{block}optimizer.cpuadam_cores_perc": Probe(base(3, zero={"offload_optimizer": early}), 0.5),
        f"{block}optimizer.delayed_update": Probe(base(3, zero={"offload_optimizer": on_host}), value=True),
        f"{block}optimizer.delayed_update_warm_up": Probe(base(3, zero={"offload_optimizer": late}), 2),
        f"{block}param": Probe(base(3), on_host),
        f"{block}param.device": Probe(param, "cpu"),
        f"{block}param.nvme_path": Probe(param, other),
        f"{block}param.buffer_count": Probe(param, 2),
        f"{block}param.buffer_size": Probe(param, 8),
        f"{block}param.max_in_cpu": Probe(param, 100_000),
        f"{block}param.pin_memory": Probe(param, value=False),
        **_zenflow_probes(),
        "aio.block_size": Probe(optim, 8192),
        "aio.queue_depth": Probe(optim, 4),
        "aio.intra_op_parallelism": Probe(optim, 2),
        "memory.host_limit": Probe(base(3), "900GiB"),
        "memory.device_limit": Probe(base(3), "900GiB"),
    }


def _zenflow_probes() -> dict[str, Probe]:
    def columns(**keys: Any) -> dict[str, Any]:
        return base(2, zero={"offload_optimizer": {"device": "cpu"}, "zenflow": keys})

    head, step = "zero_optimization.zenflow", {"select_strategy": "step", "select_interval": 2, "update_interval": 2}
    return {
        head: Probe(base(2, zero={"offload_optimizer": {"device": "cpu"}}), {"update_interval": 2}),
        f"{head}.topk_ratio": Probe(columns(), 0.5),
        f"{head}.select_strategy": Probe(columns(**step, steps_per_epoch=3), "epoch"),
        f"{head}.select_interval": Probe(columns(**step), 4),
        f"{head}.update_interval": Probe(columns(), 2),
        f"{head}.overlap_step": Probe(columns(update_interval=2), value=True),
        f"{head}.auto_ratio": Probe(columns(), 0.5),
        f"{head}.full_warm_up_rounds": Probe(columns(), 2),
        f"{head}.pt_reserved_cores_perc": Probe(columns(overlap_step=True), 0.25),
        f"{head}.steps_per_epoch": Probe(columns(**{**step, "select_strategy": "epoch"}, steps_per_epoch=2), 1),
    }


def _report_probes() -> dict[str, Probe]:
    reported = base(steps_per_print=1)
    return {
        "steps_per_print": Probe(base(), 2),
        "wall_clock_breakdown": Probe(reported, value=True),
        "memory_breakdown": Probe(base(), value=True),
        "dump_state": Probe(base(), value=True),
        "log_level": Probe(base(), "error"),
        "disable_python_gc": Probe(base(), value=True),
        "hang_timeout": Probe(base(), 300),
        "vocabulary_size": Probe(base(), 50257),
        "timers.throughput.enabled": Probe(reported, value=False, scenario="longer"),
        "timers.throughput.synchronized": Probe(reported, value=False, scenario="longer"),
        "comms_logger.enabled": Probe(base(comms_logger={"enabled": False}), value=True),
        "comms_logger.prof_all": Probe(base(comms_logger={"enabled": True}), value=False),
        "comms_logger.prof_ops": Probe(base(comms_logger={"enabled": True, "prof_all": False}), ["all_gather"]),
        "comms_logger.verbose": Probe(base(comms_logger={"enabled": True}), value=True),
        "comms_logger.debug": Probe(base(comms_logger={"enabled": True}), value=True),
    }


def _profile_probes() -> dict[str, Probe]:
    on = base(flops_profiler={"enabled": True, "profile_step": 0})
    changed = {
        "recompute_fwd_factor": 0.5,
        "profile_step": 1,
        "module_depth": 0,
        "top_modules": 3,
        "detailed": False,
        "output_file": f"{WORKDIR}/profile.txt",
        "peak_tflops": 0.001,
    }
    probes = {f"flops_profiler.{name}": Probe(on, value, scenario="longer") for name, value in changed.items()}
    off = base(flops_profiler={"enabled": False, "profile_step": 0})
    return probes | {"flops_profiler.enabled": Probe(off, value=True)}


def _generation_probes() -> dict[str, Probe]:
    on = {"enabled": True}
    changed = {
        "enabled": False,
        "max_out_tokens": 7,  # of a row of 6 and two more
        "release_inference_cache": True,
        "pin_parameters": False,
        "tp_gather_partition_size": 1,
        "inference_tp_size": 2,
    }
    start = base(3, zero={"param_persistence_threshold": 0}, hybrid_engine=on)
    return {f"hybrid_engine.{name}": Probe(start, value, scenario="generate") for name, value in changed.items()}


def _observe_probes() -> dict[str, Probe]:
    trace, run = {"trace": f"{WORKDIR}/trace.txt", "steps": [1, 2]}, {"run": f"{WORKDIR}/run"}
    return {
        "observe.trace": Probe(base(observe={"steps": [1, 2]}), trace["trace"]),
        "observe.steps": Probe(base(observe=trace), [1, 4]),
        "observe.run": Probe(base(), run["run"]),
        "observe.slow_factor": Probe(base(observe=run | {"slow_factor": 1e6, "slow_steps": 2}), 1.2, scenario="slow"),
        "observe.slow_steps": Probe(base(observe=run), 2, scenario="slow"),
    }


def _anomaly_probes() -> dict[str, Probe]:
    """A rate of learning that blows up, whose losses are not finite; and rows that are dead from the start."""
    wild = base(optimizer={"type": "SGD", "params": {"lr": 1e30}}, anomalies={"enabled": True, "window": 1})
    layers, scraped = base(anomalies={"per_layer": True, "window": 2}), f"{WORKDIR}/a.prom"
    return {
        "anomalies.enabled": Probe(wild, value=False, scenario="longer"),
        "anomalies.window": Probe(wild, 50, scenario="longer"),
        "anomalies.per_layer": Probe(layers, value=False),
        "anomalies.nonfinite_updates": Probe(base(), 2, scenario="overflow"),
        "prometheus.enabled": Probe(base(prometheus={"enabled": False, "output_file": scraped}), value=True),
        "prometheus.output_file": Probe(
            base(prometheus={"enabled": True, "output_file": scraped}), f"{WORKDIR}/b.prom"
        ),
    }


def _monitor_probes(block: str) -> dict[str, Probe]:
    on = base(**{block: {"enabled": True, "output_path": WORKDIR, "job_name": "a"}})
    return {
        f"{block}.enabled": Probe(base(**{block: {"enabled": False, "output_path": WORKDIR}}), value=True),
        f"{block}.output_path": Probe(on, f"{WORKDIR}/elsewhere"),
        f"{block}.job_name": Probe(on, "b"),
    }


def _service_probes() -> dict[str, Probe]:
    changed: dict[str, dict[str, Any]] = {
        "wandb": {"group": "g", "team": "t", "project": "p"},
        "comet": {"samples_log_interval": 4, "project": "p", "workspace": "w", "online": False, "mode": "create"},
    }
    changed["comet"] |= {"api_key": "k", "experiment_name": "n", "experiment_key": "e"}
    probes = {}
    for service, values in changed.items():
        off, on = (base(**{service: {"enabled": enabled}}) for enabled in (False, True))
        probes[f"{service}.enabled"] = Probe(off, value=True)
        probes |= {f"{service}.{name}": Probe(on, value) for name, value in values.items()}
    return probes


def _checkpoint_probes() -> dict[str, Probe]:
    plain, behind = base(2), base(2, checkpoint={"async": True})
    return {
        "tag_validation": Probe(plain, "FAIL", scenario="checkpoint"),
        "async": Probe(plain, value=True, scenario="checkpoint"),
        "keep_last": Probe(plain, 1, scenario="checkpoint"),
        "rate_limit": Probe(behind, "1GiB", scenario="checkpoint"),
        "client_files": Probe(plain, value=False, scenario="checkpoint"),
        "emergency_deadline": Probe(plain, 60, scenario="checkpoint"),
        "restore_data": Probe(plain, value=False, scenario="checkpoint"),
        "restore_rng": Probe(plain, value=False, scenario="checkpoint"),
        "allow_pickle": Probe(base(2, checkpoint={"allow_pickle": True}), value=False, scenario="odd client"),
    }


def _elasticity_probes() -> dict[str, Probe]:
    """On two ranks a global batch of 12, the largest within 20 that 1 to 4 ranks can cut."""
    block = {"enabled": True, "max_train_batch_size": 20, "micro_batch_sizes": [1], "max_gpus": 4}
    few, both = ("train_micro_batch_size_per_gpu",), {**block, "ignore_non_elastic_batch_info": True}
    changed = {
        "max_train_batch_size": 36,
        "micro_batch_sizes": [1, 2, 5],
        "min_gpus": 3,
        "max_gpus": 2,
        "version": 0.3,
        "model_parallel_size": 2,
        "num_gpus_per_node": 2,
    }
    smaller = base(drop=few, elasticity={**block, "max_gpus": 2})
    return {
        **{name: Probe(base(drop=few, elasticity=block), value) for name, value in changed.items()},
        "prefer_larger_batch": Probe(smaller, value=False),
        "enabled": Probe(base(elasticity={**both, "enabled": False}), value=True),
        "ignore_non_elastic_batch_info": Probe(base(elasticity=both), value=False),
    }


def _pipeline_probes() -> dict[str, Probe]:
    """On a module of two stages, whose ranks are one way of data parallelism."""
    plain, chunks = base(gradient_accumulation_steps=4), {"schedule": "interleaved", "chunks_per_stage": 2}
    twice = base(gradient_accumulation_steps=4, pipeline=chunks)
    return {
        "stages": Probe(plain, 4, "pipeline"),
        "partition": Probe(plain, "uniform", "pipeline"),
        "seed_layers": Probe(plain, value=True, scenario="pipeline"),
        "activation_checkpoint_interval": Probe(plain, 1, "pipeline"),
        "schedule": Probe(plain, "gpipe", "pipeline"),
        "chunks_per_stage": Probe(twice, 3, "pipeline"),
    }


def _activation_probes() -> dict[str, Probe]:
    return {
        "cpu_checkpointing": Probe(base(), value=True, scenario="recompute"),
        "synchronize_checkpoint_boundary": Probe(base(), value=True, scenario="recompute"),
        "profile": Probe(base(), value=True, scenario="recompute"),
    }


def _under(prefix: str, probes: dict[str, Probe]) -> dict[str, Probe]:
    return {f"{prefix}.{name}": probe for name, probe in probes.items()}


PROBES: dict[str, Probe] = {
    "train_batch_size": Probe(base(), 8),
    "train_micro_batch_size_per_gpu": Probe(base(), 3),
    "gradient_accumulation_steps": Probe(base(), 2),
    "managed_gradient_accumulation": Probe(base(gradient_accumulation_steps=2), value=False),
    "dataloader_drop_last": Probe(base(), value=True),
    **_under("optimizer", _optimizer_probes()),
    **_under("scheduler", {name: replace(probe, scenario="longer") for name, probe in _schedule_probes().items()}),
    **_precision_probes(),
    **_reduction_probes(),
    **_sequence_probes(),
    "zero_optimization": Probe(base(drop=("zero_optimization",)), value=True),
    **_under("zero_optimization", _zero_probes()),
    **_under("tensor_parallel", _tensor_probes()),
    **_under("expert_parallel", _expert_probes()),
    "use_data_before_expert_parallelism": Probe(
        base(expert_parallel={"enabled": True, "autoep_size": 2}), value=True, scenario="experts", world=4
    ),
    **_under("activation_checkpointing", _activation_probes()),
    **_under("checkpoint", _checkpoint_probes()),
    **_under("pipeline", _pipeline_probes()),
    **_under("elasticity", _elasticity_probes()),
    **_offload_probes(),
    **_report_probes(),
    **_profile_probes(),
    **_generation_probes(),
    **_observe_probes(),
    **_anomaly_probes(),
    **_monitor_probes("csv_monitor"),
    **_monitor_probes("tensorboard"),
    **_service_probes(),
}

_ON_HOST = base(3, zero={"offload_optimizer": {"device": "cpu"}})
# Inert keys whose changed value cannot be made up from their type alone.
INERT_PROBES: dict[str, Probe] = {
    "allgather_size": Probe(base(zero_optimization=True), 1000),
    "optimizer.params.set_grad_none": Probe(base(3), value=False),
    "optimizer.params.fp32_optimizer_states": Probe(base(3), value=False),
    "activation_checkpointing.number_checkpoints": Probe(base(), 3, scenario="recompute"),
    "activation_checkpointing.contiguous_memory_optimization": Probe(
        base(activation_checkpointing={"partition_activations": True, "number_checkpoints": 3}),
        value=True,
        scenario="recompute",
    ),
    "activation_checkpointing.partition_activations": Probe(base(), value=True, scenario="recompute"),
    **{
        f"zero_optimization.offload_optimizer.{name}": Probe(_ON_HOST, value=True)
        for name in ("pipeline_read", "pipeline_write", "fast_init")
    },
    "zero_optimization.grad_hooks": Probe(base(3), value=True),
    "pipeline.<any>": Probe(base(3), 3, path="pipeline.of_my_own"),
    "checkpoint.writer": Probe(base(3), {"type": "PYTHON"}, scenario="checkpoint"),
    "checkpoint.load_universal": Probe(base(3), value=True, scenario="checkpoint"),
    "checkpoint.checkpoint_serialization": Probe(base(3), value=False, scenario="checkpoint"),
    "checkpoint.use_node_local_storage": Probe(base(3), value=True, scenario="checkpoint"),
    "zero_optimization.load_from_fp32_weights": Probe(base(2), value=False, scenario="checkpoint"),
    "zero_optimization.elastic_checkpoint": Probe(base(2), value=True, scenario="checkpoint"),
    "zero_optimization.pipeline_loading_checkpoint": Probe(base(3), value=True, scenario="checkpoint"),
}
