"""The same script gives the same result whoever starts its ranks: srun, mpirun, torchrun, or nobody."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.harness.launched import environment
from tests.harness.warm import Warm

LIMIT_S = 100.0
# whatever could tell a rank who it is
IDENTITY = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")
SCHEDULERS = ("SLURM_", "OMPI_", "PMI_", "PMIX_", "MPI_", "MV2_", "PALS_", "TORCHELASTIC_", "AZ", "SM_")

SCRIPT = """
import json, os, sys
import torch
import deepspeed
deepspeed.init_distributed(verbose=False)
import deepspeed.comm as comm
total = torch.tensor([float(comm.get_rank() + 1)])
comm.all_reduce(total)
found = {"rank": comm.get_rank(), "world": comm.get_world_size()}
found |= {"local_rank": comm.get_local_rank(), "total": total.item()}
found["port"] = int(os.environ["MASTER_PORT"])
with open(os.path.join(sys.argv[1], f"rank{comm.get_rank()}.json"), "w") as file:
    json.dump(found, file)
comm.destroy_process_group()
"""


def _run(folder: Path, commands: list[list[str]], environments: list[dict[str, str]]) -> list[dict]:
    """Start one process per command, wait for all, and return what the ranks wrote, by rank."""
    (folder / "script.py").write_text(SCRIPT)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": folder}
    nobody = {k: v for k, v in environment().items() if k not in IDENTITY and not k.startswith(SCHEDULERS)}
    started = [
        subprocess.Popen([*command, str(folder / "script.py"), str(folder)], env=nobody | variables, **pipes)
        for command, variables in zip(commands, environments, strict=True)
    ]
    end = time.monotonic() + LIMIT_S
    try:
        outputs = [process.communicate(timeout=max(1.0, end - time.monotonic()))[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert [process.returncode for process in started] == [0] * len(started), "\n".join(outputs)
    return [json.loads(file.read_text()) for file in sorted(folder.glob("rank*.json"))]


def _expect(found: list[dict], world: int) -> None:
    total = world * (world + 1) / 2
    plain = [{name: value for name, value in rank.items() if name != "port"} for rank in found]
    assert plain == [{"rank": rank, "world": world, "local_rank": rank, "total": total} for rank in range(world)]


def _slurm(rank: int, job: int) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": str(job),
        "SLURM_STEP_ID": "0",
        **dict.fromkeys(("SLURM_PROCID", "SLURM_LOCALID"), str(rank)),
        **dict.fromkeys(("SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"), "2"),
        **dict.fromkeys(("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"), "localhost"),
    }


def _open_mpi(rank: int, job: int) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "PMIX_NAMESPACE": f"prterun-here-{job}@1",
    }


@pytest.mark.in_make_test("_slurm")
@pytest.mark.parametrize("scheduler", [_slurm, _open_mpi])
def test_two_ranks_of_a_scheduler(tmp_path: Path, warm: Warm, scheduler) -> None:
    # the process id as job number: runs of this test at the same time do not meet
    environments = [scheduler(rank, os.getpid()) for rank in range(2)]
    found = _run(tmp_path, [[warm.python]] * 2, environments)
    _expect(found, 2)
    assert found[0]["port"] == found[1]["port"] and 20000 <= found[0]["port"] < 29973


@pytest.mark.exhaustive
def test_torchrun(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    _expect(_run(tmp_path, [torchrun], [{}]), 2)
