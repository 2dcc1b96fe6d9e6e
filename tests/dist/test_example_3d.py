"""examples/train_3d.py: the GPT of the main job in pipeline stages and in parts of layers has the curve of one process;
two stages need less memory than one.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness.pool import RankPool

ROOT = Path(__file__).parents[2]
STEPS = 4
pytestmark = pytest.mark.timeout(180)


def _call(name: str, *args: Any) -> Any:
    """A function of the example, with its small sizes, on this rank."""
    sys.path.insert(0, str(ROOT / "examples"))
    from gpt import GPTConfig
    from train_3d import peak_memory, train

    if name == "memory":
        return peak_memory(*args, GPTConfig(256, 32, 256, 6, 4))
    return train(name, GPTConfig(256, 32, 48, 2, 4), STEPS)


@pytest.fixture(scope="module")
def alone(pool1: RankPool) -> list[float]:
    """The curve of one process."""
    return [float(loss) for loss in pool1.run(_call, "one process")[0]]


@pytest.mark.exhaustive  # such layouts train as one process in test_three_axes.py
@pytest.mark.parametrize("layout", ["pp2 x dp2", "tp2 x dp2"])
def test_four_ranks_in_stages_or_in_parts_have_the_curve_of_one_process(
    pool4: RankPool, alone: list[float], layout: str
) -> None:
    curves = pool4.run(_call, layout)
    assert curves == [curves[0]] * 4  # the loss of the whole batch, on every rank
    assert len(curves[0]) == STEPS and 5.0 < curves[0][0] < 6.5
    assert max(abs(a - b) for a, b in zip(curves[0], alone, strict=True)) < 5e-6


@pytest.mark.exhaustive  # the command starts fourteen processes
def test_the_example_draws_the_curves_and_two_stages_need_at_most_six_tenths_of_the_memory(tmp_path: Path) -> None:
    sizes = ("--steps", "2", "--layers", "2", "--width", "48", "--heads", "4", "--context", "32")
    done = subprocess.run(
        [sys.executable, "examples/train_3d.py", *sizes, "--out", str(tmp_path)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=170, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert (tmp_path / "train_3d.png").stat().st_size > 1000
    ratios = [
        float(line.rpartition("(")[2].rstrip("x)")) for line in done.stdout.splitlines() if "of two stages" in line
    ]
    assert len(ratios) == 2
    assert max(ratios) <= 0.6
