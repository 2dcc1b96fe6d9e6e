"""How a job reaches its hosts, as pure functions from a job to command lines, run or only shown.

Two kinds of runner. *ssh* and *pdsh* start one launcher per host (``deepspeed.launcher.launch``), which starts and
watches its ranks. *MPI* (openmpi, mpich, impi, mvapich) and *Slurm* start the ranks themselves; each rank learns from
their variables who it is (``deepspeed.comm.discovery``), and flags that need a launcher on every host are refused.
"""

import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from deepspeed.errors import UsageError, nearest_hint
from deepspeed.launcher.environment import masked
from deepspeed.launcher.job import Job, encode_world
from deepspeed.launcher.node.loop import silence_limit
from deepspeed.launcher.resources import Location

CONNECT_TIMEOUT_S = 10
_PDSH_FANOUT = 1024
# Values that MVAPICH needs for buffers on devices and for a launcher that does not bind ranks itself.
_MVAPICH = {
    "MV2_SMP_USE_CMA": "0",
    "MV2_DEBUG_SHOW_BACKTRACE": "1",
    "MV2_SUPPORT_DL": "1",
    "MV2_ENABLE_AFFINITY": "0",
    "MV2_INTER_ALLGATHER_TUNING": "5",
    "MV2_CUDA_USE_NAIVE": "0",
}
# Scripts read RANK and LOCAL_RANK themselves. PMIX and PALS: MPICH of HPE Cray systems.
RANK_FROM_MPI: tuple[str, ...] = (
    "/bin/sh",
    "-c",
    "export RANK=${PMIX_RANK:-${PMI_RANK:?is not set; start this with mpirun}} "
    "LOCAL_RANK=${PALS_LOCAL_RANKID:-${MPI_LOCALRANKID:?is not set; start this with mpirun}} && "
    'exec "$0" "$@"',
)


@dataclass(frozen=True)
class RunnerOptions:
    """What the command line says about reaching the hosts; ``selected_by``: flags that chose hosts or devices."""

    launcher: str = "ssh"
    launcher_args: tuple[str, ...] = ()
    ssh: tuple[str, ...] = ("ssh",)
    ssh_port: int | None = None
    venv_script: str | None = None
    hostfile: str | None = None
    selected_by: tuple[str, ...] = ()


class RunnerCommand(NamedTuple):
    """One process to start: its arguments, and variables on top of this process's own."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = {}


class Runner(NamedTuple):
    """One backend: programs that must be on PATH, where they come from, and whether it starts a launcher per host."""

    programs: tuple[str, ...]
    install: str
    build: Callable[[Job, RunnerOptions], RunnerCommand] | None
    per_host: bool = False


def split_arguments(text: str, *, source: str = "--launcher_args") -> tuple[str, ...]:
    """Words of ``text`` as a shell would split them. Raises UsageError naming ``source`` for an open quote."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(f"{source} {text!r} cannot be split into words: {error}") from error


def node_command(job: Job, node_rank: int | str, *, runner: str = "") -> list[str]:
    """Arguments of the launcher of one node, for a person or a ``runner``, which may fill in ``node_rank`` itself."""
    flags = {
        "--on_devices": job.on_devices,
        "--module": job.module,
        "--no_python": job.no_python,
        "--no_local_rank": not job.local_rank_argument,
        "--bind_cores_to_rank": job.bind_cores,
    }
    values = {
        "--from_runner": runner or None,
        "--world_info": encode_world(job.world),
        "--node_rank": node_rank,
        "--master_addr": job.master_addr,
        "--master_port": job.master_port,
        "--log_level": job.log_level,
        "--save_pid": job.save_pid or None,
        "--enable_each_rank_log": job.log_dir,
        "--bind_core_list": job.core_list,
    }
    words = [flag for flag, given in flags.items() if given]
    words += [f"{flag}={value}" for flag, value in values.items() if value is not None]
    return [job.python, "-u", "-m", "deepspeed.launcher.launch", *words, job.script, *job.arguments]


def _remote_text(job: Job, command: str, options: RunnerOptions) -> str:
    """The one text that a host's login shell is given: an ordinary shell (users' may differ) becomes ``command``."""
    steps = [f"cd {shlex.quote(job.cwd)}"]
    if options.venv_script:
        script = options.venv_script if "/" in options.venv_script else f"./{options.venv_script}"
        steps.append(f". {shlex.quote(script)}")
    if job.exports:
        steps.append("export " + " ".join(f"{name}={shlex.quote(value)}" for name, value in job.exports.items()))
    steps.append(f"exec {command}")
    # Scripts that set up an environment are written for bash.
    shell = "bash" if options.venv_script else "/bin/sh"
    return f"exec {shell} -c {shlex.quote(' && '.join(steps))}"


def ssh_prefix(host: str, *, options: RunnerOptions, connect_timeout_s: int = CONNECT_TIMEOUT_S) -> list[str]:
    """The ssh command line up to and with ``host``. Nobody can answer a question of ssh's, so it must not ask any."""
    port = ["-p", str(options.ssh_port)] if options.ssh_port is not None else []
    more = options.launcher_args if options.launcher == "ssh" else ()
    return [*options.ssh, "-o", "BatchMode=yes", "-o", f"ConnectTimeout={connect_timeout_s}", *port, *more, host]


def ssh_command(job: Job, node_rank: int, *, options: RunnerOptions) -> list[str]:
    """The local ssh process that runs node ``node_rank``; ``job.master_port`` 0 passes through for node 0 to choose."""
    command = shlex.join(node_command(job, node_rank, runner="ssh"))
    *start, host = ssh_prefix(job.hosts[node_rank], options=options)
    # ssh itself ends when three questions to a silent host stay without an answer.
    alive = ("-o", f"ServerAliveInterval={max(1, round(silence_limit() / 3))}", "-o", "ServerAliveCountMax=3")
    return [*start, *alive, host, _remote_text(job, command, options)]


def _pdsh(job: Job, options: RunnerOptions) -> RunnerCommand:
    # Its ssh processes keep an input open on which nothing ever comes.
    command = f"{shlex.join(node_command(job, 'PDSH_RANK', runner='pdsh'))} </dev/null"
    text = _remote_text(job, command, options)
    # pdsh replaces %n by the number of the host, and expects percent signs that mean themselves twice.
    text = text.replace("%", "%%").replace("--node_rank=PDSH_RANK", "--node_rank=%n", 1)
    env = {"PDSH_RCMD_TYPE": "ssh"}
    if options.ssh_port is not None:
        env["PDSH_SSH_ARGS_APPEND"] = f"{os.environ.get('PDSH_SSH_ARGS_APPEND', '')} -p {options.ssh_port}".strip()
    # -S: the largest status of all hosts; -b: one Ctrl-C ends it.
    head = ("pdsh", "-S", "-b", "-f", str(_PDSH_FANOUT), "-w", ",".join(job.hosts))
    return RunnerCommand((*head, *options.launcher_args, text), env)


def _refuse(job: Job, options: RunnerOptions, *, mpi: bool = True) -> None:
    """Raise UsageError for what only a launcher on every host could do, and what an mpirun does not do."""
    name = options.launcher
    given = {
        "--enable_each_rank_log": job.log_dir is not None,
        "--bind_cores_to_rank": job.bind_cores,
        "--bind_core_list": job.core_list is not None,
        "--save_pid": job.save_pid != 0,
        "--venv_script": options.venv_script is not None,
        "--ssh_port": options.ssh_port is not None,
    }
    if flag := next((flag for flag, wanted in given.items() if wanted), None):
        raise UsageError(
            f"{flag} has no effect with --launcher {name}, which starts the ranks itself; use {name}'s own option "
            "through --launcher_args, or --launcher ssh"
        )
    if mpi and options.selected_by:
        raise UsageError(
            f"{options.selected_by[0]} does not work with --launcher {name}, which takes the hosts and "
            "slots of the hostfile as they are; write a hostfile with just those, or use --launcher ssh"
        )
    if mpi and ":" in job.arguments:
        raise UsageError(f"the script has the argument ':', which {name}'s mpirun takes for the start of a program")


def _equal_slots(job: Job, options: RunnerOptions) -> str:
    counts = {host: len(slots) for host, slots in job.world.items()}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{host} has {count}" for host, count in counts.items())
        needs = f"--launcher {options.launcher} needs the same number of slots on every host"
        raise UsageError(f"{needs}, but {listed}; use --launcher ssh")
    return str(next(iter(counts.values())))


def _rank_command(job: Job) -> tuple[str, ...]:
    head = () if job.no_python else (job.python, "-u", *(("-m",) if job.module else ()))
    return (*head, job.script, *job.arguments)


def _variables(job: Job) -> dict[str, str]:
    where = {"MASTER_ADDR": job.master_addr, "MASTER_PORT": str(job.master_port)} if job.master_addr else {}
    return {**job.exports, **where}


def _openmpi(job: Job, options: RunnerOptions) -> RunnerCommand:
    _refuse(job, options)
    hostfile = ("-hostfile", options.hostfile) if options.hostfile else ()
    variables = {"UCX_TLS": "tcp", **_variables(job)}
    exports = [word for name, value in variables.items() for word in ("-x", f"{name}={value}")]
    head = ("mpirun", "-n", str(job.world_size), *hostfile, "--mca", "btl", "^openib", *options.launcher_args)
    return RunnerCommand((*head, *exports, *_rank_command(job)))


def _hydra(job: Job, options: RunnerOptions) -> RunnerCommand:
    """MPICH's mpirun, from which those of Intel and MVAPICH descend."""
    _refuse(job, options)
    each = _equal_slots(job, options)
    variables, become = _variables(job), RANK_FROM_MPI
    if options.launcher == "mvapich":
        variables, become = {**_MVAPICH, **({"MV2_USE_CUDA": "1"} if job.on_devices else {}), **variables}, ()
    else:
        variables |= {"WORLD_SIZE": str(job.world_size), "LOCAL_SIZE": each}
    if options.launcher == "impi":
        variables["I_MPI_PIN"] = "0"  # its pinning would confine all threads of a rank to one core
    words = [word for name, value in variables.items() for word in ("-genv", name, value)]
    head = ("mpirun", "-n", str(job.world_size), "-ppn", each, *options.launcher_args, *words)
    return RunnerCommand((*head, "-hosts", ",".join(job.hosts), *become, *_rank_command(job)))


def _slurm(job: Job, options: RunnerOptions) -> RunnerCommand:
    _refuse(job, options, mpi=False)
    each = _equal_slots(job, options)
    for host, slots in job.world.items():
        if slots != tuple(range(int(each))):
            raise UsageError(
                f"--launcher slurm can only use the first devices of every host, but {host} is to use "
                f"{','.join(map(str, slots))}; use --num_gpus, or --launcher ssh"
            )
    devices = ("--gpus-per-node", each) if "--num_gpus" in options.selected_by else ()
    hosts = ("--nodelist", ",".join(job.hosts), "--nodes", str(len(job.hosts)), "--ntasks-per-node", each)
    # --export separates values with commas and cannot quote them, so they travel in srun's own environment.
    head = ("srun", "-n", str(job.world_size), *options.launcher_args, *hosts, *devices, "--export=ALL")
    return RunnerCommand((*head, *_rank_command(job)), _variables(job))


RUNNERS: Mapping[str, Runner] = {
    "ssh": Runner(("ssh",), "an ssh client (OpenSSH)", None, per_host=True),
    "pdsh": Runner(("pdsh",), "pdsh (package pdsh)", _pdsh, per_host=True),
    "openmpi": Runner(("mpirun", "ompi_info"), "Open MPI", _openmpi),
    "mpich": Runner(("mpirun",), "MPICH", _hydra),
    "impi": Runner(("mpirun",), "Intel MPI", _hydra),
    "mvapich": Runner(("mpirun", "mpiname"), "MVAPICH", _hydra),
    "slurm": Runner(("srun", "sinfo"), "the Slurm client programs", _slurm),
}


def find_runner(name: str) -> str:
    """Canonical name of a runner. Raises UsageError, with the nearest one, for an unknown name."""
    if name.lower() not in RUNNERS:
        hint = nearest_hint(name, RUNNERS) or f"; known: {', '.join(RUNNERS)}"
        raise UsageError(f"--launcher {name!r} is unknown{hint}")
    return name.lower()


def build(job: Job, options: RunnerOptions) -> RunnerCommand:
    """The one process that starts ``job`` through a backend other than ssh. Raises UsageError for what it cannot do."""
    how = RUNNERS[options.launcher].build
    assert how is not None, "ssh has one command per host, see ssh_command"
    return how(job, options)


def _numbers(numbers: tuple[int, ...] | range) -> str:
    """``0-3`` for consecutive numbers, else ``0,2,3``."""
    consecutive = len(numbers) > 1 and list(numbers) == list(range(numbers[0], numbers[0] + len(numbers)))
    return f"{numbers[0]}-{numbers[-1]}" if consecutive else ",".join(map(str, numbers))


def _commands(job: Job, options: RunnerOptions) -> list[str]:
    if options.launcher == "ssh":
        shown = ((host, ssh_command(job, node, options=options)) for node, host in enumerate(job.hosts))
        return [line for host, argv in shown for line in (f"command for {host}:", f"  {shlex.join(argv)}")]
    command = build(job, options)
    assignments = [f"{name}={shlex.quote(value)}" for name, value in masked(command.env).items()]
    return ["command:", f"  {' '.join([*assignments, shlex.join(command.argv)])}"]


def describe(job: Job, place: Location, *, options: RunnerOptions) -> str:
    """What ``--dry_run`` shows: world, meeting point, variables, exact commands; secret values are masked everywhere.

    Raises UsageError when the runner cannot run the job.
    """
    job = replace(job, exports=masked(job.exports))
    lines = [f"world: {job.world_size} rank(s) on {len(job.hosts)} host(s)"]
    kind = "devices" if place.uses_devices else "the CPU, slots"
    for node, (host, slots) in enumerate(job.world.items()):
        first = job.first_rank(node)
        lines.append(f"  {host}: {kind} {_numbers(slots)}; ranks {_numbers(range(first, first + len(slots)))}")
    port = f"port {job.master_port}" if job.master_port else "a free port that node 0 chooses"
    where = f"{job.master_addr}, {port}" if job.master_addr else "found by the ranks in their scheduler's variables"
    lines.append(f"meeting point: {where}")
    if place.node_rank is not None:
        command = shlex.join(node_command(job, place.node_rank))
        lines += [f"node {place.node_rank} runs in this process, as with:", f"  {command}"]
    else:
        lines += ["variables for the hosts:", *(f"  {name}={value}" for name, value in job.exports.items())]
        lines += _commands(job, options)
    return "\n".join(lines) + "\n"
