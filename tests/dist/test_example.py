"""The examples that need no client run from their command lines, do what their pages say, and refuse bad input."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness.launched import ROOT, environment
from tests.harness.pool import RankPool
from tests.harness.warm import Warm

pytestmark = pytest.mark.timeout(240)

STEPS = 4
# The sizes change no line that runs; with those of the example, the arithmetic would take most of the time.
SMALL = ("--layers", "2", "--width", "48", "--heads", "4", "--context", "32")


def _ended(
    script: str, *options: str, ranks: int = 1, python: str = sys.executable, limit_s: float = 170, **variables: str
) -> tuple[int, str]:
    """Status and output of an example on so many ranks, of a launcher where there are two."""
    launcher = ("bin/deepspeed", "--num_gpus", str(ranks)) if ranks > 1 else ()
    command = [python, *launcher, f"examples/{script}.py", *options]
    env = environment(OMP_NUM_THREADS="1", **variables)
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=limit_s, check=False)
    return done.returncode, done.stdout + done.stderr


def _output(script: str, *options: str, **how: Any) -> str:
    """What an example says; it must succeed."""
    status, output = _ended(script, *options, **how)
    assert status == 0, output[-6000:]
    return output


def _gpt(level: int, out: Path, *more: str, **how: Any) -> str:
    config = ("--deepspeed", "--deepspeed_config", f"examples/configs/zero{level}.json")
    sizes = ("--steps", str(STEPS), "--sample-bytes", "8", *SMALL)
    return _output("train_gpt", *config, *sizes, "--out", str(out), *more, **how)


def _curve(level: int, out: Path, *more: str, ranks: int = 2) -> list[float]:
    """The losses of a run of the GPT example, which it also draws."""
    _gpt(level, out, *more, ranks=ranks)
    assert (out / f"loss_zero{level}.png").stat().st_size > 1000
    return [float(v) for v in json.loads((out / f"loss_zero{level}.json").read_text())["train"]]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The curve of two ranks under level 3, without an interruption."""
    return _curve(3, tmp_path_factory.mktemp("straight"))


@pytest.mark.exhaustive
def test_an_interrupted_run_goes_on_to_the_same_curve_on_other_ranks_and_another_level(
    tmp_path: Path, straight: list[float]
) -> None:
    save = ("--save", str(tmp_path / "ckpt"), "--eval-interval", "2")
    _curve(3, tmp_path / "first", *save, "--steps", "2")
    assert _curve(3, tmp_path / "second", *save) == straight
    (tmp_path / "ckpt" / "latest").write_text("global_step2")
    alone = _curve(2, tmp_path / "alone", *save, ranks=1)
    assert max(abs(a - b) for a, b in zip(alone, straight, strict=True)) < 5e-6


@pytest.mark.exhaustive
def test_every_level_gives_the_same_curve_and_two_ranks_equal_one(tmp_path: Path, straight: list[float]) -> None:
    curves = {3: straight, **{level: _curve(level, tmp_path / str(level)) for level in (0, 2)}}
    curves[-1] = _curve(3, tmp_path / "alone", ranks=1)
    assert all(len(curve) == STEPS for curve in curves.values())
    assert 5.0 < curves[0][0] < 6.5
    for curve in curves.values():
        assert max(abs(a - b) for a, b in zip(curve, curves[0], strict=True)) < 5e-6


def test_without_matplotlib_only_the_plot_is_missing(tmp_path: Path, warm: Warm) -> None:
    (tmp_path / "matplotlib.py").write_text("raise ModuleNotFoundError(\"No module named 'matplotlib'\")\n")
    out = tmp_path / "out"
    text = _gpt(0, out, python=warm.python, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert "no plot of the loss: No module named 'matplotlib'" in text
    assert sorted(path.name for path in out.iterdir()) == ["loss_zero0.json", "sample_zero0.txt"]


# -- example 3d -----------------------------------------------------------------------------------------------------
def _losses(layout: str) -> Any:
    """The losses of the example with its small sizes, on this rank."""
    sys.path.insert(0, str(ROOT / "examples"))
    from gpt import GPTConfig
    from train_3d import train

    return train(layout, GPTConfig(256, 32, 48, 2, 4), STEPS)


@pytest.fixture(scope="module")
def alone(pool1: RankPool) -> list[float]:
    """The curve of one process."""
    return [float(loss) for loss in pool1.run(_losses, "one process")[0]]


@pytest.mark.exhaustive  # such layouts train as one process in test_three_axes.py
@pytest.mark.parametrize("layout", ["pp2 x dp2", "tp2 x dp2"])
def test_four_ranks_in_stages_or_in_parts_have_the_curve_of_one_process(
    pool4: RankPool, alone: list[float], layout: str
) -> None:
    curves = pool4.run(_losses, layout)
    assert curves == [curves[0]] * 4  # the loss of the whole batch, on every rank
    assert len(curves[0]) == STEPS and 5.0 < curves[0][0] < 6.5
    assert max(abs(a - b) for a, b in zip(curves[0], alone, strict=True)) < 5e-6


@pytest.mark.exhaustive  # the command starts fourteen processes
def test_the_example_draws_the_curves_and_two_stages_need_at_most_six_tenths_of_the_memory(tmp_path: Path) -> None:
    sizes = ("--steps", "2", "--layers", "2", "--width", "48", "--heads", "4", "--context", "32")
    output = _output("train_3d", *sizes, "--out", str(tmp_path))
    assert (tmp_path / "train_3d.png").stat().st_size > 1000
    lines = [line for line in output.splitlines() if "of two stages" in line]
    ratios = [float(line.rpartition("(")[2].rstrip("x)")) for line in lines]
    assert len(ratios) == 2 and max(ratios) <= 0.6


# -- example nvme ---------------------------------------------------------------------------------------------------
SMALL_NVME = ("--steps", "5", "--batch", "2", "--context", "32", "--layers", "2", "--width", "64")


def _trained(folder: Path, *options: str) -> tuple[float, float]:
    """First and last loss of a run, whose plot and weights are in ``folder``."""
    given = (*SMALL_NVME, "--nvme", str(folder), "--out", str(folder), *options)
    output = _output("nvme_finetune", *given, ranks=2, DS_LOG_LEVEL="INFO")  # the memory plan is in the log
    assert re.search(r"optimizer state +- +- +[\d.]+ KiB", output)  # nothing of it in memory
    assert (folder / "nvme_finetune.png").stat().st_size > 1000
    found = re.search(r"loss ([\d.]+) -> ([\d.]+) in 5 steps", output)
    assert found, output[-4000:]
    return float(found[1]), float(found[2])


@pytest.mark.exhaustive
def test_it_trains_from_the_drive(tmp_path: Path) -> None:
    first, last = _trained(tmp_path)
    assert 5 < first < 6.5 and last < first


@pytest.mark.exhaustive  # two more runs; loading mapped weights has tests of its own
def test_it_goes_on_from_its_weights(tmp_path: Path) -> None:
    first, last = _trained(tmp_path)
    again = _trained(tmp_path, "--weights", str(tmp_path / "nvme_finetune.bin"))
    assert again[0] < first - 0.05 and again[1] < last


@pytest.mark.exhaustive
def test_bad_input_is_a_sentence(tmp_path: Path) -> None:
    where = ("--nvme", str(tmp_path), "--out", str(tmp_path))
    status, output = _ended("nvme_finetune", "--weights", "nowhere.bin", *where)
    assert status == 2 and "--weights nowhere.bin is no file" in output and "Traceback" not in output, output
    status, output = _ended("nvme_finetune", *SMALL_NVME, "--host-limit", "1MiB", *where)
    assert status != 0 and "host_limit" in output


# -- example rlhf ---------------------------------------------------------------------------------------------------
SMALL_RLHF = ("--steps", "18", "--warm-up", "40", "--width", "32", "--context", "24", "--prompt", "8")


def _raised(folder: Path, *options: str) -> float:
    """By how much the reward has risen, from the first to the last sixth of the steps."""
    output = _output("rlhf_four_engines", *SMALL_RLHF, "--out", str(folder), *options, ranks=2, limit_s=200)
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


def test_bad_input_is_a_sentence_of_rlhf(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a file").touch()
    script = str(ROOT / "examples" / "rlhf_four_engines.py")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    for option, value, sentence in (
        ("--prompt", "48", "--prompt 48 must be between 1 and --context 48"),
        ("--out", str(tmp_path / "a file"), "a file is no folder"),
    ):
        monkeypatch.setattr(sys, "argv", [script, "--out", str(tmp_path), option, value])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(script, run_name="__main__")
        assert end.value.code == 2 and sentence in capsys.readouterr().err


@pytest.mark.exhaustive  # it has engines by then
def test_a_text_that_is_too_short_is_a_sentence_of_rlhf(tmp_path: Path) -> None:
    (tmp_path / "a file").touch()
    status, output = _ended("rlhf_four_engines", "--out", str(tmp_path), "--text", str(tmp_path / "a file"))
    assert status in (1, 2) and "Traceback" not in output, output
    assert "the text has 0 bytes; 480 are needed" in output
