"""Which hosts, devices and ranks a command line means: never fewer than asked, never outside what the user made
visible.
"""

import os
from argparse import Namespace
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from deepspeed.errors import DeepSpeedConfigError, DeepSpeedError, UsageError
from deepspeed.launcher import runner
from deepspeed.launcher.hostfile import (
    EXPORT_ENVS,
    environment_file_name,
    exported,
    load_hostfile,
    masked,
    read_environment_files,
)
from deepspeed.launcher.job import Job
from deepspeed.launcher.machine import (
    is_this_machine,
    own_address,
    parse_core_list,
    pid_file,
    plan_cores,
    share_cores,
    usable_cores,
)
from deepspeed.launcher.resources import LocalDevices, Location, find_place, master_address, select
from deepspeed.launcher.runner import parse_args
from tests.harness.rows import for_each

DEFAULTS = parse_args(["s.py"])
TWO = {"worker-0": 4, "worker-1": 2}
CPU = LocalDevices(0)
GPUS = LocalDevices(4, "CUDA_VISIBLE_DEVICES", None)
SOME = LocalDevices(3, "CUDA_VISIBLE_DEVICES", "4,5,6")
UUIDS = LocalDevices(2, "CUDA_VISIBLE_DEVICES", "GPU-aa, GPU-bb")


def Selection(**flags: object) -> Namespace:
    """The flags of a command line of which only ``flags`` were given."""
    return Namespace(**{**vars(DEFAULTS), **flags})


def place(
    request: Namespace, hosts: dict[str, int] | None = None, *, devices: LocalDevices = GPUS, here: str = "localhost"
) -> Location:
    words = {"cpu_only": devices.count == 0, "devices": lambda: devices, "is_here": lambda host: host == here}
    return find_place(request, hosts, **words)


# this machine, without a hostfile


@for_each(
    ("request_", "devices", "slots"),
    [
        (Selection(), GPUS, (0, 1, 2, 3)),
        (Selection(num_gpus=2), GPUS, (0, 1)),
        (Selection(num_nodes=1), GPUS, (0, 1, 2, 3)),
        (Selection(include="localhost:3,1"), GPUS, (1, 3)),
        (Selection(exclude="localhost:0"), GPUS, (1, 2, 3)),
        (Selection(), SOME, (4, 5, 6)),
        (Selection(num_gpus=2), SOME, (4, 5)),
        (Selection(include="localhost:6"), SOME, (6,)),
        (Selection(exclude="localhost:5"), SOME, (4, 6)),
        # a device that does not exist ends the list
        (Selection(), LocalDevices(2, "CUDA_VISIBLE_DEVICES", "7,2,9"), (7, 2)),
        (Selection(), UUIDS, (0, 1)),
        (Selection(num_gpus=1), UUIDS, (0,)),
        (Selection(), CPU, (0,)),
        (Selection(num_gpus=5), CPU, (0, 1, 2, 3, 4)),
        (Selection(include="localhost:0,1"), CPU, (0, 1)),
        (Selection(include="localhost"), CPU, (0,)),
    ],
)
def test_this_machine(request_: Namespace, devices: LocalDevices, slots: tuple[int, ...]) -> None:
    found = place(request_, devices=devices)
    assert found.world == {"localhost": slots} and found.node_rank == 0
    # names that are no numbers are left to the variable, which the ranks inherit
    assert found.on_devices == (devices.count > 0 and devices is not UUIDS)
    assert found.uses_devices == (devices.count > 0)


@for_each(
    ("request_", "devices", "sentence"),
    [
        (Selection(num_gpus=0), GPUS, "--num_gpus 0 starts no rank"),
        (Selection(num_gpus=-2), GPUS, "--num_gpus -2 starts no rank"),
        (Selection(num_gpus=5), GPUS, "4 accelerator.s. are visible"),
        (Selection(num_gpus=4), SOME, "3 accelerator.s. are visible"),
        (Selection(include="localhost:1"), SOME, "slot 1 of host 'localhost', which has slots .4, 5, 6."),
        (Selection(include="localhost:4"), GPUS, "slot 4"),
        (Selection(exclude="localhost"), GPUS, "leaves no device"),
        (Selection(exclude="localhost:0"), CPU, "--exclude has nothing to leave out"),
        (Selection(include="localhost:0"), UUIDS, "take device numbers"),
        (Selection(include="localhos:0"), GPUS, "did you mean 'localhost'"),
        (Selection(include="localhost:x"), CPU, "must be numbers"),
        (Selection(num_nodes=2), GPUS, "--num_nodes 2, but no hostfile says which"),
        (Selection(num_nodes=0), GPUS, "--num_nodes 0 leaves no node"),
        (Selection(no_ssh=True), GPUS, "--no_ssh means that you start every node yourself"),
        (Selection(node_rank=-3), GPUS, "--node_rank -3 is no node"),
        (Selection(include="localhost", exclude="localhost"), GPUS, "--exclude cannot be given too"),
        (Selection(include="localhost", num_gpus=1), GPUS, "--num_gpus cannot be given too"),
        (Selection(exclude="localhost", num_nodes=1), GPUS, "--num_nodes cannot be given too"),
        (Selection(force_multi=True, node_rank=0), GPUS, "leave one of them out"),
    ],
)
def test_what_cannot_start_here(request_: Namespace, devices: LocalDevices, sentence: str) -> None:
    with pytest.raises(DeepSpeedError, match=sentence):
        place(request_, devices=devices)


def test_devices_are_not_counted_for_a_refusal_or_for_other_hosts() -> None:
    def count() -> LocalDevices:
        raise AssertionError("counted")

    for request in (Selection(num_gpus=0), Selection(num_nodes=2), Selection(no_ssh=True)):
        with pytest.raises(DeepSpeedError):
            find_place(request, None, cpu_only=False, devices=count, is_here=lambda host: False)
    assert find_place(Selection(), TWO, cpu_only=False, devices=count, is_here=lambda host: False).node_rank is None


# hostfiles


@for_each(
    ("request_", "world"),
    [
        (Selection(), {"worker-0": (0, 1, 2, 3), "worker-1": (0, 1)}),
        (Selection(num_nodes=1), {"worker-0": (0, 1, 2, 3)}),
        (Selection(num_nodes=2, num_gpus=2), {"worker-0": (0, 1), "worker-1": (0, 1)}),
        (Selection(include="worker-1@worker-0:2"), {"worker-0": (2,), "worker-1": (0, 1)}),
        (Selection(exclude="worker-1"), {"worker-0": (0, 1, 2, 3)}),
    ],
)
def test_hostfile_selection(request_: Namespace, world: dict[str, tuple[int, ...]]) -> None:
    assert select(TWO, request_) == world
    found = place(request_, TWO)
    assert found == Location(world, None, on_devices=True, uses_devices=True)  # not even one host is this machine


@for_each(
    ("request_", "sentence"),
    [
        (Selection(num_nodes=3), "--num_nodes 3, but the hostfile lists 2 host"),
        (Selection(num_gpus=3), "--num_gpus 3, but the hostfile gives host worker-1 2 slot"),
        (Selection(include="worker1"), "did you mean 'worker-"),
        (Selection(include="worker-1:2"), "slot 2 of host 'worker-1'"),
        (Selection(exclude="worker-0@worker-1"), "leaves no slot"),
        (Selection(include="@"), "empty host name"),
        (Selection(node_rank=2), "--node_rank 2 is not one of the 2 node"),
    ],
)
def test_never_fewer_than_asked(request_: Namespace, sentence: str) -> None:
    with pytest.raises(DeepSpeedError, match=sentence):
        place(request_, TWO)


@given(st.integers(-1, 4), st.integers(-1, 5))
def test_hostfile_worlds_have_what_was_asked_for(num_nodes: int, num_gpus: int) -> None:
    try:
        world = place(Selection(num_nodes=num_nodes, num_gpus=num_gpus), TWO).world
    except DeepSpeedError:
        assert num_nodes in (0, 3, 4) or num_gpus == 0 or num_gpus > (2 if num_nodes != 1 else 4)
        return
    assert len(world) == (2 if num_nodes == -1 else num_nodes)
    assert all(len(slots) == (TWO[host] if num_gpus == -1 else num_gpus) for host, slots in world.items())


def test_a_single_host_is_local_only_if_it_is_this_machine() -> None:
    local = Location({"worker-1": (0, 1)}, 0, on_devices=True, uses_devices=True)
    assert place(Selection(include="worker-1"), TWO, here="worker-1") == local
    assert place(Selection(include="worker-1"), TWO).node_rank is None
    assert place(Selection(include="worker-1", force_multi=True), TWO, here="worker-1").node_rank is None
    assert place(Selection(force_multi=True)).node_rank is None
    with pytest.raises(DeepSpeedError, match="has no device 0, 1: this process sees CUDA_VISIBLE_DEVICES=4,5,6"):
        place(Selection(include="worker-1"), TWO, devices=SOME, here="worker-1")
    with pytest.raises(DeepSpeedError, match="has no device 4, 5: this process sees 4 accelerator"):
        place(Selection(), {"localhost": 6})
    assert place(Selection(), {"localhost": 6}, devices=CPU).world == {"localhost": (0, 1, 2, 3, 4, 5)}
    inherited = Location({"localhost": (0, 1)}, 0, on_devices=False, uses_devices=True)
    assert place(Selection(), {"localhost": 2}, devices=UUIDS) == inherited


def test_nodes_by_hand() -> None:
    assert place(Selection(node_rank=1, no_ssh=True), TWO).node_rank == 1
    alone = Selection(node_rank=1, num_nodes=2, num_gpus=3, master_addr="10.0.0.1")
    world = {"node0": (0, 1, 2), "node1": (0, 1, 2)}
    assert place(alone) == Location(world, 1, on_devices=True, uses_devices=True)
    # the variable holds as it is
    assert place(alone, devices=SOME) == Location(world, 1, on_devices=False, uses_devices=True)
    assert place(alone, devices=CPU) == Location(world, 1, on_devices=False, uses_devices=False)
    with pytest.raises(DeepSpeedError, match="2 accelerator"):
        place(alone, devices=UUIDS)
    for incomplete in ({}, {"num_nodes": 2, "num_gpus": 2}, {"num_nodes": 1}):
        with pytest.raises(DeepSpeedError, match="needs --num_nodes, --num_gpus and --master_addr.*missing"):
            place(Selection(node_rank=0, **incomplete))
    with pytest.raises(DeepSpeedError, match="--node_rank 2 is not one of the 2"):
        place(Selection(node_rank=2, num_nodes=2, num_gpus=1, master_addr="a"))


def test_master_address() -> None:
    def address(hosts: str, given: str = "", node_rank: int | None = None, here: str = "") -> str:
        found = Location({host: (0,) for host in hosts.split()}, node_rank, on_devices=True, uses_devices=True)
        return master_address(
            found, given, is_here=lambda host: host == here, own_address=lambda toward: f"own-toward-{toward}"
        )

    assert address("a") == "127.0.0.1"
    assert address("a", "x") == address("a b", "x") == "x"
    assert address("me@a b") == "a"
    assert address("a b", here="a") == "own-toward-b"
    assert address("a b", node_rank=0, here="a") == "a"  # all nodes must come to the same
    with pytest.raises(DeepSpeedError, match="name this machine with --master_addr"):
        address("localhost b", node_rank=0)


def test_hostfile_faults_name_path_and_line(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    for text, sentence in [
        ("a slots=2\nb 2\n", f"hostfile {file}, line 2 is 'b 2'"),
        ("a slots=2\n\na slots=1\n", f"hostfile {file}, line 3 names host 'a' a second time"),
        ("a slots=0\n", "line 1 gives host 'a' no slot"),
        ("a,b slots=4\n", "one host per line"),
        ("-oProxyCommand=x slots=4\n", "line 1"),
        ("# nothing\n", f"hostfile {file} names no host"),
        ("", "names no host"),
    ]:
        file.write_text(text)
        with pytest.raises(DeepSpeedError) as caught:
            load_hostfile(str(file))
        assert sentence in str(caught.value)
    file.write_bytes(b"\xff\xfe\x00a")
    for path, why in [(file, "not a text file"), (tmp_path, "Is a directory"), (tmp_path / "none", "No such file")]:
        with pytest.raises(DeepSpeedError, match=why):
            load_hostfile(str(path))
    file.write_text("b slots=1 # fast\n\na  slots=2")
    assert load_hostfile(str(file)) == {"b": 1, "a": 2}


def test_this_machine_is_known_by_name_and_address() -> None:
    assert all(map(is_this_machine, ("localhost", "127.0.0.1", "me@localhost")))
    assert not any(map(is_this_machine, ("192.0.2.1", "no-such-host.invalid", "x" * 300, "a..b")))
    assert own_address("127.0.0.1") == "127.0.0.1"
    assert own_address("no-such-host.invalid")


def test_stale_pid_files_go(tmp_path: Path) -> None:
    file = tmp_path / "1.deepspeed"
    for text in (None, "999999999", "", "x", str(os.getpid())):
        if text is not None:
            file.write_text(text)
        with pid_file(str(file)):
            assert file.read_text() == str(os.getpid())
        assert not file.exists(), text
    file.write_text("1")
    with pytest.raises(DeepSpeedError, match="exists already"), pid_file(str(file)):
        pass
    assert file.read_text() == "1"


# -- launcher environment -------------------------------------------------------------------------------------------
def export(env: dict[str, str], from_files: dict[str, str] | None = None) -> dict[str, str]:
    return exported(env, prefixes=EXPORT_ENVS, cwd="/cwd", from_files=from_files or {})


def test_prefixes_of_clients_count() -> None:
    sent = {"NCCL_DEBUG", "UCX_TLS", "MV2_X", "MLFLOW_RUN_ID", "PYTHONHASHSEED", "DS_ACCELERATOR"}
    env = dict.fromkeys((*sent, "HOME", "MY_VAR", "DS_SSH", "PYTHON%%"), "1")  # the last is no name
    wanted = {*sent, "PYTHONPATH"}
    assert export(env).keys() == wanted
    assert runner.EXPORT_ENVS is EXPORT_ENVS
    runner.EXPORT_ENVS.append("MY_")
    try:
        assert export(env).keys() == wanted | {"MY_VAR"}
    finally:
        runner.EXPORT_ENVS.remove("MY_")


def test_what_users_set_for_torch_and_its_backends_reaches_other_hosts_and_what_machines_differ_in_does_not() -> None:
    wanted = ("GLOO_SOCKET_IFNAME", "TORCH_NCCL_BLOCKING_WAIT", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    wanted += ("OMP_NUM_THREADS", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING")
    here = ("CUDA_VISIBLE_DEVICES", "CUDA_HOME", "TORCHELASTIC_RUN_ID")
    assert export(dict.fromkeys(wanted + here, "1")).keys() == {*wanted, "PYTHONPATH"}


def test_current_directory_leads_and_files_win() -> None:
    assert export({})["PYTHONPATH"] == "/cwd"
    assert export({"PYTHONPATH": "/a:/b"})["PYTHONPATH"] == "/cwd:/a:/b"
    of_files = {"NCCL_DEBUG": "WARN", "PYTHONPATH": "/c"}
    assert export({"NCCL_DEBUG": "INFO"}, of_files) == of_files


def test_aisc_sets_two_by_itself() -> None:
    env = {"NCCL_IB_HCA": "mlx5", "UCX_NET_DEVICES": "x", "NCCL_DEBUG": "INFO"}
    assert export(env).keys() == {*env, "PYTHONPATH"}
    assert export({**env, "AISC_JOB_NAME": "j"}).keys() == {"NCCL_DEBUG", "PYTHONPATH"}


def test_file_text(tmp_path: Path) -> None:
    (tmp_path / "f").write_text('A=1\n\n# note = 1\nB = x=y  \nC="quoted $HOME"\nD=\n')
    wanted = {"A": "1", "B": " x=y", "C": '"quoted $HOME"', "D": ""}
    assert read_environment_files("f", [str(tmp_path)]) == wanted


def test_bad_files_and_lines_are_named(tmp_path: Path) -> None:
    refused = {
        "NOTHING": "has no '='",
        "A-B=1": "not a variable name",
        "=1": "not a variable name",
        "A=\0": "zero byte",
    }
    for line, why in refused.items():
        (tmp_path / ".deepspeed_env").write_text(f"# first\n{line}")
        with pytest.raises(ValueError, match=f"/.deepspeed_env, line 2.*{why}") as caught:
            read_environment_files(".deepspeed_env", [str(tmp_path)])
        assert isinstance(caught.value, DeepSpeedConfigError)
        assert "NOTHING" not in str(caught.value)  # it may be a secret that lost its name
    (tmp_path / ".folder").mkdir()
    (tmp_path / ".bin").write_bytes(b"A=\xff\xfe\n")
    for name, why in ((".folder", "cannot be read .Is a directory"), (".bin", "not a text file")):
        with pytest.raises(DeepSpeedConfigError, match=why):
            read_environment_files(name, [str(tmp_path)])


def test_files_home_first(tmp_path: Path) -> None:
    home, here = tmp_path / "home", tmp_path / "here"
    for folder, text in ((home, "A=home\nB=home\n"), (here, "B=here\n")):
        folder.mkdir()
        (folder / ".env").write_text(text)
    assert read_environment_files(".env", [str(home), str(here)]) == {"A": "home", "B": "here"}
    assert read_environment_files(str(home / ".env"), [str(home), str(here)]) == {"A": "home", "B": "home"}
    assert read_environment_files(".other", [str(home), str(here)]) == {}


def test_names_and_masks() -> None:
    assert environment_file_name({}) == ".deepspeed_env" == environment_file_name({"DS_ENV_FILE": ""})
    assert environment_file_name({"DS_ENV_FILE": "mine"}) == "mine"
    variables = {"HF_TOKEN": "a", "WANDB_API_KEY": "b", "my_password": "c", "NCCL_DEBUG": "INFO", "AWS_SECRET_X": "d"}
    assert masked(variables) == {**dict.fromkeys(variables, "***"), "NCCL_DEBUG": "INFO"}


# -- launcher affinity ----------------------------------------------------------------------------------------------
def job(**fields: object) -> Job:
    return Job(world={"localhost": (0, 1)}, script="s.py", **fields)


@pytest.fixture
def two_sockets(tmp_path: Path) -> str:
    """Eight physical cores on two nodes, two hyperthreads each (c and c + 8), and a third node that has only memory."""
    for cpu in range(16):
        folder = tmp_path / f"cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 8},{cpu % 8 + 8}\n")
    (tmp_path / "cpu/cpufreq").mkdir()
    for node, cpus in enumerate(("0-3,8-11\n", "4-7,12-15\n", "\n")):
        (tmp_path / f"node/node{node}").mkdir(parents=True)
        (tmp_path / f"node/node{node}/cpulist").write_text(cpus)
    return str(tmp_path)


BAD_LISTS = ["", " 1", "1, 2", "1,", "a", "3-1", "2,1", "0-3,3", "1-", "-1", "0x1", "1--2", "0-99999999", "\u0661"]


@for_each("text", BAD_LISTS)
def test_malformed_core_lists_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected ascending") as caught:
        parse_core_list(text)
    assert isinstance(caught.value, DeepSpeedConfigError)


@given(st.sets(st.integers(0, 200), min_size=1))
def test_every_ascending_list_reads_back(cores: set[int]) -> None:
    assert parse_core_list("0-3,8,10-11") == [0, 1, 2, 3, 8, 10, 11]
    assert parse_core_list(",".join(map(str, sorted(cores)))) == sorted(cores)


def test_one_allowed_cpu_per_physical_core(two_sockets: str, tmp_path: Path) -> None:
    assert usable_cores(range(16), two_sockets) == list(range(8))
    assert usable_cores({9, 2, 10, 4}, two_sockets) == [2, 9, 4]  # node by node
    assert usable_cores({3, 1}, str(tmp_path / "nothing")) == [1, 3]


@given(st.lists(st.integers(0, 300), unique=True, min_size=1).map(sorted), st.integers(1, 40))
def test_shares_are_equal_and_disjoint(cores: list[int], ranks: int) -> None:
    if ranks > len(cores):
        with pytest.raises(AssertionError, match=f"{ranks} ranks cannot be bound to {len(cores)} core"):
            share_cores(cores, ranks)
        return
    shares = share_cores(cores, ranks)
    assert {len(share) for share in shares} == {len(cores) // ranks}
    assert sum(shares, ()) == tuple(cores[: len(cores) // ranks * ranks])


def test_plan(two_sockets: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KMP_AFFINITY", raising=False)
    here = {"root": two_sockets, "allowed": range(16)}
    assert plan_cores(job(), 2, **here) == [(), ()]
    assert plan_cores(job(bind_cores=True), 2, **here) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert plan_cores(job(core_list="4-7"), 2, **here) == [(4, 5), (6, 7)]
    with pytest.raises(UsageError, match=r"core\(s\) \[16\] do not exist here"):
        plan_cores(job(core_list="15-16"), 2, **here)
    assert len(plan_cores(job(bind_cores=True), 1)[0]) >= 1
    monkeypatch.setenv("KMP_AFFINITY", "compact")
    with pytest.raises(ValueError, match="KMP_AFFINITY"):
        plan_cores(job(bind_cores=True), 2, **here)
