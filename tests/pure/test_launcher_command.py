"""The ``deepspeed`` command: its flags, what it refuses and shows, and that no backend outlives it."""

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from deepspeed.errors import UsageError
from deepspeed.launcher import fanout, runner
from deepspeed.launcher.launch import build_parser as node_parser
from deepspeed.launcher.runners import RUNNERS, RunnerCommand
from tests.harness.patience import too_long

ROOT = Path(__file__).resolve().parents[2]


FLAGS = """-H --hostfile -i --include -e --exclude --num_nodes --num_gpus --num_accelerators --master_port
--master_addr --node_rank
--launcher --launcher_args --module --no_python --no_local_rank --no_ssh --no_ssh_check --force_multi --save_pid
--enable_each_rank_log --hang_timeout
--autotuning --bind_cores_to_rank --bind_core_list --ssh_port --venv_script --log_level -q --quiet --elastic_training
--min_elastic_nodes --max_elastic_nodes --min_ranks --max_ranks --max_restarts --signal_grace
--dry_run --dry-run -h --help"""
NODE_FLAGS = """--node_rank --master_addr --master_port --world_info --module --no_python --no_local_rank --save_pid
--enable_each_rank_log --hang_timeout
--bind_cores_to_rank --bind_core_list --log_level -q --quiet --on_devices --from_runner -h --help
--elastic_training --min_elastic_nodes --max_elastic_nodes --min_ranks --max_ranks --max_restarts --signal_grace"""


def test_flags() -> None:
    for parser, wanted in ((runner.build_parser(), FLAGS), (node_parser(), NODE_FLAGS)):
        assert {flag for action in parser._actions for flag in action.option_strings} == set(wanted.split())
    defaults = vars(runner.parse_args(["s.py"]))
    assert (defaults["hostfile"], defaults["num_nodes"], defaults["launcher"]) == (runner.DLTS_HOSTFILE, -1, "ssh")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Current directory with ``t.py`` and ``hosts`` (h1, h2 with two slots), its ``bin`` in front of PATH, and no
    accelerator. Programs that a test starts find the package.
    """
    (tmp_path / "bin").mkdir()
    (tmp_path / "t.py").write_text("")
    (tmp_path / "hosts").write_text("h1 slots=2\nh2 slots=2\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "bin"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.delenv("DS_SSH", raising=False)
    monkeypatch.delenv("DS_ENV_FILE", raising=False)
    monkeypatch.setattr(runner, "is_this_machine", lambda host: host == "localhost")
    return tmp_path


def install(folder: Path, name: str, text: str) -> None:
    (folder / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / "bin" / name).chmod(0o755)


def status(words: str) -> int:
    try:
        runner.main(shlex.split(words))
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


MULTI = "--hostfile hosts --no_ssh_check"


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ("-H nowhere t.py", "hostfile nowhere cannot be read (No such file or directory)"),
        ("-H hosts --num_gpus 3 t.py", "--num_gpus 3, but the hostfile gives host h1 2 slot(s)"),
        ("-H hosts -i h1:7 t.py", "slot 7 of host 'h1'"),
        ("-H hosts -i h1 -e h2 t.py", "--exclude cannot be given too"),
        ("-H hosts --no_ssh t.py", "--node_rank"),
        ("-H hosts --launcher pdsh t.py", "needs the program 'pdsh', which is not on PATH; install pdsh"),
        ("-H hosts --launcher slurm t.py", "needs the program 'srun'"),
        ("--autotuning run t.py", "--autotuning is not in this release"),
        ("--max_elastic_nodes 3 t.py", "--max_elastic_nodes needs --elastic_training"),
        ("--elastic_training --num_gpus 4 --min_ranks 5 t.py", "--min_ranks 5 is above the 4 rank(s)"),
        ("--elastic_training --num_gpus 4 --min_ranks 3 --max_ranks 2 t.py", "--min_ranks 3 is above the 2 rank(s)"),
        ("--elastic_training --num_gpus 2 --min_ranks 3 --max_ranks 4 t.py", "above the 2 rank(s) of this node"),
        ("--elastic_training --min_elastic_nodes 2 --max_elastic_nodes 1 t.py", "--min_elastic_nodes 2 is above the 1"),
        ("--elastic_training --max_ranks 0 t.py", "--max_ranks 0 must be at least 1"),
        ("--elastic_training --max_restarts -1 t.py", "--max_restarts -1 cannot be negative"),
        ("--signal_grace 0 t.py", "--signal_grace 0 is not a positive number of seconds"),
        ("-H hosts --elastic_training --launcher slurm t.py", "--elastic_training needs --launcher ssh or nodes"),
        ("--master_port 70000 t.py", "--master_port 70000 is no port number"),
        ("--nun_gpus 2 t.py", "did you mean '--num_gpus'"),
        ("--log_level loud t.py", "invalid choice"),
        ("--module no_such_module_here.train", "was not found"),
        ("--no_python no_such_program", "does not exist or is not executable"),
        ("--no_python --module x", "exclude each other"),
        ("", "required"),
    ],
)
def test_refusals(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], args: str, sentence: str
) -> None:
    monkeypatch.setenv("PATH", str(folder / "bin"))  # no backend is installed
    assert status(args) == 2
    err = capsys.readouterr().err
    assert sentence in err and "Traceback" not in err


def test_a_module_that_only_a_finder_of_its_own_knows_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an editable install has one."""
    finder = SimpleNamespace(find_spec=lambda name, *_: SimpleNamespace() if name == "of_an_editable_install" else None)
    options = SimpleNamespace(user_script="of_an_editable_install.train", no_python=False, module=True)
    with pytest.raises(UsageError, match="was not found"):
        runner.check_target(options)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, finder])
    runner.check_target(options)


def test_default_hostfile_may_be_absent(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "DEFAULT_HOSTFILE", "job")
    assert status("-H job --num_gpus 3 --dry_run t.py") == 0
    out, err = capsys.readouterr()
    assert out.startswith("world: 3 rank(s) on 1 host(s)\n  localhost: the CPU, slots 0,1,2; ranks 0,1,2\n")
    assert err == ""
    (folder / "job").write_text("h1\n")
    assert status("-H job --dry_run t.py") == 2  # it is there, and wrong


def test_dry_run_shows_all_and_starts_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / ".deepspeed_env").write_text("HF_TOKEN=hidden\nPLAIN=a b\n")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.delenv("DS_ACCELERATOR")
    for launcher in ("", *RUNNERS):
        flag = f"--launcher {launcher}" if launcher else ""
        assert status(f"-H hosts --dry-run {flag} t.py it\\'s") == 0
        out = capsys.readouterr().out
        ranks = "  h1: devices 0,1; ranks 0,1\n  h2: devices 0,1; ranks 2,3\n"
        assert out.startswith(f"world: 4 rank(s) on 2 host(s)\n{ranks}meeting point: ")
        assert "  HF_TOKEN=***\n" in out and "hidden" not in out
        assert "  PLAIN=a b\n" in out and "  NCCL_DEBUG=INFO\n" in out and f"  PYTHONPATH={folder}" in out
        start = {"": "ssh", "ssh": "ssh", "slurm": "", "pdsh": "PDSH_RCMD_TYPE=ssh pdsh"}.get(launcher, "mpirun")
        assert f":\n  {start}" in out
    (folder / ".deepspeed_env").write_text("broken\n")
    assert status("-H hosts --dry_run t.py") == 2
    assert ".deepspeed_env, line 1" in capsys.readouterr().err


def test_ranks_that_a_configuration_cannot_cut_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "c.json").write_text('{"train_batch_size": 4, "tensor_parallel": {"autotp_size": 4}}')
    for words in ("--deepspeed_config c.json", "--deepspeed_config=c.json"):
        assert status(f"--num_gpus 6 --dry_run t.py {words}") == 2
        assert "c.json: tensor_parallel.autotp_size 4 does not divide the 6 ranks" in capsys.readouterr().err
    assert status("--num_gpus 8 --dry_run t.py --deepspeed_config c.json") == 0


def test_dry_run_by_hand(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status("-H hosts --node_rank 1 --no_ssh --dry_run t.py") == 0
    assert "meeting point: h1, port 29500\nnode 1 runs in this process" in capsys.readouterr().out
    assert status("--node_rank 0 --num_nodes 2 --num_gpus 1 --master_addr m --master_port 7 --dry_run t.py") == 0
    assert "node1: the CPU, slots 0; ranks 1\nmeeting point: m, port 7\nnode 0" in capsys.readouterr().out


def test_unreachable_hosts_are_named_at_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(folder, "ssh", 'for word; do case "$word" in h2) echo "ssh: no route" >&2; exit 255;; esac; done; exit 0')
    assert status("-H hosts t.py") == 2
    assert 'host h2 cannot be reached: "ssh: no route"' in capsys.readouterr().err
    install(folder, "pdsh", 'echo "$PDSH_RCMD_TYPE $1" >pdsh_words; exit 4')
    install(folder, "ssh", 'echo "$*" >>ssh_words')
    assert status("-H hosts --launcher pdsh --launcher_args='-x h9' t.py") == 4
    assert (folder / "pdsh_words").read_text() == "ssh -S\n"
    tests = sorted((folder / "ssh_words").read_text().splitlines())
    assert tests == [f"-o BatchMode=yes -o ConnectTimeout=5 {host} true" for host in ("h1", "h2")]


def test_hosts_are_reached_with_standard_output_closed(folder: Path) -> None:
    install(folder, "ssh", "echo words; echo refused >&2; exit 7")
    command = f"{sys.executable} -m deepspeed.launcher.runner {MULTI} t.py >&-"
    done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True)
    assert done.returncode == 1 and "could not start its launcher: its command ended with status 7" in done.stderr


def test_ssh_program_can_be_named(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_SSH", "mine -F 'a b'")
    assert status("-H hosts --dry_run --ssh_port 9 t.py") == 0
    alive = "-o ServerAliveInterval=3 -o ServerAliveCountMax=3"
    assert f"\n  mine -F 'a b' -o BatchMode=yes -o ConnectTimeout=10 -p 9 {alive} h1 'exec" in capsys.readouterr().out
    assert status("-H hosts t.py") == 2
    assert "needs the program 'mine'" in capsys.readouterr().err
    monkeypatch.setenv("DS_SSH", "'mine")
    assert status("-H hosts t.py") == 2
    assert "DS_SSH" in capsys.readouterr().err


@pytest.mark.parametrize(("end", "wanted"), [("exit 0", 0), ("exit 7", 7), ("kill -SEGV $$", 128 + signal.SIGSEGV)])
def test_backend_status_is_true(folder: Path, end: str, wanted: int) -> None:
    install(folder, "ompi_info", "")
    install(folder, "mpirun", f'printf "%s\\n" "$*" >words; {end}')
    assert status(f"{MULTI} --launcher OpenMPI --master_port 5 t.py a") == wanted
    assert (folder / "words").read_text().endswith(f"-x MASTER_ADDR=h1 -x MASTER_PORT=5 {sys.executable} -u t.py a\n")


def test_backend_gets_its_variables(folder: Path) -> None:
    install(folder, "mpirun", 'echo "$*" >words')
    for name, status_ in (("MVAPICH2-GDR 2.3", 0), ("other", 2)):
        install(folder, "mpiname", f"echo {name}")
        assert status(f"{MULTI} --launcher mvapich t.py") == status_
    assert "-hosts h1,h2" in (folder / "words").read_text()
    install(folder, "srun", "env >variables")
    install(folder, "sinfo", "")
    (folder / ".deepspeed_env").write_text("COMMAS=a,b c\n")
    assert status(f"{MULTI} --launcher slurm t.py") == 0
    assert "COMMAS=a,b c\n" in (folder / "variables").read_text()


def _start(folder: Path, mpirun: str) -> subprocess.Popen[str]:
    """Start the command with a backend of this text, and wait until it hears signals, which is after that starts."""
    install(folder, "ompi_info", "")
    install(folder, "mpirun", mpirun)
    command = [sys.executable, "-m", "deepspeed.launcher.runner", *MULTI.split(), "--launcher", "openmpi", "t.py"]
    env = {**os.environ, "TMPDIR": str(folder)}
    reset = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.default_int_handler)}
    job_ = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True, **reset)
    begun, status = time.monotonic(), Path(f"/proc/{job_.pid}/status")
    while not int(re.findall(r"SigCgt:\s*(\w+)", status.read_text())[0], 16) >> (signal.SIGTERM - 1) & 1:
        assert not too_long(begun, 20)
        time.sleep(0.01)
    return job_


def _await(path: Path) -> str:
    end = time.monotonic() + 60
    while not (path.exists() and path.read_text().endswith("\n")):
        assert time.monotonic() < end, path
        time.sleep(0.02)
    return path.read_text().strip()


def _ends(pid: int) -> None:
    begun, stat = time.monotonic(), Path(f"/proc/{pid}/stat")
    with contextlib.suppress(FileNotFoundError):
        while "Z" not in stat.read_text().rpartition(")")[2][:3]:
            assert not too_long(begun, 5)
            time.sleep(0.02)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_reach_the_backend_once_and_what_it_has_started(folder: Path, number: signal.Signals) -> None:
    """An mpirun may be a script that passes no signal on. What a shell runs beside itself ignores Ctrl-C."""
    begins = "sleep 60 &\necho $! >pid" if number == signal.SIGTERM else "echo $$ >pid"
    script = f"trap 'echo got >>got; exit 3' {number.name[3:]}\n{begins}\nwhile :; do sleep 0.05; done"
    job_ = _start(folder, script)
    pid = int(_await(folder / "pid"))
    job_.send_signal(number)
    assert job_.wait(timeout=60) == 128 + number
    job_.communicate()
    assert (folder / "got").read_text() == "got\n"
    _ends(pid)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_what_the_backend_started_does_not_survive_the_command(folder: Path) -> None:
    job_ = _start(folder, "sleep 60 &\necho $! >pid\nwait")
    pid = int(_await(folder / "pid"))
    job_.kill()
    _ends(pid)
    job_.communicate()


def test_a_backend_that_has_just_begun_does_not_survive_the_command(tmp_path: Path) -> None:
    """The command is killed before it comes to know that the backend runs."""
    code = f"""
import os, signal, subprocess, time
from pathlib import Path
from deepspeed.launcher import fanout
from deepspeed.launcher.runners import RunnerCommand

class Late(subprocess.Popen):
    def __init__(self, argv, **more):
        super().__init__(argv, **more)
        pid = Path("{tmp_path}/pid")
        while argv[0] == "sh" and not (pid.exists() and pid.read_text()):
            time.sleep(0.01)
        if argv[0] == "sh":
            os.kill(os.getpid(), signal.SIGKILL)

subprocess.Popen = Late
fanout.run_backend(RunnerCommand(("sh", "-c", "echo $$ >{tmp_path}/pid; sleep 60; exit"), {{}}))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60)
    assert done.returncode == -signal.SIGKILL
    _ends(int(_await(tmp_path / "pid")))


def test_quick_answers_need_no_torch(folder: Path) -> None:
    code = """
import sys
from deepspeed.launcher import runner
for args in ("--help", "-H nowhere t.py", "-H hosts --dry_run t.py", "--dry_run t.py", "--autotuning run t.py"):
    try:
        runner.main(args.split())
    except SystemExit:
        pass
assert "torch" not in sys.modules
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_backend_starts_ends_it(tmp_path: Path, number: signal.Signals) -> None:
    def start(*args: Any, **kwargs: Any) -> "subprocess.Popen[bytes]":
        child = subprocess.Popen(*args, **kwargs)
        _await(tmp_path / "ready")
        os.kill(os.getpid(), number)
        return child

    script = f"trap 'exit 3' {number.name[3:]}\necho 1 >{tmp_path}/ready\nwhile :; do sleep 0.05; done"
    with mock.patch.object(fanout, "subprocess", SimpleNamespace(Popen=start)):
        assert fanout.run_backend(RunnerCommand(("/bin/sh", "-c", script), {})) == 128 + number
