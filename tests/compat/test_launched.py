"""Clients as users start them: fresh processes from torchrun, ``accelerate launch`` and the ``deepspeed`` launcher."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deepspeed.comm.init import free_port
from tests.compat.common import need

pytestmark = pytest.mark.timeout(180)
ROOT = Path(__file__).parents[2]
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def started_by(launcher: str) -> list[str]:
    port = str(free_port())
    job = ["--main_process_port", port, "--num_machines", "1", "--dynamo_backend", "no", "--mixed_precision", "no"]
    zero = ["--zero_stage", "3", "--zero3_init_flag", "false", "--gradient_accumulation_steps", "1"]
    words = {
        "python": [],
        "torchrun": ["torch.distributed.run", "--nproc_per_node", "2", "--master_port", port],
        "accelerate": ["accelerate.commands.launch", "--use_deepspeed", "--num_processes", "2", *job, *zero],
        "deepspeed": ["deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", port],
    }[launcher]
    into = {"python": [], "deepspeed": ["--module"]}.get(launcher, ["-m"])
    return [sys.executable, "-m", *words, *into]


@pytest.mark.in_make_test(
    "init_first-python-1", "hf_trainer-torchrun-2", "hf_trainer-deepspeed-2", "accelerate-accelerate-2"
)
@pytest.mark.parametrize(
    ("kind", "launcher", "ranks"),
    [
        ("init_first", "python", 1),
        ("init_first", "deepspeed", 2),
        ("hf_trainer", "torchrun", 2),
        ("hf_trainer", "deepspeed", 2),
        ("accelerate", "accelerate", 2),
    ],
)
def test_fresh_processes(kind: str, launcher: str, ranks: int, tmp_path: Path) -> None:
    packages = {
        "hf_trainer": ("transformers", "accelerate"),
        "accelerate": ("accelerate", "transformers"),
        "init_first": (),
    }[kind]
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{missing[0]} is not installed (see tests/compat/README.md)")
    if packages:
        need(*packages)
    environment = {k: v for k, v in os.environ.items() if k not in RANK_VARIABLES and not k.startswith("ACCELERATE_")}
    environment.update(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT), DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")
    command = [*started_by(launcher), "tests.compat.launched", kind, str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    found = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert found["sharded"] and len(found["losses"]) == 3
    assert found["batch"] == (4 if kind == "init_first" else 2 * ranks)
    if kind != "hf_trainer":  # there, every step has new random rows
        assert found["losses"][-1] != found["losses"][0]
