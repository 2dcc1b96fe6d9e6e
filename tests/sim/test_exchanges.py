"""``ds_simulate`` and ``ds_plan`` of what ranks exchange, from a config.json: tokens of experts, heads and keys of
sequences; sizes, bytes, the premise.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.harness.commands import Ended, run_all

WIDTH, INNER, EXPERTS, HEADS, BLOCKS, WORDS = 256, 512, 8, 8, 2, 512
EXPERT_WORLD, RING = 16, 8  # ranks
TOKENS = {"mixtral": 128, "llama": 4096}
SIZES = {"hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": BLOCKS, "vocab_size": WORDS}
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {
        "num_attention_heads": 4, "num_key_value_heads": 4, "num_local_experts": EXPERTS, "num_experts_per_tok": 2,
    },
    "llama": {"num_attention_heads": HEADS, "num_key_value_heads": 4},
}  # fmt: skip
OF_EXPERTS = BLOCKS * EXPERTS * 3 * WIDTH * INNER
DENSE = BLOCKS * (4 * WIDTH**2 + WIDTH * EXPERTS + 2 * WIDTH) + 2 * WORDS * WIDTH + WIDTH
CONFIG = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "optimizer": {"type": "AdamW"}}
SEQUENCES = CONFIG | {"sequence_parallel_size": RING}
CONFIGS: dict[str, dict[str, Any]] = {
    "experts": CONFIG
    | {"zero_optimization": {"stage": 1}, "expert_parallel": {"enabled": True, "autoep_size": EXPERTS}},
    "heads": SEQUENCES | {"sequence": {"attention": "ulysses"}},
    "ring": SEQUENCES | {"sequence": {"attention": "ring"}},
}


def _given(tool: str, model: str, config: str, world: int, *options: str) -> list[str]:
    files = ["--model", f"{model}.json", "--config", f"{config}-config.json"]
    return [tool, *files, "--gpus", str(world), *options]


def _experts(tool: str, *options: str) -> list[str]:
    return _given(tool, "mixtral", "experts", EXPERT_WORLD, *options)


def _sequences(config: str, *options: str) -> list[str]:
    step = ["--sequence", str(TOKENS["llama"]), "--steps", "1", "--json"]
    return _given("simulate", "llama", config, RING, *step, *options)


COMMANDS = {
    "even": _experts("simulate", "--steps", "1", "--json", "--trace", "even.json"),
    "skewed": _experts("simulate", "--steps", "1", "--skew", "2", "--json", "--trace", "skewed.json"),
    "premise": _experts("simulate", "--steps", "1"),
    "plan of experts": _experts("simulate.plan", "--json"),
    "heads": _sequences("heads", "--trace", "heads.json"),
    "ring": _sequences("ring", "--trace", "ring.json"),
    "last of the ring": _sequences("ring", "--rank", str(RING - 1)),
    "plan of the ring": _given("simulate.plan", "llama", "ring", RING, "--json"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exchanges")
    for kind, sizes in MODELS.items():
        model = SIZES | sizes | {"model_type": kind, "max_position_embeddings": TOKENS[kind]}
        (folder / f"{kind}.json").write_text(json.dumps(model))
    for name, config in CONFIGS.items():
        (folder / f"{name}-config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def ended(folder: Path) -> dict[str, Ended]:
    return run_all(COMMANDS, folder)


@pytest.fixture(scope="module")
def facts(ended: dict[str, Ended]) -> dict[str, dict[str, Any]]:
    return {name: json.loads(ended[name].stdout) for name in COMMANDS if name != "premise"}


def _spans(folder: Path, name: str) -> list[tuple[str, float]]:
    rows = json.loads((folder / f"{name}.json").read_text())["traceEvents"]
    return [(row["name"], row["dur"]) for row in rows if row["ph"] == "X"]


def _exchanges(folder: Path, name: str) -> list[float]:
    return [seconds for what, seconds in _spans(folder, name) if what == "all_to_all"]


def test_a_step_exchanges_tokens_and_says_what_it_assumes(
    ended: dict[str, Ended], facts: dict[str, Any], folder: Path
) -> None:
    assert facts["even"]["parameters"] == DENSE + OF_EXPERTS and not facts["even"]["unordered"]
    # counts, tokens, weights, numbers of experts, the way back; in the backward three of these
    assert len(_exchanges(folder, "even")) == BLOCKS * (5 + 3)
    assert "the experts of a rank get 1 times an even share of the tokens" in ended["premise"].stdout


def test_a_rank_whose_experts_get_more_tokens_takes_longer(facts: dict[str, Any], folder: Path) -> None:
    assert sum(_exchanges(folder, "skewed")) > sum(_exchanges(folder, "even"))
    assert facts["skewed"]["device_bytes"]["peak"] > facts["even"]["device_bytes"]["peak"]


def test_a_plan_counts_this_rank_s_experts_and_an_exchange(facts: dict[str, Any]) -> None:
    plan, held = facts["plan of experts"], DENSE + OF_EXPERTS / EXPERTS
    assert plan["bytes"]["parameters"]["device"] == pytest.approx(2 * held, rel=1e-2)
    optimizer = 12 * (DENSE + OF_EXPERTS) / EXPERT_WORLD
    assert plan["bytes"]["optimizer state"]["device"] == pytest.approx(optimizer, rel=1e-2)
    assert plan["exchange_bytes_per_token"] == (2 * 2 + 2) * WIDTH * 2


def test_heads_go_to_ranks_and_back_and_keys_go_around(facts: dict[str, Any], folder: Path) -> None:
    assert not facts["heads"]["unordered"] and not facts["ring"]["unordered"]
    assert len(_exchanges(folder, "heads")) == BLOCKS * 2 * 2
    # keys in the forward; in the backward these, and their gradients, which come home
    sent = [what for what, _ in _spans(folder, "ring") if what == "send"]
    assert len(sent) == BLOCKS * (2 * (RING - 1) + RING)


def test_all_ranks_of_a_ring_compute_as_much(facts: dict[str, Any], folder: Path) -> None:
    first, last = facts["ring"], facts["last of the ring"]
    assert last["step_seconds"] == pytest.approx(first["step_seconds"], rel=1e-3)
    kernels = [what for what, _ in _spans(folder, "ring") if what == "_scaled_dot_product_flash_attention"]
    # two blocks a turn, of a quarter of a part's tokens squared, and one more of the rank's end and its own front
    assert len(kernels) == BLOCKS * (2 * RING + 1)


def test_a_plan_counts_inputs_of_blocks_and_the_axis(facts: dict[str, Any]) -> None:
    plan = facts["plan of the ring"]
    assert plan["block_input_bytes_per_token"] == BLOCKS * WIDTH * 2 and plan["sequence_ranks"] == RING
    # of the job, whose ranks share each sequence, and of the ring
    assert [what for what in plan["bytes"] if what.startswith("communicators: 2")]
