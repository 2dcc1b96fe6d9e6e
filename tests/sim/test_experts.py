"""``ds_simulate`` and ``ds_plan`` of experts from a config.json: sizes, bytes of exchanges, the premise."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.harness.commands import Ended, run_all

WIDTH, EXPERT, EXPERTS, BLOCKS, WORDS, TOKENS, WORLD = 256, 512, 8, 2, 512, 128, 16
MODEL = {
    "model_type": "mixtral", "hidden_size": WIDTH, "intermediate_size": EXPERT, "num_hidden_layers": BLOCKS,
    "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": WORDS, "max_position_embeddings": TOKENS,
    "num_local_experts": EXPERTS, "num_experts_per_tok": 2,
}  # fmt: skip
OF_EXPERTS = BLOCKS * EXPERTS * 3 * WIDTH * EXPERT
DENSE = BLOCKS * (4 * WIDTH**2 + WIDTH * EXPERTS + 2 * WIDTH) + 2 * WORDS * WIDTH + WIDTH
COMMANDS = {
    "even": ["--steps", "1", "--json", "--trace", "even.json"],
    "skewed": ["--steps", "1", "--skew", "2", "--json", "--trace", "skewed.json"],
    "premise": ["--steps", "1"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
    config |= {"optimizer": {"type": "AdamW"}, "expert_parallel": {"enabled": True, "autoep_size": EXPERTS}}
    (folder / "model.json").write_text(json.dumps(MODEL))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


GIVEN = ["--model", "model.json", "--config", "config.json", "--gpus", str(WORLD)]


@pytest.fixture(scope="module")
def ended(folder: Path) -> dict[str, Ended]:
    return run_all({name: GIVEN + options for name, options in COMMANDS.items()}, folder)


def _exchanges(folder: Path, name: str) -> list[float]:
    rows = json.loads((folder / f"{name}.json").read_text())["traceEvents"]
    return [row["dur"] for row in rows if row["ph"] == "X" and row["name"] == "all_to_all"]


def test_a_step_exchanges_tokens_and_says_what_it_assumes(ended: dict[str, Ended], folder: Path) -> None:
    facts = json.loads(ended["even"].stdout)
    assert facts["parameters"] == DENSE + OF_EXPERTS and not facts["unordered"]
    # counts, tokens, weights, numbers of experts, the way back; in the backward three of these
    assert len(_exchanges(folder, "even")) == BLOCKS * (5 + 3)
    assert "the experts of a rank get 1 times an even share of the tokens" in ended["premise"].stdout


def test_a_rank_whose_experts_get_more_tokens_takes_longer(ended: dict[str, Ended], folder: Path) -> None:
    even, skewed = (json.loads(ended[name].stdout) for name in ("even", "skewed"))
    assert sum(_exchanges(folder, "skewed")) > sum(_exchanges(folder, "even"))
    assert skewed["device_bytes"]["peak"] > even["device_bytes"]["peak"]


def test_a_plan_counts_this_rank_s_experts_and_an_exchange(folder: Path) -> None:
    done = run_all({"plan": [*GIVEN, "--json"]}, folder, module="deepspeed.tools.simulate.plan.cli")["plan"]
    facts: dict[str, Any] = json.loads(done.stdout)
    held = DENSE + OF_EXPERTS / EXPERTS
    assert facts["bytes"]["parameters"]["device"] == pytest.approx(2 * held, rel=1e-2)
    assert facts["bytes"]["optimizer state"]["device"] == pytest.approx(12 * (DENSE + OF_EXPERTS) / WORLD, rel=1e-2)
    assert facts["exchange_bytes_per_token"] == (2 * 2 + 2) * WIDTH * 2
