"""The examples with clients run from their command lines on two ranks: the loss falls, the plot and the weights are
there, and bad input is a sentence.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compat.common import need

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(240)
PACKAGES = {
    "finetune_hf_trainer": ("transformers", "accelerate"),
    "moe_finetune": ("transformers",),
    "long_context": ("transformers",),
    "finetune_accelerate": ("transformers", "accelerate"),
    "lora_zero3": ("transformers", "accelerate", "peft"),
    "lightning_fit": ("lightning",),
}
WRITTEN = {
    "finetune_hf_trainer": "model.safetensors",
    "moe_finetune": "pytorch_model.bin",
    "long_context": "pytorch_model.bin",
    "finetune_accelerate": "model.safetensors",
    "lora_zero3": "adapter_model.safetensors",
    "lightning_fit": "lightning.ckpt/latest",
}
SMALL = ("--steps", "6", "--batch", "2", "--context", "32")


def run(example: str, *options: str, ranks: int = 2) -> tuple[int, str]:
    """Status and output of an example, started as the page of clients says."""
    started = ("-m", "deepspeed.launcher.runner", "--num_gpus", str(ranks)) if ranks > 1 else ()
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    environment |= {"DS_ACCELERATOR": "cpu", "DS_LOG_LEVEL": "INFO"}
    command = [sys.executable, *started, f"examples/{example}.py", *options]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False)
    return done.returncode, done.stdout + done.stderr


def losses(output: str) -> tuple[float, float, float]:
    """First, last and held-out loss of the line that every example ends with."""
    found = re.search(r"loss ([\d.]+) -> ([\d.]+) in \d+ steps, held out ([\d.]+)", output)
    assert found, output[-4000:]
    return float(found[1]), float(found[2]), float(found[3])


def needs(example: str) -> None:
    missing = [name for name in PACKAGES[example] if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{missing[0]} is not installed (see tests/compat/README.md)")
    need(*PACKAGES[example])


@pytest.mark.parametrize(
    ("example", "stage"),
    [
        ("finetune_hf_trainer", 3),
        ("moe_finetune", 3),
        ("long_context", 3),
        ("finetune_accelerate", 2),
        ("lora_zero3", 3),
        ("lightning_fit", 3),
    ],
)
@pytest.mark.parametrize("ranks", [2])
def test_example_trains_and_writes_weights_and_plot(example: str, stage: int, ranks: int, tmp_path: Path) -> None:
    needs(example)
    staged = () if example == "lora_zero3" else ("--stage", str(stage))
    status, output = run(example, *SMALL, *staged, "--out", str(tmp_path), ranks=ranks)
    assert status == 0, output[-6000:]
    first, last, held_out = losses(output)
    assert 4.5 < first < 7 and last < first and held_out < first
    drawn = importlib.util.find_spec("matplotlib") is not None
    assert (tmp_path / f"{example}.png").stat().st_size > 1000 if drawn else "no plot of the loss" in output
    assert (tmp_path / WRITTEN[example]).stat().st_size > 0
    sharded = re.search(r"parameters in [\d,]+ units?(?: \((\d+) sharded)?", output)
    if example in ("lora_zero3", "finetune_accelerate"):  # others mute the log; stage 3 shards the tiny model
        assert sharded and (int(sharded[1] or 0) > 0) == (stage == 3), output[-6000:]


def test_one_example_goes_on_from_the_weights_of_another(tmp_path: Path) -> None:
    needs("lora_zero3")
    status, output = run("finetune_hf_trainer", *SMALL, "--stage", "2", "--out", str(tmp_path / "base"))
    assert status == 0, output[-6000:]
    text = tmp_path / "own.txt"
    text.write_text("one line of a text of my own\n" * 200)
    model = ("--model", str(tmp_path / "base"), "--text", str(text), "--recompute")
    status, again = run("lora_zero3", *SMALL, *model, "--out", str(tmp_path / "adapters"))
    assert status == 0, again[-6000:]
    assert losses(again)[0] < losses(output)[0] - 0.2  # it began where the other stopped
    assert (tmp_path / "adapters" / "adapter_config.json").is_file()


@pytest.mark.parametrize(
    ("example", "options", "sentence"),
    [
        ("finetune_hf_trainer", ("--steps", "0"), "--steps 0 must be at least 1"),
        ("finetune_accelerate", ("--model", "nowhere"), "--model nowhere holds no config.json"),
        ("lora_zero3", ("--text", "nowhere.txt"), "--text nowhere.txt is no file"),
        ("lightning_fit", ("--context", "100000000"), "1 rows of 100000001|0 rows of 100000001"),
    ],
)
def test_bad_input_is_a_sentence(example: str, options: tuple[str, ...], sentence: str, tmp_path: Path) -> None:
    needs(example)
    status, output = run(example, *options, "--out", str(tmp_path), ranks=1)
    assert status != 0 and re.search(sentence, output) and "Traceback" not in output, output[-3000:]
