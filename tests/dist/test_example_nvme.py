"""examples/nvme_finetune.py trains from a drive on two ranks, goes on from its own weights, and refuses bad input."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = ("--steps", "5", "--batch", "2", "--context", "32", "--layers", "2", "--width", "64")
pytestmark = pytest.mark.timeout(180)


def _run(*options: str, ranks: int = 2) -> tuple[int, str]:
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
    status, output = _run(*SMALL, "--nvme", str(folder), "--out", str(folder), *options)
    assert status == 0, output[-6000:]
    assert re.search(r"optimizer state +- +- +\d+ MiB", output)  # nothing of it in memory
    assert (folder / "nvme_finetune.png").stat().st_size > 1000
    return _losses(output)


@pytest.mark.exhaustive
def test_it_trains_from_the_drive(tmp_path: Path) -> None:
    first, last = _trained(tmp_path)
    assert 5 < first < 6.5 and last < first


@pytest.mark.exhaustive
@pytest.mark.exhaustive  # two more runs; loading mapped weights has tests of its own
def test_it_goes_on_from_its_weights(tmp_path: Path) -> None:
    first, last = _trained(tmp_path)
    again = _trained(tmp_path, "--weights", str(tmp_path / "nvme_finetune.bin"))
    assert again[0] < first - 0.05 and again[1] < last


@pytest.mark.exhaustive
def test_bad_input_is_a_sentence(tmp_path: Path) -> None:
    for options, sentence in ((("--weights", "nowhere.bin"), "--weights nowhere.bin is no file"),):
        status, output = _run(*options, "--out", str(tmp_path), ranks=1)
        assert status == 2 and sentence in output and "Traceback" not in output, output
    status, output = _run(*SMALL, "--host-limit", "1MiB", "--nvme", str(tmp_path), "--out", str(tmp_path), ranks=1)
    assert status != 0 and "host_limit" in output
