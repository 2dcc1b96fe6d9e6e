"""Command lines of every backend, word by word, and what each refuses."""

import re
import shlex
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from deepspeed.errors import UsageError
from deepspeed.launcher import runner
from deepspeed.launcher.job import Job, decode_world, encode_world, parse_line
from deepspeed.launcher.launch import build_parser as node_parser, make_job as node_make_job
from deepspeed.launcher.runners import RANK_FROM_MPI, RUNNERS, RunnerCommand, node_command, prepare, ssh_command
from tests.harness.rows import for_each

ROOT = Path(__file__).resolve().parents[2]
WORLD = {"h1": (0, 1), "h2": (0, 1)}
EXPORTS = {"NCCL_DEBUG": "INFO", "ODD": "a b $HOME 'q' \"d\" 50%"}
RANK = ("py", "-u", "t.py", "--x", "a b")


def job(**fields: object) -> Job:
    plain = {"script": "t.py", "arguments": ("--x", "a b"), "master_addr": "h1", "master_port": 1234, "python": "py"}
    return Job(**{**plain, "world": WORLD, "exports": EXPORTS, "cwd": "/c d", **fields})


def options(*flags: str) -> Namespace:
    """What the command makes of its ``flags``."""
    given = runner.parse_args([*flags, "t.py"])
    prepare(given)
    return given


def build(job_: Job, launcher: str, *flags: str) -> RunnerCommand:
    how = RUNNERS[launcher].build
    assert how is not None
    return how(job_, options("--launcher", launcher, *flags))


def words(launcher: str, *flags: str, job_: Job | None = None) -> list[str]:
    return list(build(job_ or job(), launcher, *flags).argv)


# ssh and pdsh


def test_ssh() -> None:
    head = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"]
    alive = ["-o", "ServerAliveInterval=3", "-o", "ServerAliveCountMax=3"]
    *start, text = ssh_command(job(), 1, options("--ssh_port", "22", "--launcher_args=-4"))
    assert start == [*head, "-p", "22", "-4", *alive, "h2"]
    *shell, script = shlex.split(text)
    assert shell == ["exec", "/bin/sh", "-c"]
    quoted = "'a b $HOME '\"'\"'q'\"'\"' \"d\" 50%'"
    assert script == (
        f"cd '/c d' && export NCCL_DEBUG=INFO ODD={quoted} && exec py -u -m deepspeed.launcher.launch "
        f"--from_runner=ssh --world_info={encode_world(WORLD)} --node_rank=1 --master_addr=h1 --master_port=1234 "
        "--log_level=info t.py --x 'a b'"
    )


@pytest.mark.parametrize("venv", [None, "activate me"])
def test_what_ssh_sends_survives_two_shells(tmp_path: Path, venv: str | None) -> None:
    """The text goes to the login shell, and from there to another."""
    nasty = ("a b", "$HOME", "it's", '"', "\\", "new\nline", "*", "", "--", "`id`", "!x", "50%n")
    program = tmp_path / "show"
    program.write_text(
        f"#!{sys.executable}\nimport os, sys\nprint(sys.argv[1:], os.getcwd(), os.environ['ODD'], "
        "os.environ.get('SOURCED'))\n"
    )
    program.chmod(0o755)
    (tmp_path / "activate me").write_text("SOURCED=yes\nexport SOURCED\n")
    given = job(python=str(program), cwd=str(tmp_path), arguments=nasty)
    text = ssh_command(given, 0, options(*(("--venv_script", venv) if venv else ())))[-1]
    done = subprocess.run(["/bin/sh", "-c", text], capture_output=True, text=True, timeout=20, check=True)
    command = node_command(given, 0, runner="ssh")
    assert done.stdout == f"{command[1:]} {tmp_path} {EXPORTS['ODD']} {'yes' if venv else None}\n"


def test_node_command_is_what_the_node_launcher_reads() -> None:
    fields = {"module": True, "local_rank_argument": False, "on_devices": True, "log_dir": "l d", "bind_cores": True}
    fields |= {"core_list": "0-1", "log_level": "debug", "master_port": 0}
    given = job(**fields, save_pid=77)
    command = node_command(given, 1, runner="pdsh")
    parsed = parse_line(node_parser(), command[4:])
    assert parsed.from_runner == "pdsh" and parsed.node_rank == 1
    read = node_make_job(parsed)
    for field in (*fields, "world", "script", "arguments", "master_addr"):
        assert getattr(read, field) == getattr(given, field), field
    assert read.pid_file == "/tmp/77.deepspeed"
    assert parse_line(node_parser(), node_command(job(no_python=True), 0)[4:]).no_python


def test_pdsh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSH_SSH_ARGS_APPEND", "-q")
    found = build(job(), "pdsh", "--launcher_args=-u 9", "--ssh_port", "22")
    assert found.env == {"PDSH_RCMD_TYPE": "ssh", "PDSH_SSH_ARGS_APPEND": "-q -p 22"}
    assert found.argv[:-1] == ("pdsh", "-S", "-b", "-f", "1024", "-w", "h1,h2", "-u", "9")
    text = found.argv[-1]
    assert text.count("--node_rank=%n ") == 1 and "50%%" in text
    as_ssh = text.replace("%n", "1").replace("%%", "%").replace(" </dev/null", "").replace("=pdsh", "=ssh")
    assert as_ssh == ssh_command(job(), 1, options())[-1]


# MPI and Slurm


def test_openmpi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hf").write_text("h1 slots=2\n")
    pairs = {"UCX_TLS": "tcp", **VARIABLES}
    exports = [word for name, value in pairs.items() for word in ("-x", f"{name}={value}")]
    head = ["mpirun", "-n", "4", "-hostfile", "hf", "--mca", "btl", "^openib"]
    # no interface is named: few machines have an eth0
    assert words("openmpi", "-H", "hf") == [*head, *exports, *RANK]
    own = ("--mca", "btl_tcp_if_include", "ib0")
    assert words("openmpi", "-H", "hf", f"--launcher_args={shlex.join(own)}") == [*head, *own, *exports, *RANK]
    assert "-hostfile" not in words("openmpi")
    users = words("openmpi", job_=job(exports={"UCX_TLS": "rc"}))
    assert "UCX_TLS=rc" in users and "UCX_TLS=tcp" not in users
    # it reads unequal slots from the hostfile
    assert words("openmpi", job_=job(world={"h1": (0, 1, 2), "h2": (0,)}))[2] == "4"
    assert words("openmpi", job_=job(module=True))[-6:] == ["py", "-u", "-m", "t.py", "--x", "a b"]
    assert words("openmpi", job_=job(no_python=True))[-4:] == ["MASTER_PORT=1234", "t.py", "--x", "a b"]


VARIABLES = {**EXPORTS, "MASTER_ADDR": "h1", "MASTER_PORT": "1234"}
SIZES = {"WORLD_SIZE": "4", "LOCAL_SIZE": "2"}
GENV = [word for name, value in (VARIABLES | SIZES).items() for word in ("-genv", name, value)]


def test_mpich() -> None:
    head = ["mpirun", "-n", "4", "-ppn", "2", "-v", *GENV, "-hosts", "h1,h2", *RANK_FROM_MPI]
    assert words("mpich", "--launcher_args=-v") == [*head, *RANK]
    assert words("mpich", job_=job(module=True))[-4:] == ["-m", "t.py", "--x", "a b"]


def test_impi() -> None:
    head = ["mpirun", "-n", "4", "-ppn", "2", "-v", *GENV, "-genv", "I_MPI_PIN", "0", "-hosts", "h1,h2"]
    assert words("impi", "--launcher_args=-v") == [*head, *RANK_FROM_MPI, *RANK]


def test_mvapich() -> None:
    argv = words("mvapich", job_=job(on_devices=True))
    assert argv[:5] == ["mpirun", "-n", "4", "-ppn", "2"] and argv[-7:] == ["-hosts", "h1,h2", *RANK]
    pairs = {argv[index + 1]: argv[index + 2] for index, word in enumerate(argv) if word == "-genv"}
    assert pairs == {
        "MV2_SMP_USE_CMA": "0",
        "MV2_DEBUG_SHOW_BACKTRACE": "1",
        "MV2_SUPPORT_DL": "1",
        "MV2_ENABLE_AFFINITY": "0",
        "MV2_INTER_ALLGATHER_TUNING": "5",
        "MV2_CUDA_USE_NAIVE": "0",
        "MV2_USE_CUDA": "1",
        **VARIABLES,
    }
    assert "MV2_USE_CUDA" not in words("mvapich")


def test_slurm() -> None:
    found = build(job(master_addr="", master_port=0), "slurm", "--launcher_args=-p gpu")
    hosts = ["--nodelist", "h1,h2", "--nodes", "2", "--ntasks-per-node", "2"]
    assert list(found.argv) == ["srun", "-n", "4", "-p", "gpu", *hosts, "--export=ALL", *RANK]
    assert found.env == EXPORTS  # values may have commas, at which --export would split them
    found = build(job(), "slurm", "--num_gpus", "2")
    assert list(found.argv[9:12]) == ["--gpus-per-node", "2", "--export=ALL"]
    assert found.env == VARIABLES


UNEQUAL = {"h1": (0, 1), "h2": (0,)}


@for_each(
    ("launchers", "fields", "flags", "sentence"),
    [
        (
            "mpich impi mvapich slurm",
            {"world": UNEQUAL},
            "",
            "same number of slots on every host, but h1 has 2, h2 has 1",
        ),
        ("openmpi mpich impi mvapich", {}, "-i h1", "--include does not work with --launcher"),
        ("openmpi mpich impi mvapich", {}, "--num_gpus 1", "--num_gpus does not work with --launcher"),
        ("openmpi mpich impi mvapich", {"arguments": ("a", ":", "b")}, "", "the argument ':'"),
        ("slurm", {"world": {"h1": (1, 2)}}, "", "first devices of every host, but h1 is to use 1,2"),
        ("openmpi mpich impi mvapich slurm", {"log_dir": "l"}, "", "--enable_each_rank_log has no effect"),
        ("openmpi mpich impi mvapich slurm", {"bind_cores": True}, "", "--bind_cores_to_rank has no effect"),
        ("openmpi mpich impi mvapich slurm", {"core_list": "0"}, "", "--bind_core_list has no effect"),
        ("openmpi mpich impi mvapich slurm", {"save_pid": 7}, "", "--save_pid has no effect"),
        ("openmpi mpich impi mvapich slurm", {}, "--venv_script v", "--venv_script has no effect"),
        ("openmpi mpich impi mvapich slurm", {}, "--ssh_port 7", "--ssh_port has no effect"),
    ],
)
def test_restrictions_are_sentences(launchers: str, fields: dict, flags: str, sentence: str) -> None:
    for launcher in launchers.split():
        with pytest.raises(UsageError, match=re.escape(sentence)):
            build(job(**fields), launcher, *flags.split())


def test_names_and_words() -> None:
    assert options("--launcher", "OpenMPI").launcher == "openmpi"
    assert " ".join(RUNNERS) == "ssh pdsh openmpi mpich impi mvapich slurm"
    with pytest.raises(UsageError, match="--launcher 'slrum' is unknown, did you mean 'slurm'"):
        options("--launcher", "slrum")
    assert options("--launcher_args=-x 'a b'").launcher_args == ("-x", "a b")
    with pytest.raises(UsageError, match="cannot be split"):
        options("--launcher_args='a")
    assert decode_world(runner.encode_world_info({"a": [0, 2]})) == {"a": (0, 2)}


def test_ranks_of_mpi_get_the_variables_that_scripts_read() -> None:
    show = "import os, sys; print(os.environ['RANK'], os.environ['LOCAL_RANK'], sys.argv[1:])"

    def become(**variables: str) -> subprocess.CompletedProcess[str]:
        command = [*RANK_FROM_MPI, sys.executable, "-c", show, "--", "-x y"]
        return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=20)

    assert become(PMI_RANK="3", MPI_LOCALRANKID="1").stdout == "3 1 ['--', '-x y']\n"
    assert become(PMIX_RANK="2", PALS_LOCAL_RANKID="0", PMI_RANK="9").stdout.startswith("2 0 ")
    failed = become(PMI_RANK="3")
    assert failed.returncode != 0 and "MPI_LOCALRANKID" in failed.stderr and "start this with mpirun" in failed.stderr
