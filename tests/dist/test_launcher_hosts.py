"""The launcher on several hosts: network namespaces with addresses of their own, joined by a bridge.

Ranks import torch only where torch is the point; what is proved here is who ends when, with which status and last
words.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from deepspeed.launcher.job import encode_world
from tests.harness.launched import RUNNER, Launched, wait_until
from tests.harness.patience import slowdown, too_long
from tests.harness.warm import Warm

PORT = "29517"  # the namespaces are this test's own, so any port is free

SSH = """#!/bin/sh
# Stands in for ssh: takes its options, enters the host's namespace, runs the rest there with a shell.
while :; do case "$1" in -o|-p|-i|-l|-F) shift 2;; -*) shift;; *) break;; esac; done
host=$1; shift
if [ ! -e /run/netns/{prefix}$host ]; then echo "ssh: connect to host $host port 22: No route to host" >&2; exit 255; fi
exec ip netns exec {prefix}$host sh -c "$(printf %s "$*" | sed "s#{slow} \\(-u -m deepspeed.launcher\\)#{python} \\1#")"
"""


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=20).stdout


class Hosts:
    """Namespaces a, b, c with addresses 10.213.0.1 to .3 on a bridge in a namespace of its own."""

    def __init__(self, folder: Path, python: str) -> None:
        self.python = python  # of launchers
        self.prefix = f"ds{os.getpid()}-"
        self.names = ("a", "b", "c")
        self.addresses = {name: f"10.213.0.{index}" for index, name in enumerate(self.names, 1)}
        self.ssh, self.slow_ssh = folder / "ssh", folder / "slow_ssh"
        for ssh, launcher in ((self.ssh, python), (self.slow_ssh, sys.executable)):
            ssh.write_text(SSH.format(prefix=self.prefix, slow=sys.executable, python=launcher))
            ssh.chmod(0o755)

    def up(self) -> None:
        switch = self.prefix + "sw"
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch, "link", "set", "br0", "up")
        for name, address in self.addresses.items():
            space = self.prefix + name
            _ip("netns", "add", space)
            _ip("-n", switch, "link", "add", f"to-{name}", "type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("-n", switch, "link", "set", f"to-{name}", "master", "br0", "up")
            _ip("-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")
            _ip("-n", space, "link", "set", "lo", "up")

    def down(self) -> None:
        for name in self.names:
            self.kill(name)  # of all before the first is removed
        for name in (*self.names, "sw"):
            with contextlib.suppress(subprocess.CalledProcessError, subprocess.TimeoutExpired):
                _ip("netns", "del", self.prefix + name)

    def busy(self) -> dict[str, list[int]]:
        """Hosts where something runs, and what."""
        places = {name: Path(f"/run/netns/{self.prefix}{name}") for name in self.names}
        # not all are there if up() failed
        spaces = {place.stat().st_ino: name for name, place in places.items() if place.exists()}
        found: dict[str, list[int]] = {}
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):  # it has ended
                if name := spaces.get(os.stat(f"/proc/{pid}/ns/net").st_ino):
                    found.setdefault(name, []).append(int(pid))
        return found

    def kill(self, name: str) -> None:
        """SIGKILL to everything on ``name``."""
        for pid in self.busy().get(name, ()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def plug(self, name: str, state: str) -> None:
        """Pull the cable of ``name`` (``down``), or put it back (``up``)."""
        _ip("-n", self.prefix + name, "link", "set", "eth0", state)


def remove_left_over() -> None:
    """Remove the namespaces of test processes that were killed before they could."""
    for line in _ip("netns", "list").splitlines():
        match = re.match(r"ds(\d+)-\w+", line)
        if match and not Path(f"/proc/{match[1]}").exists():
            _ip("netns", "del", match[0])


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory, warm: Warm) -> Iterator[Hosts]:
    if sys.platform != "linux" or shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("hosts are network namespaces here, which need Linux, the ip program and root")
    made = Hosts(tmp_path_factory.mktemp("hosts"), warm.python)
    remove_left_over()
    try:
        try:
            made.up()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this machine lets nobody make network namespaces: {error.stderr.strip()}")
        yield made
    finally:
        made.down()


@pytest.fixture(autouse=True)
def idle_hosts(hosts: Hosts) -> Iterator[None]:
    """Every test starts and ends with hosts on which nothing runs."""
    yield
    begun = time.monotonic()
    while hosts.busy() and not too_long(begun, 5):
        time.sleep(0.02)  # launchers that were cut off end a little behind their command
    left = hosts.busy()
    for name in left:
        hosts.kill(name)
    assert not left, f"processes are left: {left}"


class Started(Launched):
    """A command whose ranks are on the hosts; guards of launchers that were killed remove files a little later."""

    late_s = 5.0


def over_ssh(
    folder: Path, hosts: Hosts, mode: str, slots: str = "a:1;b:1", flag: str = "--no_ssh_check", **environment: str
) -> Started:
    """A job through the ssh runner, outside all namespaces; ``slots`` lists hosts and their ranks."""
    folder.mkdir(exist_ok=True)
    (folder / "hostfile").write_text(slots.replace(":", " slots=").replace(";", "\n"))
    where = ["--hostfile", "hostfile", flag, "--master_addr", hosts.addresses["a"]]
    return Started(folder, [sys.executable, *RUNNER, *where], mode, **{"DS_SSH": str(hosts.ssh), **environment})


def by_hand(
    folder: Path, hosts: Hosts, node: int, mode: str, world: dict[str, list[int]], *flags: str, **environment: str
) -> Started:
    """The per-node launcher, started on one host as a user would."""
    enter = ["ip", "netns", "exec", hosts.prefix + list(world)[node], hosts.python, "-m", "deepspeed.launcher.launch"]
    where = ["--master_addr", hosts.addresses["a"], "--master_port", PORT, "--node_rank", str(node)]
    return Started(folder, [*enter, "--world_info", encode_world(world), *where, *flags], mode, **environment)


@pytest.mark.exhaustive
def test_two_hosts_reduce_through_ssh(tmp_path: Path, hosts: Hosts) -> None:
    job = over_ssh(tmp_path, hosts, "reduce", "a:1;b:2", "--launcher=ssh", DS_SSH=str(hosts.slow_ssh))
    status, out, err = job.finish()
    assert status == 0, err
    assert sorted(out.splitlines()) == ["a: sum 6", "b: sum 6", "b: sum 6"]
    ranks = [job.rank(rank) for rank in range(3)]
    names = ("LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    seen = [[int(rank["env"][name]) for name in names] for rank in ranks]
    assert seen == [[0, 1, 0, 2, 3, 1], [0, 2, 1, 2, 3, 2], [1, 2, 1, 2, 3, 2]]
    for env in (rank["env"] for rank in ranks):
        assert env["GLOO_SOCKET_IFNAME"] == "eth0"
        assert env["MASTER_ADDR"] == hosts.addresses["a"] and env["GROUP_RANK"] == env["CROSS_RANK"]
    assert ranks[2]["argv"][0] == "--local_rank=1"
    assert len({rank["env"]["TORCHELASTIC_RUN_ID"] for rank in ranks}) == 1


def test_killed_rank_ends_all_hosts_within_five_seconds(tmp_path: Path, hosts: Hosts) -> None:
    """One job whose first rank is killed, and at the same time one that loses its second."""
    jobs = [over_ssh(tmp_path / str(victim), hosts, "hang") for victim in range(2)]
    pids = [[job.rank(rank)["pid"] for rank in range(2)] for job in jobs]
    for victim in range(2):
        os.kill(pids[victim][victim], signal.SIGKILL)
    start = time.monotonic()
    wait_until(lambda: not hosts.busy(), 5, "both hosts to be empty")
    for victim, job in enumerate(jobs):
        status, _, err = job.finish()
        assert not too_long(start, 5)
        assert status == 128 + signal.SIGKILL, err
        first = f"deepspeed: rank {victim} on {'ab'[victim]} (pid {pids[victim][victim]}) failed first"
        assert err.splitlines()[-1].startswith(f"{first}, with signal SIGKILL")


@pytest.mark.exhaustive  # of ranks of one host it stays: test_launcher.py
def test_traceback_of_the_first_failure_comes_last(tmp_path: Path, hosts: Hosts) -> None:
    status, _, err = over_ssh(tmp_path, hosts, "raises_alone", "a:2;b:1").finish()
    assert status == 1, err
    assert err.rstrip().endswith("ValueError: the cause")
    assert "deepspeed: rank 2 on b " in err[err.rindex("deepspeed: ") :]
    assert err.count("Traceback") == 2  # the rank's own, with its host before it, and the verdict's
    assert "b: ValueError: the cause" in err


def test_failure_reaches_every_launcher_started_by_hand(tmp_path: Path, hosts: Hosts) -> None:
    world = {"a": [0], "b": [0]}
    jobs = [by_hand(tmp_path, hosts, node, "raises_alone", world) for node in range(2)]
    for job in jobs:
        status, _, err = job.finish()
        assert status == 1 and err.rstrip().endswith("ValueError: the cause"), err


@pytest.mark.in_make_test("a")
@pytest.mark.parametrize("victim", ["a", "b"])
def test_dead_host_ends_the_job(tmp_path: Path, hosts: Hosts, victim: str) -> None:
    job = over_ssh(tmp_path, hosts, "hang", "a:1;b:1;c:1")
    for rank in range(3):
        job.rank(rank)
    hosts.kill(victim)
    start = time.monotonic()
    wait_until(lambda: not hosts.busy(), 5, "all hosts to be empty")
    status, _, err = job.finish(left=1)
    assert not too_long(start, 6)
    assert status == 1, err
    assert f"host {victim} (node {'abc'.index(victim)}) closed its connection" in err.splitlines()[-1]


def short_limit() -> str:
    """Seconds of silence, in DS_HOST_TIMEOUT_S, after which a host is lost: few, but more than a busy machine takes."""
    return f"{slowdown():.1f}"


def test_pulled_cable_ends_the_job(tmp_path: Path, hosts: Hosts) -> None:
    world, limit = {"a": [0], "b": [0]}, short_limit()
    jobs = [by_hand(tmp_path, hosts, node, "hang", world, DS_HOST_TIMEOUT_S=limit) for node in range(2)]
    jobs[0].rank(0), jobs[1].rank(1)
    hosts.plug("b", "down")
    try:
        start = time.monotonic()
        wait_until(lambda: not hosts.busy(), 6, "both hosts to be empty")
        for job, other in zip(jobs, ("b (node 1)", "a (node 0)"), strict=True):
            status, _, err = job.finish()
            assert status == 1, err
            assert f"host {other} has not been heard for {float(limit):g} s" in err.splitlines()[-1]
        assert not too_long(start, 6)
    finally:
        hosts.plug("b", "up")


def test_suspended_command_suspends_no_rank_and_an_interrupt_is_graceful(tmp_path: Path, hosts: Hosts) -> None:
    limit = short_limit()
    job = over_ssh(tmp_path, hosts, "hang", DS_HOST_TIMEOUT_S=limit)
    pids = [job.rank(rank)["pid"] for rank in range(2)]
    job.process.send_signal(signal.SIGTSTP)
    wait_until(lambda: psutil.Process(job.process.pid).status() == psutil.STATUS_STOPPED, 5, "the command to stop")
    time.sleep(1.5 * float(limit))
    os.kill(job.process.pid, signal.SIGCONT)
    time.sleep(0.5 * float(limit))  # it has seen by then for how long it heard nothing
    assert job.process.poll() is None and all(Path(f"/proc/{pid}").exists() for pid in pids)
    job.process.send_signal(signal.SIGINT)
    status, _, err = job.finish()
    assert status == 128 + signal.SIGINT, err
    assert err.splitlines()[-1] == "deepspeed: all ranks have been stopped after SIGINT"
    assert all((job.out / f"graceful{rank}").exists() for rank in range(2))


def test_killed_command_leaves_nothing_on_any_host(tmp_path: Path, hosts: Hosts) -> None:
    job = over_ssh(tmp_path, hosts, "hang")
    job.rank(0), job.rank(1)
    job.process.kill()
    wait_until(lambda: not hosts.busy(), 5, "both hosts to be empty")
    job.finish()


def test_runner_without_input_is_told_once_and_missed_when_gone(tmp_path: Path, hosts: Hosts) -> None:
    world = {"a": [0], "b": [0]}
    jobs = [by_hand(tmp_path, hosts, node, "hang", world, "--from_runner=pdsh") for node in range(2)]
    jobs[0].rank(0), jobs[0].rank(1)
    for stream in (jobs[1].process.stdout, jobs[1].process.stderr):
        stream.close()  # as a pdsh that was killed
    wait_until(lambda: not hosts.busy(), 5, "both hosts to be empty")
    status, _, err = jobs[0].finish()
    assert status == jobs[1].process.wait() == 128 + signal.SIGTERM
    # torch may add a remark of its own about the names of these hosts.
    assert [line for line in err.splitlines() if line.startswith("deepspeed")] == [
        "deepspeed: all ranks have been stopped after SIGTERM"
    ]


def test_killed_launcher_leaves_nothing_on_its_host(tmp_path: Path, hosts: Hosts) -> None:
    core = str(min(os.sched_getaffinity(0)))
    pid_file = Path(f"/tmp/{os.getpid()}.deepspeed")
    flags = ("--bind_core_list", core, "--save_pid", str(os.getpid()))
    job = by_hand(tmp_path, hosts, 0, "hang", {"a": [0]}, *flags, OMP_NUM_THREADS="7")
    report = job.rank(0)
    assert (report["cores"], report["env"]["OMP_NUM_THREADS"]) == ([int(core)], "1")
    assert int(pid_file.read_text()) == psutil.Process(report["pid"]).ppid()
    job.process.kill()
    wait_until(lambda: not hosts.busy(), 5, "the host to be empty")
    assert not pid_file.exists()
    job.finish()


@pytest.mark.exhaustive  # on one host it stays: test_launcher.py
def test_second_interrupt_is_immediate(tmp_path: Path, hosts: Hosts) -> None:
    job = over_ssh(tmp_path, hosts, "hang")
    pids = [job.rank(rank)["pid"] for rank in range(2)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)  # no rank will react to the first
    job.process.send_signal(signal.SIGINT)
    time.sleep(0.3 * slowdown())  # so that these are two signals, and not one that is pending twice
    job.process.send_signal(signal.SIGINT)
    start = time.monotonic()
    status, _, err = job.finish()
    assert not too_long(start, 3)
    assert status == 128 + signal.SIGINT, err


def test_unreachable_host_is_named(tmp_path: Path, hosts: Hosts) -> None:
    job = over_ssh(tmp_path, hosts, "hang", "a:1;nowhere:1")
    status, _, err = job.finish()
    assert status == 1
    assert err.splitlines()[-1].startswith("deepspeed: host nowhere (node 1) cannot be reached")
    assert "No route to host" in err and not list(job.out.iterdir())


def test_absent_first_node_is_named_with_its_address(tmp_path: Path, hosts: Hosts) -> None:
    job = by_hand(tmp_path, hosts, 1, "hang", {"a": [0], "b": [0]}, DS_JOIN_TIMEOUT_S="1")
    status, _, err = job.finish()
    assert status == 1
    assert f"node 0 cannot be reached at {hosts.addresses['a']}:{PORT}" in err


def test_nodes_that_disagree_are_told(tmp_path: Path, hosts: Hosts) -> None:
    first = by_hand(tmp_path, hosts, 0, "hang", {"a": [0], "b": [0]})
    second = by_hand(tmp_path, hosts, 1, "hang", {"a": [0], "b": [0, 1]})
    status, _, err = second.finish()
    assert status == 1 and "started with other hosts or slots" in err
    first.process.send_signal(signal.SIGINT)
    status, _, err = first.finish()
    assert status == 128 + signal.SIGINT, err
    assert not list(first.out.iterdir())
