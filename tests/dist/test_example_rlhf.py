"""examples/rlhf_four_engines.py raises the reward on two ranks, whole and layer by layer, and refuses bad input."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = ("--steps", "18", "--warm-up", "40", "--width", "32", "--context", "24", "--prompt", "8")
pytestmark = pytest.mark.timeout(240)


def _run(*options: str, ranks: int = 2) -> tuple[int, str]:
    started = ("bin/deepspeed", "--num_gpus", str(ranks)) if ranks > 1 else ()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [sys.executable, *started, "examples/rlhf_four_engines.py", *options],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def _raised(folder: Path, *options: str) -> float:
    """By how much the reward has risen, from the first to the last sixth of the steps."""
    status, output = _run(*SMALL, "--out", str(folder), *options)
    assert status == 0, output[-6000:]
    found = re.search(r"reward (-?[\d.]+) -> (-?[\d.]+) in 18 steps, share that the judge likes ([\d.]+)", output)
    assert found, output[-4000:]
    assert (folder / "rlhf_four_engines.png").stat().st_size > 1000
    return float(found[2]) - float(found[1])


@pytest.mark.exhaustive  # two minutes on a busy machine; what it stands on is tested by itself
def test_the_reward_rises(tmp_path: Path) -> None:
    assert _raised(tmp_path) > 0.2


@pytest.mark.exhaustive  # the same with a gather for every layer and token
def test_the_reward_rises_layer_by_layer(tmp_path: Path) -> None:
    assert _raised(tmp_path, "--layer-by-layer") > 0.2


@pytest.mark.parametrize(
    ("option", "value", "sentence"),
    [
        ("--prompt", "48", "--prompt 48 must be between 1 and --context 48"),
        pytest.param("--out", "a file", "a file is no folder", marks=pytest.mark.exhaustive),
        pytest.param("--text", "a file", "the text has 0 bytes; 480 are needed", marks=pytest.mark.exhaustive),
    ],
)
def test_bad_input_is_a_sentence(tmp_path: Path, option: str, value: str, sentence: str) -> None:
    (tmp_path / "a file").touch()
    given = str(tmp_path / value) if value == "a file" else value
    status, output = _run("--out", str(tmp_path), option, given, ranks=1)
    assert status in (1, 2) and "Traceback" not in output, output
    assert sentence in output
