"""The main job runs from its command line, and every ZeRO level gives the same curve; launcher and plain python
agree.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STEPS = 4
# The sizes change no line that runs; with those of the example, the arithmetic would take most of the time.
SMALL = ("--layers", "2", "--width", "48", "--heads", "4", "--context", "32")
LAUNCHER = (sys.executable, "bin/deepspeed", "--num_gpus", "2")
pytestmark = pytest.mark.timeout(180)


def _job(command: tuple[str, ...], level: int, out: Path, python_path: str, *more: str) -> str:
    """What the job prints; it must succeed."""
    job = [
        *command,
        "examples/train_gpt.py",
        "--deepspeed",
        "--deepspeed_config",
        f"examples/configs/zero{level}.json",
        "--steps",
        str(STEPS),
        "--sample-bytes",
        "8",
        "--out",
        str(out),
        *SMALL,
        *more,
    ]
    env = {**os.environ, "PYTHONPATH": python_path, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(job, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def _run(command: tuple[str, ...], level: int, out: Path, *more: str) -> list[float]:
    _job(command, level, out, str(ROOT), *more)
    assert (out / f"loss_zero{level}.png").stat().st_size > 1000
    record = json.loads((out / f"loss_zero{level}.json").read_text())
    return [float(v) for v in record["train"]]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The curve of two ranks under level 3, without an interruption."""
    return _run(LAUNCHER, 3, tmp_path_factory.mktemp("straight"))


@pytest.mark.exhaustive
def test_an_interrupted_run_goes_on_to_the_same_curve_on_other_ranks_and_another_level(
    tmp_path: Path, straight: list[float]
) -> None:
    save = ("--save", str(tmp_path / "ckpt"), "--eval-interval", "2")
    _run(LAUNCHER, 3, tmp_path / "first", *save, "--steps", "2")
    assert _run(LAUNCHER, 3, tmp_path / "second", *save) == straight
    (tmp_path / "ckpt" / "latest").write_text("global_step2")
    alone = _run((sys.executable,), 2, tmp_path / "alone", *save)
    assert max(abs(a - b) for a, b in zip(alone, straight, strict=True)) < 5e-6


@pytest.mark.exhaustive
def test_every_level_gives_the_same_curve_and_two_ranks_equal_one(tmp_path: Path, straight: list[float]) -> None:
    curves = {3: straight, **{level: _run(LAUNCHER, level, tmp_path / str(level)) for level in (0, 2)}}
    curves[-1] = _run((sys.executable,), 3, tmp_path / "alone")
    assert all(len(curve) == STEPS for curve in curves.values())
    assert 5.0 < curves[0][0] < 6.5
    for curve in curves.values():
        assert max(abs(a - b) for a, b in zip(curve, curves[0], strict=True)) < 5e-6


def test_without_matplotlib_only_the_plot_is_missing(tmp_path: Path) -> None:
    (tmp_path / "matplotlib.py").write_text("raise ModuleNotFoundError(\"No module named 'matplotlib'\")\n")
    out = tmp_path / "out"
    text = _job((sys.executable,), 0, out, f"{tmp_path}{os.pathsep}{ROOT}")
    assert "no plot of the loss: No module named 'matplotlib'" in text
    assert sorted(path.name for path in out.iterdir()) == ["loss_zero0.json", "sample_zero0.txt"]
