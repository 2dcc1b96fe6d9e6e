"""A job that stands still ends by itself within the limit and five seconds, and says which rank is why, and where."""

import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from deepspeed.comm.init import free_port
from deepspeed.errors import JobHungError
from tests.harness.launched import RUNNER, environment
from tests.harness.patience import slowdown
from tests.harness.stuck import SCRIPT, WORDS, ends_at_once
from tests.harness.warm import Warm

LIMIT_S = 2.0  # on an idle machine; the ranks start apart by more on a busy one
START_S = 120.0
pytestmark = [pytest.mark.timeout(300), pytest.mark.exhaustive]


def _run(command: list[str], folder: Path) -> tuple[int, str, float]:
    """Status, standard error, and seconds from the fault to the end; nothing of the job may be left."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=folder, env=environment(), **pipes)
    try:
        _, err = process.communicate(timeout=START_S)
    finally:
        process.kill()
    ended, fault = time.time(), folder / "fault"
    for file in folder.glob("pid*"):
        pid = int(file.read_text())
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, file.name
    return process.returncode, err, ended - float(fault.read_text()) if fault.exists() else 0.0


def _limit() -> str:
    return f"{LIMIT_S * min(slowdown(), 5):.1f}"


def _in_time(seconds: float, limit: str) -> bool:
    return seconds <= float(limit) + 5 or seconds <= float(limit) + 5 * slowdown()


def _diagnose(fault: str, ranks: int, folder: Path, warm: Warm) -> str:
    limit = _limit()
    command = [warm.python, *RUNNER, "--num_gpus", str(ranks), "--hang_timeout", limit]
    status, err, seconds = _run([*command, SCRIPT, fault, "--folder", str(folder)], folder)
    assert _in_time(seconds, limit), f"{seconds:.1f} s after the fault\n{err}"
    if ends_at_once(fault, status, err):
        return err
    assert status == JobHungError.exit_status, err
    assert "deepspeed: the job stands still" in err, err
    report = err[err.rindex("deepspeed: the job stands still") :]
    culprit, others = WORDS[fault]
    assert re.search(culprit, report), err
    assert re.search(others, "\n".join(line for line in report.splitlines() if not re.match("  rank 1 ", line))), err
    return report


def test_an_endless_loop_is_named_with_module_and_line(tmp_path: Path, warm: Warm) -> None:
    report = _diagnose("loops", 2, tmp_path, warm)
    assert report.index("rank 1 ") < report.index("rank 0 "), "the rank that is why comes first"


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("fault", [fault for fault in WORDS if fault != "loops"])
def test_every_fault_is_named_in_time(fault: str, ranks: int, tmp_path: Path, warm: Warm) -> None:
    report = _diagnose(fault, ranks, tmp_path, warm)
    if fault.startswith("raises"):
        assert report.rstrip().endswith("ValueError: the data is bad"), "the first error is printed last"


def test_under_torchrun_by_the_configuration(tmp_path: Path) -> None:
    limit, port = _limit(), str(free_port())
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port]
    command += [SCRIPT, "stops", "--folder", str(tmp_path), "--hang_timeout", limit]
    status, err, seconds = _run(command, tmp_path)
    assert status != 0 and re.search(WORDS["stops"][0], err), err
    assert _in_time(seconds, limit), f"{seconds:.1f} s after the fault\n{err}"


def test_without_a_launcher_and_with_the_store_gone(tmp_path: Path) -> None:
    """Rank 0 keeps the store itself and is stopped, so that nobody can be asked."""
    port, jobs = str(free_port()), []
    for rank in range(2):
        env = environment(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), DS_HANG_TIMEOUT=_limit())
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = [sys.executable, SCRIPT, "stops", "--folder", str(tmp_path), "--rank", "0"]
        jobs.append(subprocess.Popen(command, env=env, text=True, stderr=subprocess.PIPE))
    try:
        _, err = jobs[1].communicate(timeout=START_S)
    finally:
        for job in jobs:
            job.kill()
            job.communicate()
    assert jobs[1].returncode == JobHungError.exit_status, err
    assert "rank 1" in err and "store does not answer" in err, err


def test_ranks_that_work_alone_for_longer_are_no_hang(tmp_path: Path, warm: Warm) -> None:
    command = [warm.python, *RUNNER, "--num_gpus", "2", "--hang_timeout", "1"]
    command += [SCRIPT, "none", "--folder", str(tmp_path), "--pause", "4"]
    status, err, _ = _run(command, tmp_path)
    assert status == 0, err
