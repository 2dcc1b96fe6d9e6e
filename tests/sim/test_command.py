"""``ds_simulate`` as people use it: in a process of its own, with files that are right and files that are not.

And with ``ds_plan``, of what ranks exchange: tokens of experts, heads and keys of sequences; sizes, bytes, the premise.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from deepspeed.tools.simulate import cli
from tests.harness.commands import Ended, run_all

MODEL = {"model_type": "gpt2", "n_embd": 256, "n_layer": 2, "n_head": 4, "vocab_size": 512, "n_positions": 128}
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "gradient_clipping": 1.0,
}


THEIRS = """
import torch
def build():
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    batch = lambda step, micro, rank, world: torch.randn(4, 64)
    return model, batch, lambda output, batch: output.square().mean()
"""
THIMBLE = {"name": "a thimble", "like": "h100", "constants": {"device_bytes": [1000, "a test"]}}
LIMITS = ["--max-memory", "1K", "--max-exposed", "0.001%", "--no-sync"]
COMMANDS: dict[str, list[str]] = {
    "report": ["--config", "scaled.json", "--gpus", "4", "--rank", "2", "--steps", "2", "--trace", "step.json"],
    "facts": ["--config", "scaled.json", "--json", "--steps", "2", *LIMITS],
    "a model of theirs": ["--model", "mine:build", "--steps", "1", "--device", "thimble.json"],
    "a wrong key": ["--config", "wrong.json"],
    "over nodes": ["--steps", "1", "--config", "offload.json", "--gpus", "64", "--device", "host.json"],
    "facts that do not fit": ["--json", "--steps", "1", "--device", "thimble.json"],
    "stages": ["--config", "stages.json", "--steps", "2", "--trace", "stages_step.json"],
    "halves": ["--config", "halves.json", "--steps", "1", "--gpus", "2", "--json"],
    "more stages than blocks": ["--config", "many.json", "--steps", "1", "--gpus", "16"],
    "stages that do not divide": ["--config", "stages.json", "--gpus", "7"],
    "as measured here": ["--steps", "2", "--gpus", "1", "--device", "measured.json"],
}
HALVES = {"gradient_accumulation_steps": 2, "pipeline": {"stages": 2}}
STAGES = {"gradient_accumulation_steps": 4, "tensor_parallel": {"autotp_size": 2}, "pipeline": {"stages": 2}}
SCALED = {
    "bf16": {"enabled": False},
    "fp16": {"enabled": True},
}  # the scale goes on behind an update, so the program waits
OFFLOAD = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
HOST = {"name": "small nodes", "like": "h100", "constants": {"host_bytes": [30_000_000, "a test"]}}
# What a calibration of a CPU writes, in short.
MEASURED = {"name": "a host", "like": "h100", "device": "cpu", "constants": {"launch_s": [0.001, "a test"]}}


# --- what ranks exchange ---

WIDTH, INNER, EXPERTS, HEADS, BLOCKS, WORDS = 256, 512, 8, 8, 2, 512
EXPERT_WORLD, RING = 16, 8  # ranks
TOKENS = {"mixtral": 128, "llama": 4096}
SIZES = {"hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": BLOCKS, "vocab_size": WORDS}
EXCHANGING: dict[str, dict[str, Any]] = {
    "mixtral": {
        "num_attention_heads": 4, "num_key_value_heads": 4, "num_local_experts": EXPERTS, "num_experts_per_tok": 2,
    },
    "llama": {"num_attention_heads": HEADS, "num_key_value_heads": 4},
}  # fmt: skip
OF_EXPERTS = BLOCKS * EXPERTS * 3 * WIDTH * INNER
DENSE = BLOCKS * (4 * WIDTH**2 + WIDTH * EXPERTS + 2 * WIDTH) + 2 * WORDS * WIDTH + WIDTH
PLAIN = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "optimizer": {"type": "AdamW"}}
SEQUENCES = PLAIN | {"sequence_parallel_size": RING}
EXCHANGE_CONFIGS: dict[str, dict[str, Any]] = {
    "experts": PLAIN
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


EXCHANGES = {
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
    """Where the commands run, with their files."""
    folder = tmp_path_factory.mktemp("command")
    files = {"model": MODEL, "config": CONFIG, "wrong": CONFIG | {"zero_optimisation": {}}, "thimble": THIMBLE}
    files |= {
        "scaled": CONFIG | SCALED,
        "measured": MEASURED,
        "host": HOST,
        "offload": CONFIG | {"zero_optimization": OFFLOAD},
    }
    files |= {"halves": CONFIG | HALVES | {"zero_optimization": {"stage": 1}}}
    files |= {"stages": CONFIG | STAGES, "many": CONFIG | STAGES | {"pipeline": {"stages": 4}}}
    for kind, sizes in EXCHANGING.items():
        files[kind] = SIZES | sizes | {"model_type": kind, "max_position_embeddings": TOKENS[kind]}
    files |= {f"{name}-config": config for name, config in EXCHANGE_CONFIGS.items()}
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    (folder / "mine.py").write_text(THEIRS)
    return folder


@pytest.fixture(scope="module")
def ended(folder: Path) -> dict[str, Ended]:
    """How each of the commands ended."""
    given = ["simulate", "--model", "model.json", "--config", "config.json"]  # what comes later counts
    return run_all({name: given + options for name, options in COMMANDS.items()} | EXCHANGES, folder)


@pytest.fixture(scope="module")
def found(ended: dict[str, Ended]) -> dict[str, dict[str, Any]]:
    """Facts of what ranks exchange."""
    return {name: json.loads(ended[name].stdout) for name in EXCHANGES if name != "premise"}


def test_report_and_trace(ended: dict[str, Ended], folder: Path) -> None:
    report = ended["report"]
    assert report.code == 0 and "WARNING" not in report.stderr, report.stderr  # no value of a simulation is looked at
    for words in ("rank 2 of 4 on H100", "model states at rest", "exposed transfers", "zero/step.py"):
        assert words in report.stdout
    rows = json.loads((folder / "step.json").read_text())["traceEvents"]
    names = {row["args"]["name"] for row in rows if row["name"] == "thread_name"}
    assert {"program", "compute"} <= names and "communicator of 4 ranks" in names
    spans = [row for row in rows if row["ph"] == "X"]
    assert any(row["name"] == "all_gather" for row in spans)
    assert min(row["ts"] for row in spans) == 0 and all(row["dur"] >= 0 for row in spans)


def test_what_is_assumed_and_used_is_named(ended: dict[str, Ended]) -> None:
    """A job of one node says nothing of networks, and one without offload nothing of hosts."""
    (line,) = [row for row in ended["report"].stdout.splitlines() if row.startswith("assumed, not measured: ")]
    assert {"kernel_s", "memory_rate", "node_rate"} <= set(line.partition(": ")[2].split(", "))
    assert "network" not in line and "adam_rate" not in line
    facts = json.loads(ended["facts"].stdout)
    assert facts["assumed"]["kernel_s"] == 3e-6 and facts["plain_attention"] == {}
    (line,) = [row for row in ended["stages"].stdout.splitlines() if row.startswith("assumed, not measured: ")]
    assert "node_rate" in line
    offloaded = ended["over nodes"].stdout
    assert "adam_rate" in offloaded and "network_hop_s" in offloaded


def test_facts_are_for_programs_and_limits_are_gates(ended: dict[str, Ended]) -> None:
    facts = json.loads(ended["facts"].stdout)
    assert facts["parameters"] > 0 and facts["step_seconds"] > 0 and not facts["unordered"]
    assert facts["device_bytes"]["states"] <= facts["device_bytes"]["peak"] <= facts["device_bytes"]["reserved"]
    assert ended["facts"].code == 1
    for option in ("--max-memory", "--max-exposed", "--no-sync"):
        assert f"ds_simulate: {option}: " in ended["facts"].stderr


def test_a_users_model_and_one_that_does_not_fit(ended: dict[str, Ended]) -> None:
    theirs = ended["a model of theirs"]
    assert theirs.code == 2, theirs.stderr
    assert "DOES NOT FIT" in theirs.stdout and "a thimble" in theirs.stdout


def test_what_the_configuration_gets_wrong_is_initialize_s_sentence(ended: dict[str, Ended]) -> None:
    wrong = ended["a wrong key"]
    assert wrong.code == 2 and "Traceback" not in wrong.stderr
    assert "zero_optimisation" in wrong.stderr and "zero_optimization" in wrong.stderr


def test_offloaded_states_of_many_nodes_have_the_memory_of_all_of_them(ended: dict[str, Ended]) -> None:
    """8 ranks need less than a host of 30 MB holds, and 64 ranks on one would need more."""
    assert ended["over nodes"].code == 0, ended["over nodes"].stderr


def test_facts_that_do_not_fit_say_so_beside_the_facts(ended: dict[str, Ended]) -> None:
    facts = ended["facts that do not fit"]
    assert facts.code == 2 and json.loads(facts.stdout)["device_bytes"]["reserved"] > 1000
    assert "ds_simulate: the model does not fit: " in facts.stderr and "Traceback" not in facts.stderr


def test_a_measured_cpu_is_a_device(ended: dict[str, Ended]) -> None:
    """Its program does one thing after the other, so that the step is what it launches and what that takes."""
    report = ended["as measured here"]
    assert report.code == 0 and "a host" in report.stdout, report.stderr
    milliseconds = float(re.search(r"^step +([0-9.]+) ms", report.stdout, re.MULTILINE).group(1))  # type: ignore[union-attr]
    assert milliseconds > 100  # some hundred launches


WRONG = {
    "no config file": (["--config", "nowhere.json"], "'nowhere.json' does not exist"),
    "no model file": (["--model", "nowhere.json"], "nowhere.json cannot be read: No such file"),
    "no such module": (["--model", "nowhere:build"], "cannot import 'nowhere'"),
    "no function": (["--model", "nowhere"], "write it as module:function"),
    "no decoder": (["--model", "config.json"], "describes no decoder: hidden_size, num_hidden_layers"),
    "device": (["--device", "h1000"], "no machine 'h1000': there are .*h100"),
    "rank": (["--rank", "8"], "--rank 8 is not one of 8 ranks, 0 to 7"),
    "a trace nowhere": (["--trace", "no/such/folder.json"], "--trace no/such/folder.json: there is no such folder"),
    "a negative batch": (["--config", "minus.json"], "must be greater than or equal to 1, not -3"),
    "a long sequence": (["--sequence", "4096"], "128 positions, fewer than the sequence of 4096"),
    "an open batch": (["--config", "auto.json"], 'is still "auto"'),
    "a trace that is a folder": (["--trace", "."], "--trace .: this is a folder"),
    "a sequence of their own": (
        ["--model", "mine:build", "--sequence", "8"],
        "--sequence and --recompute are for a config.json",
    ),
    "a list": (["--config", "list.json"], "holds a list"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_a_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(folder)
    (folder / "auto.json").write_text(json.dumps(CONFIG | {"train_micro_batch_size_per_gpu": "auto"}))
    (folder / "list.json").write_text("[]")
    (folder / "minus.json").write_text(json.dumps(CONFIG | {"train_micro_batch_size_per_gpu": -3}))
    options, expected = WRONG[name]
    given = {"--model": "model.json", "--config": "config.json"} | dict(zip(options[::2], options[1::2], strict=True))
    assert cli.main([word for pair in given.items() for word in pair]) == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith("ds_simulate: ") and re.search(expected, stderr), stderr


def test_stages_have_a_row_each_in_the_report_and_a_process_in_the_trace(ended: dict[str, Ended], folder: Path) -> None:
    """One rank of each stage, on 2 stages x 2 data-parallel x 2 tensor-parallel ranks."""
    stages = ended["stages"]
    assert stages.code == 0, stages.stderr
    rows = [line.split() for line in stages.stdout.splitlines()]
    assert [row[1] for row in rows if row[:1] in (["0"], ["1"])] == ["0", "4"]  # the ranks
    assert "the bubble is" in stages.stdout
    events = json.loads((folder / "stages_step.json").read_text())["traceEvents"]
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"stage 0", "stage 1"}
    messages = {stage: [e for e in events if e["pid"] == stage and e["name"] in ("send", "recv")] for stage in (0, 1)}
    for name, other in (("send", "recv"), ("recv", "send")):  # both ends at once
        mine = sorted((e["cat"], e["ts"]) for e in messages[0] if e["name"] == name)
        theirs = sorted((e["cat"], e["ts"]) for e in messages[1] if e["name"] == other)
        assert len(mine) == 4 and mine == theirs


def test_tied_weights_of_a_pipeline_are_counted_once(ended: dict[str, Ended]) -> None:
    """The head is the embedding, which the first and the last stage hold."""
    halves = ended["halves"]
    assert halves.code == 0, halves.stderr
    facts, whole = json.loads(halves.stdout), json.loads(ended["facts"].stdout)["parameters"]
    assert facts["parameters"] == sum(stage["parameters"] for stage in facts["stages"]) == whole


def test_what_a_stage_raises_is_the_sentence(ended: dict[str, Ended]) -> None:
    many, odd = ended["more stages than blocks"], ended["stages that do not divide"]
    assert many.code == odd.code == 2 and "Traceback" not in many.stderr + odd.stderr
    assert "2 layers cannot be dealt out to 4 pipeline stages" in many.stderr
    assert "pipeline.stages is 2, which does not divide 7 ranks" in odd.stderr


# --- what ranks exchange ---


def _spans(folder: Path, name: str) -> list[tuple[str, float]]:
    rows = json.loads((folder / f"{name}.json").read_text())["traceEvents"]
    return [(row["name"], row["dur"]) for row in rows if row["ph"] == "X"]


def _exchanges(folder: Path, name: str) -> list[float]:
    return [seconds for what, seconds in _spans(folder, name) if what == "all_to_all"]


def test_a_step_exchanges_tokens_and_says_what_it_assumes(
    ended: dict[str, Ended], found: dict[str, Any], folder: Path
) -> None:
    assert found["even"]["parameters"] == DENSE + OF_EXPERTS and not found["even"]["unordered"]
    # counts, tokens, weights, numbers of experts, the way back; in the backward three of these
    assert len(_exchanges(folder, "even")) == BLOCKS * (5 + 3)
    assert "the experts of a rank get 1 times an even share of the tokens" in ended["premise"].stdout


def test_a_rank_whose_experts_get_more_tokens_takes_longer(found: dict[str, Any], folder: Path) -> None:
    assert sum(_exchanges(folder, "skewed")) > sum(_exchanges(folder, "even"))
    assert found["skewed"]["device_bytes"]["peak"] > found["even"]["device_bytes"]["peak"]


def test_a_plan_counts_this_rank_s_experts_and_an_exchange(found: dict[str, Any]) -> None:
    plan, held = found["plan of experts"], DENSE + OF_EXPERTS / EXPERTS
    assert plan["bytes"]["parameters"]["device"] == pytest.approx(2 * held, rel=1e-2)
    optimizer = 12 * (DENSE + OF_EXPERTS) / EXPERT_WORLD
    assert plan["bytes"]["optimizer state"]["device"] == pytest.approx(optimizer, rel=1e-2)
    assert plan["exchange_bytes_per_token"] == (2 * 2 + 2) * WIDTH * 2


def test_heads_go_to_ranks_and_back_and_keys_go_around(found: dict[str, Any], folder: Path) -> None:
    assert not found["heads"]["unordered"] and not found["ring"]["unordered"]
    assert len(_exchanges(folder, "heads")) == BLOCKS * 2 * 2
    # keys in the forward; in the backward these, and their gradients, which come home
    sent = [what for what, _ in _spans(folder, "ring") if what == "send"]
    assert len(sent) == BLOCKS * (2 * (RING - 1) + RING)


def test_all_ranks_of_a_ring_compute_as_much(found: dict[str, Any], folder: Path) -> None:
    first, last = found["ring"], found["last of the ring"]
    assert last["step_seconds"] == pytest.approx(first["step_seconds"], rel=1e-3)
    kernels = [what for what, _ in _spans(folder, "ring") if what == "_scaled_dot_product_flash_attention"]
    # two blocks a turn, of a quarter of a part's tokens squared, and one more of the rank's end and its own front
    assert len(kernels) == BLOCKS * (2 * RING + 1)


def test_a_plan_counts_inputs_of_blocks_and_the_axis(found: dict[str, Any]) -> None:
    plan = found["plan of the ring"]
    assert plan["block_input_bytes_per_token"] == BLOCKS * WIDTH * 2 and plan["sequence_ranks"] == RING
    # of the job, whose ranks share each sequence, and of the ring
    assert [what for what in plan["bytes"] if what.startswith("communicators: 2")]
