"""The launcher: exit statuses, environment, signals, ports, and that nothing is left behind."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from deepspeed.launcher import runner
from deepspeed.launcher.job import encode_world
from deepspeed.launcher.node.ranks import Guard, Ranks
from tests.harness.launched import ROOT, RUNNER, START_S, Launched, environment, wait_until
from tests.harness.patience import slowdown, too_long
from tests.harness.rows import for_each
from tests.harness.warm import Warm


class Job(Launched):
    """One launcher of this machine."""

    python = sys.executable

    def __init__(
        self, folder: Path, *flags: str, mode: str = "ok", user_args: tuple[str, ...] = (), target: str = ""
    ) -> None:
        super().__init__(folder, [self.python, *RUNNER, *flags], mode, *user_args, script=target)

    def finish(self, *, left: int = 0) -> tuple[int, str, str]:
        """Status, stdout and stderr; the job and its temporary files must be gone."""
        ended = super().finish(left=left)
        for file in self.out.glob("rank*.json"):
            report = json.loads(file.read_text())
            for pid in (report["pid"], report["child"]):
                assert not is_alive(pid), f"process {pid} of {file.name} is left"
        return ended


@pytest.fixture(autouse=True, scope="module")
def quick(warm: Warm) -> Iterator[None]:
    """Launchers start at once."""
    Job.python = warm.python
    yield
    Job.python = sys.executable


def is_alive(pid: int) -> bool:
    try:
        return pid > 0 and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_environment_and_arguments_reach_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    user_args = ("--num_gpus", "7", "--", "-q", "$HOME $$ ${local_rank}", "--deepspeed")
    job = Job(tmp_path / "a", "--num_gpus", "2", user_args=user_args)
    reports = [job.rank(rank) for rank in range(2)]
    status, out, err = job.finish()
    assert status == 0, err
    assert "rank 0 done" in out and "rank 1 done" in out
    assert err.count("starting 2 ranks on the CPU") == 1
    for rank, report in enumerate(reports):
        env = report["env"]
        assert report["argv"][: len(user_args) + 1] == [f"--local_rank={rank}", *user_args]
        wanted = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_SIZE": 2, "CROSS_RANK": 0, "CROSS_SIZE": 1}
        assert {name: int(env[name]) for name in wanted} == wanted
        assert env["MASTER_ADDR"] == "127.0.0.1" and int(env["MASTER_PORT"]) > 0
        assert int(env["OMP_NUM_THREADS"]) == max(1, len(os.sched_getaffinity(0)) // 2)
        assert env["PYTHONPATH"] == str(ROOT) and "DS_CRASH_REPORT" not in env


def test_module_without_local_rank_and_with_one_log_per_rank(tmp_path: Path) -> None:
    flags = ("--num_gpus", "2", "--no_local_rank", "--enable_each_rank_log", "logs", "--module")
    job = Job(tmp_path / "a", *flags, target="script")
    status, out, err = job.finish()
    assert status == 0, err
    assert "done" not in out
    assert not job.rank(0)["argv"][0].startswith("--local_rank")
    logs = sorted((tmp_path / "a" / "logs").iterdir())
    assert [log.name.partition("_")[2] for log in logs] == ["rank0.log", "rank1.log"]
    assert "rank 1 done" in logs[1].read_text()


def test_status_is_that_of_the_rank_that_failed_first(tmp_path: Path) -> None:
    statuses = {"exit3": 3, "raise": 1, "segv": 128 + signal.SIGSEGV}
    jobs = {mode: Job(tmp_path / mode, "--num_gpus", "2", mode=mode) for mode in statuses}
    for mode, job in jobs.items():
        status, _, err = job.finish()
        assert status == statuses[mode], err
        verdict = err[err.rindex("deepspeed: rank") :]
        assert f"rank {0 if mode == 'segv' else 1} " in verdict
        if mode == "raise":
            assert "a consequence" in err[: -len(verdict)] and verdict.rstrip().endswith("ValueError: the cause")


def test_kill_minus_nine_of_one_rank_ends_all_within_five_seconds(tmp_path: Path) -> None:
    job = Job(tmp_path / "a", "--num_gpus", "2", mode="hang")
    victim = [job.rank(0), job.rank(1)][1]
    os.kill(victim["pid"], signal.SIGKILL)
    start = time.monotonic()
    status, _, err = job.finish()
    assert not too_long(start, 5)
    assert status == 128 + signal.SIGKILL, err
    assert "rank 1 " in err and "SIGKILL" in err


def test_interrupt_reaches_the_ranks_once_and_a_second_is_immediate(tmp_path: Path) -> None:
    job, stuck = (Job(tmp_path / name, "--num_gpus", "2", mode="hang") for name in ("job", "stuck"))
    job.rank(0), job.rank(1)
    job.process.send_signal(signal.SIGINT)
    status, _, err = job.finish()
    assert status == 128 + signal.SIGINT, err
    assert all((job.out / f"graceful{rank}").exists() for rank in range(2))
    for rank in range(2):
        os.kill(stuck.rank(rank)["pid"], signal.SIGSTOP)  # neither will react to the first
    stuck.process.send_signal(signal.SIGINT)
    time.sleep(0.3 * slowdown())  # so that these are two signals, and not one that is pending twice
    start = time.monotonic()
    stuck.process.send_signal(signal.SIGINT)
    status, _, err = stuck.finish()
    assert not too_long(start, 3)
    assert status == 128 + signal.SIGINT, err


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux only")
def test_ranks_do_not_survive_a_killed_launcher(tmp_path: Path) -> None:
    job = Job(tmp_path / "a", "--num_gpus", "2", mode="hang")
    reports = [job.rank(0), job.rank(1)]
    pids = [pid for report in reports for pid in (report["pid"], report["child"])]
    job.process.kill()
    job.process.wait()
    wait_until(lambda: not any(map(is_alive, pids)), 5, "the ranks and their children to end")
    wait_until(lambda: not list(job.scratch.iterdir()), 5, "the temporary files to go")
    job.finish()


KILLED_AS_IT_MAKES_ITS_FOLDER = """
import os, signal, sys

from deepspeed.launcher import launch

mkdir = os.mkdir
def last_act(path, *rest, **more):
    mkdir(path, *rest, **more)
    if os.path.dirname(path) == os.environ["TMPDIR"]:
        os.kill(os.getpid(), signal.SIGKILL)
os.mkdir = last_act
launch.main(sys.argv[1:])
"""


@pytest.mark.parametrize("flags", [[], ["--elastic_training"]], ids=["fixed", "elastic"])
def test_a_launcher_killed_as_it_makes_its_temporary_folder_leaves_none(tmp_path: Path, flags: list[str]) -> None:
    command = [Job.python, "-c", KILLED_AS_IT_MAKES_ITS_FOLDER, "--world_info", encode_world({"localhost": [0]})]
    env = environment(TMPDIR=str(tmp_path))
    ended = subprocess.run([*command, *flags, __file__], env=env, capture_output=True, text=True, timeout=START_S)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    wait_until(lambda: not list(tmp_path.iterdir()), 5, "the temporary folder to go")


def test_children_of_killed_ranks_have_ended_when_their_launcher_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where SIGKILL takes effect late, as it does on a busy machine."""
    guardian, ended = Guard(), threading.Event()
    ranks = Ranks(guardian, lambda exitcode: ended.set(), scratch=str(tmp_path), stdin=None)
    try:
        ranks.start(0, ["sh", "-c", f"sleep 300 & echo $! >{tmp_path}/child; exit 3"], {}, "", ())
        assert ended.wait(START_S)
        child = int((tmp_path / "child").read_text())
        killpg, late = os.killpg, threading.Timer(0.2, lambda: os.kill(child, signal.SIGKILL))
        monkeypatch.setattr(os, "killpg", lambda group, number: late.start() if number else killpg(group, 0))
        ranks.kill_groups()
        ranks.reap()
        assert not is_alive(child)
        late.join()
    finally:
        guardian.dismiss()


def test_a_rank_that_its_thread_has_not_seen_end_is_left_to_it_by_what_reaps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the thread has nothing to wait for, and ends with a traceback in what the user reads."""
    ends, seen, wait, guardian = list[int](), threading.Event(), os.waitid, Guard()
    ranks = Ranks(guardian, ends.append, scratch=str(tmp_path), stdin=None)
    monkeypatch.setattr(os, "waitid", lambda *args: wait(*args) if seen.wait(START_S) else None)
    try:
        ranks.start(0, ["sleep", "300"], {}, "", ())
        ((_, process),) = ranks._processes
        ranks.kill_groups()
        wait(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        ranks.reap()
        seen.set()
        wait_until(lambda: ends, START_S, "the thread to see the end")
        assert ends == [-signal.SIGKILL]
        ranks.reap()
        assert process.returncode == -signal.SIGKILL
    finally:
        seen.set()
        guardian.dismiss()


def test_program_that_cannot_be_started_is_the_rank_s_failure(tmp_path: Path) -> None:
    (tmp_path / "program").write_text("#!/no/such\n")
    (tmp_path / "program").chmod(0o755)
    status, _, err = Job(tmp_path / "a", "--no_python", target=str(tmp_path / "program")).finish()
    assert status in (126, 127) and str(tmp_path / "program") in err and f"with exit status {status}" in err


def test_jobs_started_together_all_find_a_port_and_have_one_cpu_rank_and_the_users_thread_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    jobs = [Job(tmp_path / str(index), "-q") for index in range(4)]
    variables = [job.rank(0)["env"] for job in jobs]
    finished = [job.finish() for job in jobs]
    assert [(status, err) for status, _, err in finished] == [(0, "")] * 4
    assert len({env["MASTER_PORT"] for env in variables}) == 4
    assert {(env["WORLD_SIZE"], env["OMP_NUM_THREADS"]) for env in variables} == {("1", "3")}


@for_each("user_args", [["--", "a"], ["--"], ["--", "--", "-q"], ["a", "--"], []])
def test_double_dashes_belong_to_the_script(user_args: list[str]) -> None:
    options = runner.parse_args(["--num_gpus", "2", "s.py", *user_args])
    assert (options.user_script, options.user_args, options.num_gpus) == ("s.py", user_args, 2)


def test_taken_port_is_refused_before_any_rank_starts(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        job = Job(tmp_path / "a", "--master_port", str(taken.getsockname()[1]))
        status, _, err = job.finish()
    assert status == 2 and "cannot listen on 127.0.0.1" in err
    assert list(job.out.iterdir()) == []


def test_hostfile_and_filters_as_other_programs_call_them(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("# nodes\n\nworker-0 slots=2 extra\nworker-1 slots=4\n")
    pool = runner.fetch_hostfile(str(hostfile))
    assert pool == {"worker-0": 2, "worker-1": 4}
    assert runner.fetch_hostfile(str(tmp_path / "none")) is None
    assert runner.parse_inclusion_exclusion(pool, "worker-1:3,0@worker-1:1", "") == {"worker-1": [0, 1, 3]}
    assert runner.parse_inclusion_exclusion(pool, "", "worker-0@worker-1:0") == {"worker-1": [1, 2, 3]}
    with pytest.raises(ValueError, match="elsewhere"):
        runner.parse_inclusion_exclusion(pool, "elsewhere", "")
    hostfile.write_text("worker-0 2\n")
    with pytest.raises(ValueError, match="hostfile"):
        runner.fetch_hostfile(str(hostfile))
    assert runner.encode_world_info({"a": [0]}) == "eyJhIjogWzBdfQ=="


@pytest.mark.skipif(
    sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2,
    reason="needs two cores, and a kernel that binds to them",
)
def test_bound_ranks_and_the_pid_file(tmp_path: Path) -> None:
    job = Job(tmp_path / "a", "--num_gpus", "2", "--bind_cores_to_rank", "--save_pid", mode="hang")
    reports = [job.rank(rank) for rank in range(2)]
    cores = [os.sched_getaffinity(report["pid"]) for report in reports]
    assert not cores[0] & cores[1] and len(cores[0]) == len(cores[1])
    assert {report["env"]["OMP_NUM_THREADS"] for report in reports} == {str(len(cores[0]))}
    launcher = psutil.Process(reports[0]["pid"]).ppid()
    pid_file = Path(f"/tmp/{launcher}.deepspeed")
    assert pid_file.read_text() == str(launcher)
    job.process.send_signal(signal.SIGINT)
    assert job.finish()[0] == 128 + signal.SIGINT
    assert not pid_file.exists()


def test_nodes_started_by_hand_without_a_hostfile(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    flags = ("--num_nodes", "2", "--num_gpus", "1", "--master_addr", "127.0.0.1", "--master_port", port)
    nodes = [Job(tmp_path / str(node), *flags, "--node_rank", str(node)) for node in (1, 0)]
    for rank, job in zip((1, 0), nodes, strict=True):
        env = job.rank(rank)["env"]
        found = [env[name] for name in ("LOCAL_RANK", "CROSS_RANK", "CROSS_SIZE", "MASTER_PORT")]
        assert found == ["0", str(rank), "2", port]
    assert [job.finish()[0] for job in nodes] == [0, 0]


def test_interrupt_while_looking_for_the_first_node(tmp_path: Path) -> None:
    """Something answers at the address and never becomes a first node; the launcher has no other to tell, and ends with
    its signal.
    """
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        silent.settimeout(START_S)
        where = ("--master_addr", "127.0.0.1", "--master_port", str(silent.getsockname()[1]))
        job = Job(tmp_path / "a", "--num_nodes", "2", "--num_gpus", "1", *where, "--node_rank", "1")
        silent.accept()[0].close()  # it is looking
        job.process.send_signal(signal.SIGINT)
        status, _, err = job.finish()
    assert status == 128 + signal.SIGINT, err
    assert "Traceback" not in err and list(job.out.iterdir()) == []
