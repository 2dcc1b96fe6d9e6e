"""``ds_simulate`` as people use it: in a process of its own, with files that are right and files that are not."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deepspeed.simulate import cli
from tests.sim.test_matrix import ROOT, pytestmark  # noqa: F401 - the same torch is needed

MODEL = {"model_type": "gpt2", "n_embd": 256, "n_layer": 2, "n_head": 4, "vocab_size": 512, "n_positions": 128}
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "gradient_clipping": 1.0,
}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "model.json").write_text(json.dumps(MODEL))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def run(folder: Path, *options: str, model: str = "model.json", config: str = "config.json") -> Any:
    command = [sys.executable, "-W", "ignore", "-m", "deepspeed.simulate.cli", "--model", model, "--config", config]
    path = f"{ROOT}{os.pathsep}{folder}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    return subprocess.run(
        [*command, *options], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )


def test_report_and_trace(files: Path) -> None:
    ended = run(files, "--gpus", "4", "--rank", "2", "--steps", "3", "--trace", "step.json")
    assert ended.returncode == 0, ended.stderr
    for words in ("rank 2 of 4 on H100", "model states at rest", "exposed transfers", "zero/step.py"):
        assert words in ended.stdout
    rows = json.loads((files / "step.json").read_text())["traceEvents"]
    names = {row["args"]["name"] for row in rows if row["name"] == "thread_name"}
    assert {"program", "compute"} <= names and "communicator of 4 ranks" in names
    spans = [row for row in rows if row["ph"] == "X"]
    assert any(row["name"] == "all_gather" for row in spans)
    assert min(row["ts"] for row in spans) == 0 and all(row["dur"] >= 0 for row in spans)


def test_facts_are_for_programs_and_limits_are_gates(files: Path) -> None:
    ended = run(files, "--json", "--steps", "2", "--max-memory", "1K", "--max-exposed", "0.001%", "--no-sync")
    facts = json.loads(ended.stdout)
    assert facts["parameters"] > 0 and facts["step_seconds"] > 0 and not facts["unordered"]
    assert facts["device_bytes"]["states"] <= facts["device_bytes"]["peak"] <= facts["device_bytes"]["reserved"]
    assert ended.returncode == 1
    for option in ("--max-memory", "--max-exposed", "--no-sync"):
        assert f"ds_simulate: {option}: " in ended.stderr


def test_a_users_model_and_one_that_does_not_fit(files: Path) -> None:
    (files / "mine.py").write_text(
        "import torch\n"
        "def build():\n"
        "    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))\n"
        "    batch = lambda step, micro, rank, world: torch.randn(4, 64)\n"
        "    return model, batch, lambda output, batch: output.square().mean()\n"
    )
    small = {"name": "a thimble", "like": "h100", "constants": {"device_bytes": [1000, "a test"]}}
    (files / "thimble.json").write_text(json.dumps(small))
    ended = run(files, "--steps", "2", "--device", "thimble.json", model="mine:build")
    assert ended.returncode == 2
    assert "DOES NOT FIT" in ended.stdout and "a thimble" in ended.stdout


def test_what_the_configuration_gets_wrong_is_initialize_s_sentence(files: Path) -> None:
    (files / "config.json").write_text(json.dumps(CONFIG | {"zero_optimisation": {}}))
    ended = run(files)
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert "zero_optimisation" in ended.stderr and "zero_optimization" in ended.stderr


WRONG = {
    "no config file": (["--config", "nowhere.json"], "nowhere.json is no configuration"),
    "no model file": (["--model", "nowhere.json"], "nowhere.json is no Hugging Face configuration"),
    "no such module": (["--model", "nowhere:build"], "cannot import 'nowhere'"),
    "no function": (["--model", "nowhere"], "write it as module:function"),
    "no decoder": (["--model", "config.json"], "describes no decoder: hidden_size, num_hidden_layers"),
    "device": (["--device", "h1000"], "no machine 'h1000': there are .*h100"),
    "rank": (["--rank", "8"], "--rank 8 is not one of 8 ranks, 0 to 7"),
    "a long sequence": (["--sequence", "4096"], "128 positions, fewer than the sequence of 4096"),
    "an open batch": (["--config", "auto.json"], "leaves the batch size to a trainer"),
    "a list": (["--config", "list.json"], "holds no object"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_a_sentence(
    files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(files)
    (files / "auto.json").write_text(json.dumps(CONFIG | {"train_micro_batch_size_per_gpu": "auto"}))
    (files / "list.json").write_text("[]")
    options, expected = WRONG[name]
    given = {"--model": "model.json", "--config": "config.json"} | dict(zip(options[::2], options[1::2], strict=True))
    assert cli.main([word for pair in given.items() for word in pair]) == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith("ds_simulate: ") and re.search(expected, stderr), stderr


@pytest.mark.parametrize("options", [["--gpus", "0"], ["--max-exposed", "2"], ["--max-exposed", "many"], []])
def test_wrong_options_are_the_parser_s(files: Path, options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(options and ["--model", "m.json", "--config", "c.json", *options])
    assert ended.value.code == 2 and "usage: ds_simulate" in capsys.readouterr().err
