"""Keys of earlier releases: every one is refused with what to use instead, unless it only says that the feature is
off.
"""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from deepspeed.config import DeepSpeedConfigError, load_config
from deepspeed.config.model.spelling import REMOVED_KEYS, REMOVED_OPTIMIZERS, removed_key, removed_parts, says_off
from tests.harness.logs import logged
from tests.harness.rows import for_each

DOCUMENTED = json.loads((Path(__file__).parents[1] / "data" / "config_keys.json").read_text())
# The reference gave these up; here shard groups of this size exist.
KEPT = {"zero_optimization.mics_shard_size", "zero_optimization.mics_hierarchical_params_gather"}
REMOVED = {entry["path"]: entry for entry in DOCUMENTED if entry["status"] == "removed"}
KEPT |= {path for path in REMOVED if path.startswith("elasticity.")}  # and here jobs may change their size
ON: dict[str, Any] = {"bool": True, "int": 3, "float": 0.5, "object": {"x": 1}, "list": [1]}
ON |= dict.fromkeys(("string", "path", "enum"), "x")


def document(path: str, value: Any) -> dict[str, Any]:
    """A configuration with ``value`` at ``path``."""
    *blocks, key = path.split(".")
    inner: dict[str, Any] = {key: value}
    for block in reversed(blocks):
        inner = {block: inner}
    if blocks[:1] == ["optimizer"]:
        inner["optimizer"]["type"] = "Adam"
    return {"train_batch_size": 1, **inner}


def message(config: dict[str, Any]) -> str:
    with pytest.raises(DeepSpeedConfigError) as caught:
        load_config(config, world_size=1)
    return str(caught.value)


def test_the_list_is_whole() -> None:
    assert len(REMOVED) == 118
    assert [path for path in REMOVED if removed_key(path) is None and path not in KEPT] == []


@for_each("path", sorted(set(REMOVED) - KEPT))
def test_removed_keys_name_the_replacement(path: str) -> None:
    kind = REMOVED[path]["type"].split("|")[0].partition("[")[0]
    text = message(document(path, ON[kind]))
    said = next(part for part in (path[:cut] for cut in range(len(path), 0, -1)) if f"{part} was removed. " in text)
    advice = text.partition(f"{said} was removed. ")[2]
    nearest = max((key for key in REMOVED_KEYS if f"{path}.".startswith(f"{key}.")), key=len)
    assert advice.startswith(REMOVED_KEYS[nearest])
    assert advice.split()[0] in ("Use", "Delete", "Drop", "Quantize", "Prune", "Build")


@for_each("path", sorted(REMOVED_KEYS))
def test_every_piece_of_advice_is_about_a_documented_key(path: str) -> None:
    assert any(f"{other}.".startswith(f"{path}.") for other in REMOVED) or path == "zero_optimization.legacy_stage1"
    assert not REMOVED_KEYS[path].endswith(".") and len(REMOVED_KEYS[path]) > 15


@pytest.mark.parametrize("name", ["OneBitAdam", "ZeroOneAdam", "OneBitLamb"])
def test_removed_optimizers(name: str) -> None:
    text = message({"train_batch_size": 1, "optimizer": {"type": name, "params": {"freeze_step": 3, "lr": 0.1}}})
    assert f"Use {REMOVED_OPTIMIZERS[name.lower()]!r}." in text and "optimizer.params.freeze_step was removed" in text


QUANTIZATION = {"shared_parameters": {"enabled": False}, "different_groups": {"g": {"modules": ["*"]}}}
OFF = [
    ("amp", {"enabled": False}),
    ("amp", {"enabled": False, "opt_level": "O1"}),
    ("amp", {}),
    ("sparse_gradients", False),
    ("curriculum_learning", {"enabled": False}),
    ("compression_training", {"layer_reduction": {"enabled": False}}),
    ("compression_training", {"weight_quantization": QUANTIZATION}),
    ("quantize_training", {}),
]


@for_each(("key", "value"), OFF)
def test_what_says_off_is_only_mentioned(key: str, value: Any) -> None:
    with logged(logging.WARNING) as lines:
        load_config({"train_batch_size": 1, key: value}, world_size=1)
        load_config({"train_batch_size": 1, key: None}, world_size=1)
    assert lines == [f"{removed_key(key)} It only says that the feature is off here."]


@for_each(
    "value",
    [True, 0, 1, "auto", [], {"enabled": True}, {"enabled": "auto"}, {"opt_level": "O1"}, {"a": {"enabled": True}}],
)
def test_what_is_not_off(value: Any) -> None:
    assert not says_off(value)


def test_each_technique_has_its_own_line(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    on = '{"shared_parameters": {"enabled": true}}'
    head = '{"train_batch_size": 1,\n"compression_training": {'
    path.write_text(f'{head}\n"row_pruning": {on},\n"weight_quantization": {on},\n"head_pruning": {{}}}}}}')
    with pytest.raises(DeepSpeedConfigError) as caught:
        load_config(path, world_size=1)
    first, second = caught.value.faults
    assert "row_pruning was removed. Prune" in first and first.endswith("(line 3)")
    assert "weight_quantization was removed. Quantize with the torchao library" in second
    assert second.endswith("(line 4)")


def test_parts() -> None:
    assert removed_parts("compression_training", {"unheard_of": 1}) == ["compression_training"]
    assert removed_key("zero_optimization.stage") is None and removed_key("train_batch_size") is None
