"""Who am I and where do the ranks meet: from a launcher, MPI, Slurm, or alone; and the communication log's
arithmetic.
"""

import ctypes
import os
import subprocess
import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest

import deepspeed.comm as ds_comm
from deepspeed.client.comm import comms_log
from deepspeed.client.comm.discovery import Rendezvous, adopted, discover, first_host, interface_with, job_port
from deepspeed.comm import init
from deepspeed.config import load_config
from deepspeed.errors import DeepSpeedConfigError
from tests.harness.devices import two_devices
from tests.harness.rows import for_each
from tests.harness.warm import Warm

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
TORCHRUN |= {"MASTER_ADDR": "n0", "MASTER_PORT": "77"}
OMPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
OMPI |= {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
OMPI_TWO_NODES = {**OMPI, "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_NODES": "2"}
SLURM |= {"SLURM_STEP_NODELIST": "node[1-2,5],x[01-03]", "SLURM_JOB_ID": "1234", "SLURM_STEP_ID": "0"}


@for_each(
    ("env", "named"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is not set"),
        ({"WORLD_SIZE": "2"}, "RANK is not set"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 does not fit WORLD_SIZE=2"),
        ({"RANK": "zero", "WORLD_SIZE": "2"}, "RANK='zero' must be a whole number from 0"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK='-1'"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE='0' must be a whole number from 1"),
        ({**TORCHRUN, "LOCAL_RANK": "two"}, "LOCAL_RANK='two'"),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, "local rank 2 does not fit 2 ranks on this machine"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "8"}, "does not fit 8 ranks on this machine and WORLD_SIZE=4"),
        ({**TORCHRUN, "MASTER_PORT": "0"}, "MASTER_PORT='0'"),
        ({**TORCHRUN, "MASTER_PORT": "65536"}, "MASTER_PORT='65536' must be a whole number from 1 to 65535"),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK='x'"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR"),
        (OMPI_TWO_NODES, "Open MPI started 4 ranks, but nothing says which machine holds rank 0: MASTER_ADDR"),
        ({**OMPI, "WORLD_SIZE": "8"}, "WORLD_SIZE=8, but Open MPI started 2 ranks"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE is not set"),
        ({"PMIX_RANK": "0"}, "PMIx started this process, but WORLD_SIZE is not set"),
        ({**HYDRA, "PMI_SIZE": "x"}, "PMI_SIZE='x'"),
        ({**SLURM, "SLURM_STEP_NODELIST": ","}, "names no machine"),
        ({"SM_TRAINING_ENV": "{}", "SM_HOSTS": "broken", **OMPI_TWO_NODES}, "MASTER_ADDR"),
    ],
)
def test_contradictions_are_sentences(env: dict[str, str], named: str) -> None:
    with pytest.raises(DeepSpeedConfigError, match=named):
        discover(env)


def test_sizes_left_over_from_a_launcher_do_not_disturb_a_process_alone() -> None:
    for left in ({"LOCAL_WORLD_SIZE": "8", "LOCAL_RANK": "0"}, {"LOCAL_SIZE": "2"}, {"LOCAL_SIZE": "x"}):
        for own in ({}, {"RANK": "0", "WORLD_SIZE": "1"}):
            found = discover({**left, **own})
            assert (found.rank, found.world_size, found.local_rank, found.port) == (0, 1, 0, None)


ON_TWO = {"MASTER_ADDR": "n0", "MASTER_PORT": "9"}
PMI = {"PMI_RANK": "3", "PMI_SIZE": "4"}
AZURE = {"AZUREML_EXPERIMENT_ID": "e"}
AZURE |= {"AZ_BATCH_MASTER_NODE": "10.0.0.4:6000", "AZ_BATCHAI_MPI_MASTER_NODE": "10.0.0.5"}
SAGEMAKER = {"SM_TRAINING_ENV": "{}", "SM_HOSTS": '["algo-1","algo-2"]'}
# What mpirun's helper on the second node got from srun: the step leaves the first node out and counts the helpers.
HELPER = {**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
HELPER |= {"SLURM_STEP_NODELIST": "node2", "SLURM_JOB_NODELIST": "node[1-2]"}
FIFTH = Rendezvous(5, 8, 1, "node1", 20000 + 12340 % 9973)
UNDER_SRUN = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1", "SLURM_LOCALID": "0"}


def _without(env: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in names}


@for_each(
    ("env", "found"),
    [
        ({}, Rendezvous(0, 1, 0, "127.0.0.1", None)),
        # a launcher's variables come first; a missing local rank and port are filled
        ({**TORCHRUN, "OMPI_COMM_WORLD_RANK": "9", "OMPI_COMM_WORLD_SIZE": "10"}, Rendezvous(3, 4, 1, "n0", 77, 2)),
        (_without(TORCHRUN, "LOCAL_RANK", "MASTER_PORT"), Rendezvous(3, 4, 1, "n0", 29500, 2)),
        (OMPI, Rendezvous(1, 2, 1, "127.0.0.1", 29500, 2)),
        ({**OMPI_TWO_NODES, "MASTER_ADDR": "n0"}, Rendezvous(3, 4, 1, "n0", 29500, 2)),
        # MPI inside a Slurm job trusts the job's list of nodes only
        (
            {**HELPER, **OMPI_TWO_NODES, "PMIX_NAMESPACE": "prterun-node1-77@1"},
            Rendezvous(3, 4, 1, "node1", job_port("1.77.1"), 2),
        ),
        ({**HELPER, **HYDRA}, Rendezvous(3, 4, 1, "node1", 29500, 2)),
        # local ranks
        ({**ON_TWO, **HYDRA}, Rendezvous(3, 4, 1, "n0", 9, 2)),
        ({**ON_TWO, **PMI, "PALS_LOCAL_RANKID": "2"}, Rendezvous(3, 4, 2, "n0", 9)),
        ({**ON_TWO, **PMI, "PMI_LOCAL_RANK": "0", "PMI_LOCAL_SIZE": "1"}, Rendezvous(3, 4, 0, "n0", 9, 1)),
        (
            {**ON_TWO, "MV2_COMM_WORLD_RANK": "3", "MV2_COMM_WORLD_SIZE": "4", "MV2_COMM_WORLD_LOCAL_RANK": "2"},
            Rendezvous(3, 4, 2, "n0", 9),
        ),
        ({**ON_TWO, "PMIX_RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, Rendezvous(3, 4, 1, "n0", 9, 2)),
        ({**ON_TWO, "PMIX_RANK": "3", "WORLD_SIZE": "4"}, Rendezvous(3, 4, 0, "n0", 9)),
        # srun --mpi=pmi2: PMI's numbers, Slurm's local one
        (
            {**ON_TWO, **PMI, "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1"},
            Rendezvous(3, 4, 1, "n0", 9),
        ),
        # ranks counted by hand, the rest from the scheduler
        ({**ON_TWO, "RANK": "3", "WORLD_SIZE": "4", **HYDRA}, Rendezvous(3, 4, 1, "n0", 9, 2)),
        # the user's word on the local rank, as with one visible device per task
        ({**ON_TWO, **HYDRA, "LOCAL_RANK": "0"}, Rendezvous(3, 4, 0, "n0", 9, 2)),
        # Slurm: several tasks on several nodes, one node, torchrun under srun with one task per node
        (SLURM, FIFTH),
        ({**SLURM, "RANK": "5", "WORLD_SIZE": "8"}, FIFTH),
        ({**SLURM, "MASTER_PORT": "77"}, FIFTH._replace(port=77)),
        ({**SLURM, "SLURM_STEP_NUM_NODES": "1"}, Rendezvous(5, 8, 1, "127.0.0.1", 22367, 8)),
        ({**_without(TORCHRUN, "LOCAL_RANK"), **SLURM, **UNDER_SRUN}, Rendezvous(3, 4, 1, "n0", 77, 2)),
        # a batch script without srun is alone
        (
            {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_NODELIST": "n[1-2]"},
            Rendezvous(0, 1, 0, "127.0.0.1", None),
        ),
        ({**AZURE, **OMPI_TWO_NODES}, Rendezvous(3, 4, 1, "10.0.0.4", 6105, 2)),
        ({**AZURE, **OMPI_TWO_NODES, "MASTER_PORT": "7"}, Rendezvous(3, 4, 1, "10.0.0.4", 7, 2)),
        ({**AZURE, **OMPI}, Rendezvous(1, 2, 1, "10.0.0.5", 54965, 2)),
        ({**AZURE, **OMPI, "DLTS_JOB_ID": "1"}, Rendezvous(1, 2, 1, "127.0.0.1", 29500, 2)),
        ({**SAGEMAKER, **OMPI_TWO_NODES}, Rendezvous(3, 4, 1, "algo-1", 29500, 2)),
        ({**SAGEMAKER, **OMPI_TWO_NODES, "MASTER_ADDR": "n0"}, Rendezvous(3, 4, 1, "n0", 29500, 2)),
    ],
)
def test_ranks_and_meeting_point_of_every_launcher(env: dict[str, str], found: Rendezvous) -> None:
    assert discover(env) == found


def test_a_port_that_the_caller_names_and_a_scheduler_that_is_not_asked() -> None:
    assert discover(_without(TORCHRUN, "MASTER_PORT"), 123).port == discover(OMPI, 123).port == 123
    assert discover(SLURM, 123).port == 123
    assert discover(OMPI, auto_mpi_discovery=False) == Rendezvous(0, 1, 0, "127.0.0.1", None)


def test_devices_are_counted_only_when_nothing_states_the_local_rank() -> None:
    unstated = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "n0"}
    assert discover(unstated, devices=lambda: 2).local_rank == 1
    assert discover(unstated, devices=lambda: 0).local_rank == 0
    assert discover({**unstated, "LOCAL_RANK": "2"}, devices=pytest.fail).local_rank == 2
    assert adopted({"RANK": "0"}, 5, 8, devices=lambda: 4).local_rank == 1


def test_slurm_first_host() -> None:
    expected = {"node[1-2,5],x[01-03]": "node1", "gpu[03-05,9],login1": "gpu03", "n1,n2": "n1", "solo": "solo"}
    expected |= {"r[1-2]n": "r1n", "rack[2-3]n[04-06],x1": "rack2n04", "a-b[7]": "a-b7", "n1.c,n2.c": "n1.c"}
    assert {nodes: first_host(nodes) for nodes in expected} == expected


def test_neighbouring_jobs_and_steps_have_ports_of_their_own() -> None:
    ports = [job_port(f"{job}.{step}") for job in range(70000, 70100) for step in range(8)]
    assert len(set(ports)) == len(ports) and min(p or 0 for p in ports) >= 20000 and max(p or 0 for p in ports) < 29973
    assert job_port(".") is None


def test_what_was_found_is_published_where_nothing_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    env = {"LOCAL_RANK": "", "MASTER_ADDR": "kept", "AZUREML_EXPERIMENT_ID": "e"}
    monkeypatch.setattr(os, "environ", env)
    init._publish(Rendezvous(3, 4, 1, "n0", 77, 2))
    azure = {"AZUREML_EXPERIMENT_ID": "e", "NCCL_SOCKET_IFNAME": "^docker0,lo"}
    assert env == {**TORCHRUN, "MASTER_ADDR": "kept", **azure}


def test_mpi_discovery_asks_the_scheduler_where_rank_is_set_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for own in ({"RANK": "1"}, {"RANK": "1", "WORLD_SIZE": "2"}):
        environ = {**OMPI, **own}
        monkeypatch.setattr(init.os, "environ", environ)
        ds_comm.mpi_discovery(verbose=False)
        found = [environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")]
        assert found == ["1", "2", "1", "127.0.0.1", "29500"]


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
import os, sys, torch
import deepspeed.comm as comm
from deepspeed.comm import init
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
init._leave_at_exit.__defaults__ = (0.2,)
comm.init_distributed(verbose=False)
comm.barrier()
if (child := os.fork()) == 0:  # has no group to wait for when it exits
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
comm.destroy_process_group()
"""


def _run_alone(warm: Warm, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {name: value for name, value in os.environ.items() if name not in names}
    return subprocess.run(
        [warm.python, "-W", "error", "-c", script, *arguments], env=env, capture_output=True, text=True, timeout=90
    )


def test_one_process_needs_no_variable_and_may_start_twice_and_fork(warm: Warm) -> None:
    done = _run_alone(warm, ALONE)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_log_arithmetic() -> None:
    log = comms_log.CommsLog()
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
    assert [comms_log.size_str(n) for n in (0, 1536, 2**20, 3 * 2**40)] == ["0 B", "1.5 KB", "1 MB", "3072 GB"]


def test_configure_reads_a_block_and_arguments_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comms_log, "LOG", comms_log.CommsLog())
    comms_log.configure({"comms_logger": {"prof_all": False, "prof_ops": ["send"]}}, verbose=True)
    log = comms_log.LOG
    assert log.enabled and not log.prof_all and log.prof_ops == ["send"] and log.verbose
    comms_log.configure(load_config({"train_batch_size": 1}, world_size=1))
    assert log.enabled and log.verbose, "a configuration without the block changes nothing"
    comms_log.configure("ds_config.json")  # nothing to read a block from
    comms_log.configure({"train_batch_size": 1}, enabled=False)
    assert not log.enabled
    comms_log.configure(load_config({"train_batch_size": 1, "comms_logger": {"debug": True}}, world_size=1))
    assert log.enabled and log.debug and log.prof_all and not log.verbose


TWO_NODES = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "7"}


def _start_rank(monkeypatch: pytest.MonkeyPatch, env: dict[str, str], **arguments: object) -> dict[str, str]:
    """The environment when rank 3 of 4 starts its group."""
    env = dict(env)
    monkeypatch.setattr(os, "environ", env)
    started: list[str] = []
    monkeypatch.setattr(init.dist, "is_initialized", lambda: False)  # another test's group may be there still
    monkeypatch.setattr(init, "_start", lambda backend, *_: started.append(backend))
    monkeypatch.setattr(init, "_leave_at_exit", lambda: None)
    init.init_distributed(verbose=False, rank=3, world_size=4, **arguments)  # type: ignore[arg-type]
    assert len(started) == 1
    return env


@pytest.mark.parametrize(
    ("current", "backend", "chosen"),
    [(0, None, [1]), (1, None, []), (0, "gloo", [])],
    ids=["nothing chosen", "the user has chosen", "a group on the host"],
)
def test_a_rank_stands_on_its_own_device_before_its_group_starts(
    monkeypatch: pytest.MonkeyPatch, current: int, backend: str | None, chosen: list[int]
) -> None:
    with two_devices(current=current) as devices:
        _start_rank(monkeypatch, {**TWO_NODES, "GLOO_SOCKET_IFNAME": "x"}, dist_backend=backend)
        assert devices.chosen == chosen


INTERFACES = {"lo": ["127.0.0.1", "::1"], "eth0": ["172.16.0.9"], "ib0": ["10.0.0.5", "fe80::1%ib0"]}


def test_the_interface_of_an_address() -> None:
    expected = {"10.0.0.5": "ib0", "fe80::1": "ib0", "172.16.0.9": "eth0"}
    expected |= dict.fromkeys(("127.0.0.1", "::1", "1.1.1.1"))
    assert {address: interface_with(address, INTERFACES) for address in expected} == expected


@pytest.mark.parametrize(
    ("env", "ways", "name"),
    [
        ({}, {"10.0.0.1": "10.0.0.5"}, "ib0"),
        ({}, {"10.0.0.1": "127.0.1.1", init._ELSEWHERE: "172.16.0.9"}, "eth0"),
        ({}, {}, None),
        ({"GLOO_SOCKET_IFNAME": "mine"}, {"10.0.0.1": "10.0.0.5"}, "mine"),
        ({"LOCAL_WORLD_SIZE": "4"}, {"10.0.0.1": "10.0.0.5"}, None),
        ({"MASTER_ADDR": "127.0.0.1"}, {"127.0.0.1": "10.0.0.5"}, None),
        ({"MASTER_ADDR": "localhost"}, {"localhost": "10.0.0.5"}, None),
        # the method says where the ranks meet
        ({"MASTER_ADDR": "", "METHOD": "tcp://node0:29"}, {"node0": "10.0.0.5"}, "ib0"),
        ({"MASTER_ADDR": "127.0.0.1", "METHOD": "tcp://node0:29"}, {"node0": "10.0.0.5"}, "ib0"),
        ({"MASTER_ADDR": "", "METHOD": "tcp://[fd00::1]:29"}, {"fd00::1": "10.0.0.5"}, "ib0"),
        ({"METHOD": "tcp://localhost:29"}, {"localhost": "10.0.0.5"}, None),
        ({"MASTER_ADDR": "", "METHOD": "tcp://node0:29", "LOCAL_WORLD_SIZE": "4"}, {"node0": "10.0.0.5"}, None),
        # a file on a shared disk, or the variables
        ({"MASTER_ADDR": "", "METHOD": "file:///shared/store"}, {init._ELSEWHERE: "172.16.0.9"}, "eth0"),
        ({"METHOD": "file:///shared/store"}, {"10.0.0.1": "10.0.0.5"}, "ib0"),
        ({"METHOD": "env://"}, {"10.0.0.1": "10.0.0.5"}, "ib0"),
    ],
)
def test_gloo_is_told_the_network_that_leads_to_rank_0(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str], ways: dict[str, str], name: str | None
) -> None:
    method = {"init_method": env["METHOD"]} if "METHOD" in env else {}

    def way(host: str) -> str:
        if host not in ways:
            raise OSError("no route")
        return ways[host]

    monkeypatch.setattr(init, "_source_address", way)
    addresses = {n: [SimpleNamespace(address=a) for a in own] for n, own in INTERFACES.items()}
    monkeypatch.setattr(init.psutil, "net_if_addrs", lambda: addresses)
    assert _start_rank(monkeypatch, {**TWO_NODES, **env}, **method).get("GLOO_SOCKET_IFNAME") == name


def test_the_way_to_this_machine_is_found() -> None:
    assert init._source_address("localhost") in ("127.0.0.1", "::1")


def test_a_group_of_others_is_described_by_the_environment() -> None:
    assert adopted(TORCHRUN, 3, 4) == Rendezvous(3, 4, 1, "n0", None, 2)
    assert adopted({"LOCAL_WORLD_SIZE": "4"}, 3, 4).one_machine and adopted({}, 0, 1).one_machine
    assert adopted({"MASTER_ADDR": "127.0.0.1"}, 3, 4).one_machine
    for env in (TORCHRUN, {}, {"LOCAL_WORLD_SIZE": "2"}):
        assert not adopted(env, 3, 4).one_machine


LEAVES = """
import sys, threading, torch.distributed as dist
import deepspeed.comm as comm
from deepspeed.comm import init
init._leave_at_exit.__defaults__ = (0.2,)
init.get_accelerator().communication_backend_name = lambda: "nccl"
start = init._start
init._start = lambda backend, *rest: start("gloo", *rest)
comm.init_distributed(verbose=False)
destroy = dist.destroy_process_group
def destroyed():
    if sys.argv[1] == "stuck":
        threading.Event().wait()
    destroy()
    print("left", flush=True)
dist.destroy_process_group = destroyed
"""


@pytest.mark.parametrize(
    ("way", "printed", "logged"), [("free", "left\n", ""), ("stuck", "", "has not ended within 0.2 s")]
)
def test_every_backend_is_left_at_exit_and_none_holds_the_process(
    warm: Warm, way: str, printed: str, logged: str
) -> None:
    done = _run_alone(warm, LEAVES, way)
    assert (done.returncode, done.stdout) == (0, printed), done.stderr
    assert logged in done.stderr and bool(done.stderr) == bool(logged)


@pytest.mark.parametrize(
    ("name", "policy", "then"),
    [
        (b"gloo_tcp_loop", os.SCHED_OTHER, os.SCHED_BATCH),
        (b"gloo_tcp_loop", os.SCHED_IDLE, os.SCHED_IDLE),  # chosen for the program, as with chrt
        (b"\xc3\xa9\xe4\xff", os.SCHED_OTHER, os.SCHED_OTHER),  # a name may be cut in the middle of a character
    ],
)
def test_only_gloos_threads_wait_for_their_turn_and_a_chosen_policy_stays(name: bytes, policy: int, then: int) -> None:
    found, named, looked = list[int](), threading.Event(), threading.Event()

    def run() -> None:
        ctypes.CDLL(None).prctl(15, name)  # PR_SET_NAME
        os.sched_setscheduler(0, policy, os.sched_param(0))
        named.set()
        looked.wait()
        found.append(os.sched_getscheduler(0))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        named.wait()
        init.take_turns()
    finally:
        looked.set()
        thread.join()
    assert found == [then]


def test_threads_of_other_process_numbers_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container that sees the machine's /proc, its numbers are those of strangers."""
    monkeypatch.setattr("os.readlink", lambda path: "1")
    monkeypatch.setattr("os.sched_setscheduler", lambda *_: pytest.fail("of whom?"))
    monkeypatch.setattr("deepspeed.comm.init._GLOO_THREADS", b"")
    init.take_turns()
