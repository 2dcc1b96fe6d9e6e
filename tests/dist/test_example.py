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

from tests.harness.pool import RankPool

pytestmark = pytest.mark.timeout(240)


ROOT = Path(__file__).parents[2]
STEPS = 4
# The sizes change no line that runs; with those of the example, the arithmetic would take most of the time.
SMALL = ("--layers", "2", "--width", "48", "--heads", "4", "--context", "32")
LAUNCHER = (sys.executable, "bin/deepspeed", "--num_gpus", "2")


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


# -- example 3d -----------------------------------------------------------------------------------------------------
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


# -- example nvme ---------------------------------------------------------------------------------------------------
SMALL_NVME = ("--steps", "5", "--batch", "2", "--context", "32", "--layers", "2", "--width", "64")


def _run_of_nvme(*options: str, ranks: int = 2) -> tuple[int, str]:
    started = ("bin/deepspeed", "--num_gpus", str(ranks)) if ranks > 1 else ()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    environment["DS_LOG_LEVEL"] = "INFO"  # the memory plan is in the log
    done = subprocess.run(
        [sys.executable, *started, "examples/nvme_finetune.py", *options],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def _losses(output: str) -> tuple[float, float]:
    found = re.search(r"loss ([\d.]+) -> ([\d.]+) in 5 steps", output)
    assert found, output[-4000:]
    return float(found[1]), float(found[2])


def _trained(folder: Path, *options: str) -> tuple[float, float]:
    """First and last loss of a run, whose plot and weights are in ``folder``."""
    status, output = _run_of_nvme(*SMALL_NVME, "--nvme", str(folder), "--out", str(folder), *options)
    assert status == 0, output[-6000:]
    assert re.search(r"optimizer state +- +- +[\d.]+ KiB", output)  # nothing of it in memory
    assert (folder / "nvme_finetune.png").stat().st_size > 1000
    return _losses(output)


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
    for options, sentence in ((("--weights", "nowhere.bin"), "--weights nowhere.bin is no file"),):
        status, output = _run_of_nvme(*options, "--out", str(tmp_path), ranks=1)
        assert status == 2 and sentence in output and "Traceback" not in output, output
    status, output = _run_of_nvme(
        *SMALL_NVME, "--host-limit", "1MiB", "--nvme", str(tmp_path), "--out", str(tmp_path), ranks=1
    )
    assert status != 0 and "host_limit" in output


# -- example rlhf ---------------------------------------------------------------------------------------------------
SMALL_RLHF = ("--steps", "18", "--warm-up", "40", "--width", "32", "--context", "24", "--prompt", "8")


def _run_of_rlhf(*options: str, ranks: int = 2) -> tuple[int, str]:
    started = ("bin/deepspeed", "--num_gpus", str(ranks)) if ranks > 1 else ()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [sys.executable, *started, "examples/rlhf_four_engines.py", *options],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def _raised(folder: Path, *options: str) -> float:
    """By how much the reward has risen, from the first to the last sixth of the steps."""
    status, output = _run_of_rlhf(*SMALL_RLHF, "--out", str(folder), *options)
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
    status, output = _run_of_rlhf("--out", str(tmp_path), "--text", str(tmp_path / "a file"), ranks=1)
    assert status in (1, 2) and "Traceback" not in output, output
    assert "the text has 0 bytes; 480 are needed" in output
