"""``ds_simulate`` and ``ds_plan`` of sequences that ranks share, from a config.json: sizes, exchanges, the premise."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.harness.commands import Ended, run_all

WIDTH, HEADS, KEYS, BLOCKS, TOKENS, WORLD = 256, 8, 4, 2, 4096, 8
MODEL = {
    "model_type": "llama", "hidden_size": WIDTH, "intermediate_size": 512, "num_hidden_layers": BLOCKS,
    "num_attention_heads": HEADS, "num_key_value_heads": KEYS, "vocab_size": 512, "max_position_embeddings": TOKENS,
}  # fmt: skip
WAYS = {"heads": "ulysses", "ring": "ring"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sequences")
    (folder / "model.json").write_text(json.dumps(MODEL))
    for name, attention in WAYS.items():
        config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "optimizer": {"type": "AdamW"}}
        config |= {"sequence_parallel_size": WORLD, "sequence": {"attention": attention}}
        (folder / f"{name}-config.json").write_text(json.dumps(config))
    return folder


def _given(name: str) -> list[str]:
    return ["--model", "model.json", "--config", f"{name}-config.json", "--gpus", str(WORLD)]


@pytest.fixture(scope="module")
def ended(folder: Path) -> dict[str, Ended]:
    step = ["--sequence", str(TOKENS), "--steps", "1", "--json"]
    lines = {name: [*_given(name), *step, "--trace", f"{name}.json"] for name in WAYS}
    lines["last"] = [*_given("ring"), *step, "--rank", str(WORLD - 1)]
    return run_all(lines, folder)


def _spans(folder: Path, name: str) -> list[str]:
    rows = json.loads((folder / f"{name}.json").read_text())["traceEvents"]
    return [row["name"] for row in rows if row["ph"] == "X"]


def test_heads_go_to_ranks_and_back_and_keys_go_around(ended: dict[str, Ended], folder: Path) -> None:
    heads, ring = (json.loads(ended[name].stdout) for name in WAYS)
    assert not heads["unordered"] and not ring["unordered"]
    assert _spans(folder, "heads").count("all_to_all") == BLOCKS * 2 * 2
    # keys in the forward; in the backward these, and their gradients, which come home
    assert _spans(folder, "ring").count("send") == BLOCKS * (2 * (WORLD - 1) + WORLD)


def test_the_last_rank_of_a_ring_computes_most(ended: dict[str, Ended], folder: Path) -> None:
    first, last = (json.loads(ended[name].stdout) for name in ("ring", "last"))
    assert f"attends to 1; all wait for the last (--rank {WORLD - 1})" in first["routing"]
    assert last["routing"].endswith(f"attends to {WORLD}") and last["step_seconds"] > first["step_seconds"]
    assert _spans(folder, "ring").count("_scaled_dot_product_flash_attention") == BLOCKS


def test_a_plan_counts_inputs_of_blocks_and_the_axis(folder: Path) -> None:
    done = run_all({"plan": [*_given("ring"), "--json"]}, folder, module="deepspeed.tools.simulate.plan.cli")["plan"]
    facts: dict[str, Any] = json.loads(done.stdout)
    assert facts["block_input_bytes_per_token"] == BLOCKS * WIDTH * 2 and facts["sequence_ranks"] == WORLD
    # of the job, whose ranks share each sequence, and of the ring
    assert [what for what in facts["bytes"] if what.startswith("communicators: 2")]
