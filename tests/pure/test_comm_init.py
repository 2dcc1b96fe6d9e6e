"""Who am I and where do the ranks meet: from a launcher, MPI, Slurm, or alone; and the communication log's arithmetic."""

import inspect
import os
import subprocess
import sys
from datetime import timedelta

import pytest

import deepspeed.comm as ds_comm
from deepspeed.comm import init, trace
from deepspeed.comm.init import Rendezvous, discover
from deepspeed.errors import DeepSpeedConfigError

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "n0", "MASTER_PORT": "77"}


def test_alone_without_any_variable() -> None:
    assert discover({}) == Rendezvous(0, 1, 0, "127.0.0.1", None)


def test_launcher_variables_come_first() -> None:
    assert discover({**TORCHRUN, "OMPI_COMM_WORLD_RANK": "9", "OMPI_COMM_WORLD_SIZE": "10"}) == Rendezvous(3, 4, 1, "n0", 77)


def test_missing_local_rank_and_port_are_filled() -> None:
    env = {name: value for name, value in TORCHRUN.items() if name not in ("LOCAL_RANK", "MASTER_PORT")}
    assert discover(env, 123) == Rendezvous(3, 4, 1, "n0", 123)


@pytest.mark.parametrize(
    ("env", "named"),
    [
        ({"RANK": "0"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "RANK"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR"),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "Open MPI"),
    ],
)
def test_incomplete_environment_is_named(env: dict[str, str], named: str) -> None:
    with pytest.raises(DeepSpeedConfigError, match=named):
        discover(env)


def test_open_mpi_on_one_machine() -> None:
    env = {
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    }
    assert discover(env, 123) == Rendezvous(1, 2, 1, "127.0.0.1", 123)
    assert discover(env, auto_mpi_discovery=False) == Rendezvous(0, 1, 0, "127.0.0.1", None)


def test_mpich_with_the_address_from_the_launcher() -> None:
    env = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MASTER_ADDR": "n0", "MASTER_PORT": "9", "WORLD_SIZE": "8"}
    assert discover(env) == Rendezvous(5, 8, 1, "n0", 9)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("gpu[03-05,9],login1", "gpu03"), ("n1,n2", "n1"), ("solo", "solo"), ("r[1-2]n", "r1n"), ("a-b[7]", "a-b7")],
)
def test_slurm_first_host(nodes: str, first: str) -> None:
    env = {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "0", "SLURM_STEP_NODELIST": nodes}
    assert discover(env) == Rendezvous(2, 4, 0, first, 29500)


def test_slurm_batch_script_without_srun_is_alone() -> None:
    assert discover({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_NODELIST": "n[1-2]"}).world_size == 1


def test_signature_is_the_documented_one() -> None:
    names = list(inspect.signature(ds_comm.init_distributed).parameters)
    assert names == [
        *("dist_backend", "auto_mpi_discovery", "distributed_port", "verbose", "timeout", "init_method"),
        *("dist_init_required", "config", "rank", "world_size"),
    ]


def test_timeout_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPSPEED_TIMEOUT", "45")
    assert init._timeout(init.DEFAULT_PROCESS_GROUP_TIMEOUT) == timedelta(minutes=45)
    assert init._timeout(timedelta(seconds=5)) == timedelta(seconds=5)
    monkeypatch.setenv("DEEPSPEED_TIMEOUT", "soon")
    with pytest.raises(DeepSpeedConfigError, match="soon"):
        init._timeout(init.DEFAULT_PROCESS_GROUP_TIMEOUT)


def test_calls_before_the_start_are_refused() -> None:
    if ds_comm.is_initialized():
        pytest.skip("another test left a process group")
    for call in (ds_comm.get_rank, ds_comm.get_world_size, ds_comm.barrier, ds_comm.get_world_group):
        with pytest.raises(AssertionError, match="init_distributed"):
            call()
    with pytest.raises(AssertionError, match="process group"):
        ds_comm.init_distributed(dist_init_required=False)
    ds_comm.destroy_process_group()


ALONE = """
import os, torch
import deepspeed.comm as comm
comm.init_distributed(verbose=False)
comm.init_distributed(dist_init_required=True)
assert (comm.get_rank(), comm.get_world_size(), comm.get_local_rank()) == (0, 1, 0)
assert os.environ["LOCAL_RANK"] == "0" and int(os.environ["MASTER_PORT"]) > 0
x = torch.ones(3)
comm.all_reduce(x, log_name="mine", debug="caller")
assert x.tolist() == [1.0] * 3
try:
    comm.all_reduce(x, wrong=1)
except TypeError as error:
    assert "wrong" in str(error)
else:
    raise AssertionError("an unknown keyword was accepted")
comm.destroy_process_group()
comm.init_distributed(verbose=False)
comm.barrier()
comm.destroy_process_group()
"""


def _run_alone(script: str) -> subprocess.CompletedProcess[str]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    env = {name: value for name, value in os.environ.items() if name not in names}
    return subprocess.run([sys.executable, "-W", "error", "-c", script], env=env, capture_output=True, text=True, timeout=90)


def test_one_process_needs_no_variable_and_may_start_twice() -> None:
    done = _run_alone(ALONE)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


def test_log_arithmetic() -> None:
    log = trace.CommsLog()
    assert not log.wants("all_reduce", True)
    log.enabled, log.prof_all, log.prof_ops = True, False, ["all_reduce"]
    assert log.wants("all_reduce", False) and log.wants("broadcast", True) and not log.wants("broadcast", False)
    for latency in [100.0, *[1.0] * 8, 0.0]:
        log.record("all_reduce", 10**6, latency)
    row = log.summary(world_size=4)["all_reduce"][10**6]
    assert row["count"] == 10 and row["avg_latency_ms"] == 1.0 and row["total_latency_ms"] == 108.0
    assert row["tput_avg_gbps"] == pytest.approx(8.0) and row["busbw_avg_gbps"] == pytest.approx(12.0)
    assert (log.count(), log.ops()) == (10, ["all_reduce"])
    log.reset()
    assert log.count() == 0


def test_size_text() -> None:
    assert [trace.size_str(n) for n in (0, 1536, 2**20, 3 * 2**40)] == ["0 B", "1.5 KB", "1 MB", "3072 GB"]


def test_configure_reads_a_block_and_arguments_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "LOG", trace.CommsLog())
    trace.configure({"comms_logger": {"prof_all": False, "prof_ops": ["send"]}}, verbose=True)
    assert trace.LOG.enabled and not trace.LOG.prof_all and trace.LOG.prof_ops == ["send"] and trace.LOG.verbose
    trace.configure({"train_batch_size": 1}, enabled=False)
    assert not trace.LOG.enabled
