"""The key table is complete: every documented key is typed, described, and in exactly one of the three classes."""

import json
from pathlib import Path

from deepspeed.config.model.optim_params import PARAM_FIELDS
from deepspeed.config.model.root import DeepSpeedConfig, load_config
from deepspeed.config.model.settings import all_keys, declared_fields, settings, support_faults
from deepspeed.config.model.spelling import SPELLED
from deepspeed.config.model.values import Support

KEYS = all_keys(DeepSpeedConfig)
DOCUMENTED = json.loads((Path(__file__).parents[1] / "data" / "config_keys.json").read_text())
CURRENT = {entry["path"] for entry in DOCUMENTED if entry["status"] in ("current", "docs-only")}
# Removed from the reference format, and honoured here.
CURRENT |= {entry["path"] for entry in DOCUMENTED if entry["path"].startswith("elasticity.")}
# Keys of this package that the reference format does not have.
EXTENSIONS = {
    "tensor_parallel.sequence_parallel_norms",
    *(f"checkpoint.{name}" for name in ("allow_pickle", "async", "client_files", "keep_last", "rate_limit")),
    "checkpoint.emergency_deadline",
    *("checkpoint.restore_data", "checkpoint.restore_rng", "memory.device_limit", "memory.host_limit", "seed"),
    *("zero_optimization.divergence", "zero_optimization.mics_hierarchical_params_gather", "hang_timeout"),
    *(
        f"zero_optimization.offload_optimizer.{n}"
        for n in ("device_states", "delayed_update", "delayed_update_warm_up")
    ),
    "normalize",
    *(f"sequence.{name}" for name in ("attention", "loss", "mlp_tiles", "offload_activations", "plan")),
    "optimizer.torch_adam",
    "zero_optimization.separate_reduce_group",
    *(f"observe.{name}" for name in ("trace", "steps", "run", "slow_factor", "slow_steps")),
    *("zero_optimization.mics_shard_size", "pipeline.schedule", "pipeline.chunks_per_stage"),
    *("flops_profiler.peak_tflops", "prometheus.enabled", "prometheus.output_file"),
    *(f"anomalies.{name}" for name in ("enabled", "per_layer", "window", "nonfinite_updates")),
}


def declared() -> set[str]:
    return {field.path for field in declared_fields(DeepSpeedConfig)} | set(PARAM_FIELDS)


def test_every_documented_key_has_one_row() -> None:
    assert len([entry for entry in DOCUMENTED if entry["status"] == "current"]) == 398
    assert sorted(CURRENT - set(KEYS)) == []


def test_every_row_is_a_documented_key_or_a_named_extension() -> None:
    assert sorted(set(KEYS) - CURRENT - EXTENSIONS) == []
    assert sorted(EXTENSIONS - set(KEYS)) == []


def test_every_key_is_typed() -> None:
    assert sorted(set(KEYS) - declared() - set(SPELLED)) == []


def test_every_typed_key_has_a_row() -> None:
    # A block that may be absent as a whole is described by the keys inside it.
    blocks = {path for path in declared() if any(key.startswith((f"{path}.", f"{path}[")) for key in KEYS)}
    assert sorted(declared() - set(KEYS) - blocks) == []


def test_rows_say_what_a_reader_needs() -> None:
    for path, key in KEYS.items():
        assert 10 <= len(key.meaning) <= 120 and key.meaning.endswith("."), path
        assert key.support is not Support.INERT or len(key.note) > 10, f"{path} is inert without a reason"
        assert not key.gate or key.gate in KEYS, f"{path} hangs on {key.gate}, which is no key"


def test_defaults_ask_for_nothing() -> None:
    config = load_config({"train_batch_size": 8}, world_size=4)
    assert support_faults(config) == []
    assert {item.pattern for item in settings(config)} <= set(KEYS) | {"optimizer", "scheduler"} | declared()
