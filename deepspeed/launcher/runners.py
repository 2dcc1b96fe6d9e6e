"""How a job reaches its hosts, as pure functions from a job to command lines, run or only shown.

Two kinds of runner. *ssh* and *pdsh* start one launcher per host (``deepspeed.launcher.launch``), which starts and
watches its ranks. *MPI* (openmpi, mpich, impi, mvapich) and *Slurm* start the ranks themselves; each rank learns from
their variables who it is (``client.comm.discovery``), and flags that need a launcher on every host are refused.
``options`` are the flags of the command after ``prepare``.
"""

import os
import shlex
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from deepspeed.errors import UsageError, nearest_hint
from deepspeed.launcher.hostfile import masked
from deepspeed.launcher.job import Job, encode_world
from deepspeed.launcher.node.loop import silence_limit
from deepspeed.launcher.resources import Location, selected_by

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


class RunnerCommand(NamedTuple):
    """Process to start: its arguments, and variables on top of this process's own."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = {}


class Runner(NamedTuple):
    """Backend: programs that must be on PATH, where they come from, and how it is started."""

    programs: tuple[str, ...]
    install: str
    build: Callable[[Job, Namespace], RunnerCommand] | None  # None: one command per host, see ssh_command


def _words(text: str, source: str) -> tuple[str, ...]:
    """Split ``text`` into words as a shell would."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(f"{source} {text!r} cannot be split into words: {error}") from error


def ssh_program() -> tuple[str, ...]:
    """Return the ssh command and its own arguments. Raises UsageError when DS_SSH has an open quote."""
    return _words(os.environ.get("DS_SSH", ""), "DS_SSH") or ("ssh",)


def prepare(options: Namespace) -> None:
    """Put the flags about runners into their final form. Raises UsageError, with the nearest name of a runner."""
    name = options.launcher.lower()
    if name not in RUNNERS:
        hint = nearest_hint(name, RUNNERS) or f"; known: {', '.join(RUNNERS)}"
        raise UsageError(f"--launcher {options.launcher!r} is unknown{hint}")
    options.launcher, options.ssh = name, ssh_program()
    options.launcher_args = _words(options.launcher_args, "--launcher_args")


def node_command(job: Job, node_rank: int | str, *, runner: str = "") -> list[str]:
    """Return the arguments of a node's launcher, for a person or a ``runner``, which may fill in ``node_rank``."""
    given: dict[str, Any] = {
        "--on_devices": job.on_devices,
        "--module": job.module,
        "--no_python": job.no_python,
        "--no_local_rank": not job.local_rank_argument,
        "--bind_cores_to_rank": job.bind_cores,
        "--from_runner": runner or None,
        "--world_info": encode_world(job.world),
        "--node_rank": node_rank,
        "--master_addr": job.master_addr,
        "--master_port": job.master_port,
        "--log_level": job.log_level,
        "--save_pid": job.save_pid or None,
        "--hang_timeout": job.hang_timeout,
        "--enable_each_rank_log": job.log_dir,
        "--bind_core_list": job.core_list,
        "--signal_grace": None if job.signal_grace == Job.signal_grace else job.signal_grace,
    }
    if (limits := job.elastic) is not None:
        given |= {
            "--elastic_training": True,
            "--min_elastic_nodes": limits.min_nodes,
            "--max_elastic_nodes": limits.max_nodes,
            "--min_ranks": limits.sizes[0],
            "--max_ranks": limits.sizes[-1],
            "--max_restarts": limits.max_restarts,
        }
    wanted = {flag: value for flag, value in given.items() if value is not None and value is not False}
    words = [flag if value is True else f"{flag}={value}" for flag, value in wanted.items()]
    return [job.python, "-u", "-m", "deepspeed.launcher.launch", *words, job.script, *job.arguments]


def _remote_text(job: Job, command: str, options: Namespace) -> str:
    """Return the text for a host's login shell: an ordinary shell (users' may differ) becomes ``command``."""
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


def ssh_prefix(ssh: Sequence[str], host: str, *more: str, connect_timeout_s: int = 10) -> list[str]:
    """Return the ssh command line up to and with ``host``. ssh may ask no questions, as nobody can answer them."""
    return [*ssh, "-o", "BatchMode=yes", "-o", f"ConnectTimeout={connect_timeout_s}", *more, host]


def ssh_words(options: Namespace) -> list[str]:
    """Return the user's additions to the command line of ssh."""
    port = ["-p", str(options.ssh_port)] if options.ssh_port is not None else []
    return [*port, *(options.launcher_args if options.launcher == "ssh" else ())]


def ssh_command(job: Job, node_rank: int, options: Namespace) -> list[str]:
    """Return the ssh command line that runs node ``node_rank``; port 0 passes through for node 0 to choose."""
    command = shlex.join(node_command(job, node_rank, runner="ssh"))
    # ssh itself ends when three questions to a silent host stay without an answer.
    alive = ("-o", f"ServerAliveInterval={max(1, round(silence_limit() / 3))}", "-o", "ServerAliveCountMax=3")
    start = ssh_prefix(options.ssh, job.hosts[node_rank], *ssh_words(options), *alive)
    return [*start, _remote_text(job, command, options)]


def _pdsh(job: Job, options: Namespace) -> RunnerCommand:
    # Its ssh processes keep an input open on which nothing ever comes.
    command = f"{shlex.join(node_command(job, 'PDSH_RANK', runner='pdsh'))} </dev/null"
    text = _remote_text(job, command, options)
    # pdsh replaces %n by the number of the host, and expects percent signs that mean themselves twice.
    text = text.replace("%", "%%").replace("--node_rank=PDSH_RANK", "--node_rank=%n", 1)
    env = {"PDSH_RCMD_TYPE": "ssh"}
    if options.ssh_port is not None:
        env["PDSH_SSH_ARGS_APPEND"] = f"{os.environ.get('PDSH_SSH_ARGS_APPEND', '')} -p {options.ssh_port}".strip()
    # -S: the largest status of all hosts; -b: one Ctrl-C ends it.
    head = ("pdsh", "-S", "-b", "-f", "1024", "-w", ",".join(job.hosts))
    return RunnerCommand((*head, *options.launcher_args, text), env)


def _refuse(job: Job, options: Namespace, *, mpi: bool = True) -> None:
    """Raise UsageError for flags that need a launcher on every host, or that an mpirun does not support."""
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
    if mpi and (flags := selected_by(options)):
        raise UsageError(
            f"{flags[0]} does not work with --launcher {name}, which takes the hosts and slots of the hostfile as they "
            "are; write a hostfile with just those, or use --launcher ssh"
        )
    if mpi and ":" in job.arguments:
        raise UsageError(f"the script has the argument ':', which {name}'s mpirun takes for the start of a program")


def _equal_slots(job: Job, options: Namespace) -> str:
    counts = {host: len(slots) for host, slots in job.world.items()}
    if len(set(counts.values())) > 1:
        needs = f"--launcher {options.launcher} needs the same number of slots on every host"
        listed = ", ".join(f"{host} has {count}" for host, count in counts.items())
        raise UsageError(f"{needs}, but {listed}; use --launcher ssh")
    return str(next(iter(counts.values())))


def _rank_command(job: Job) -> tuple[str, ...]:
    head = () if job.no_python else (job.python, "-u", *(("-m",) if job.module else ()))
    return (*head, job.script, *job.arguments)


def _variables(job: Job) -> dict[str, str]:
    where = {"MASTER_ADDR": job.master_addr, "MASTER_PORT": str(job.master_port)} if job.master_addr else {}
    watch = {"DS_HANG_TIMEOUT": f"{job.hang_timeout:g}"} if job.hang_timeout else {}
    return {**job.exports, **where, **watch}


def _openmpi(job: Job, options: Namespace) -> RunnerCommand:
    _refuse(job, options)
    hostfile = ("-hostfile", options.hostfile) if os.path.exists(options.hostfile) else ()
    variables = {"UCX_TLS": "tcp", **_variables(job)}
    exports = [word for name, value in variables.items() for word in ("-x", f"{name}={value}")]
    head = ("mpirun", "-n", str(job.world_size), *hostfile, "--mca", "btl", "^openib", *options.launcher_args)
    return RunnerCommand((*head, *exports, *_rank_command(job)))


def _hydra(job: Job, options: Namespace) -> RunnerCommand:
    """Build the command of MPICH's mpirun, from which those of Intel and MVAPICH descend."""
    _refuse(job, options)
    per_node = _equal_slots(job, options)
    variables, become = _variables(job), RANK_FROM_MPI
    if options.launcher == "mvapich":
        variables, become = {**_MVAPICH, **({"MV2_USE_CUDA": "1"} if job.on_devices else {}), **variables}, ()
    else:
        variables |= {"WORLD_SIZE": str(job.world_size), "LOCAL_SIZE": per_node}
    if options.launcher == "impi":
        variables["I_MPI_PIN"] = "0"  # its pinning would confine all threads of a rank to one core
    words = [word for name, value in variables.items() for word in ("-genv", name, value)]
    head = ("mpirun", "-n", str(job.world_size), "-ppn", per_node, *options.launcher_args, *words)
    return RunnerCommand((*head, "-hosts", ",".join(job.hosts), *become, *_rank_command(job)))


def _slurm(job: Job, options: Namespace) -> RunnerCommand:
    _refuse(job, options, mpi=False)
    per_node = _equal_slots(job, options)
    for host, slots in job.world.items():
        if slots != tuple(range(int(per_node))):
            raise UsageError(
                f"--launcher slurm can only use the first devices of every host, but {host} is to use "
                f"{','.join(map(str, slots))}; use --num_gpus, or --launcher ssh"
            )
    devices = ("--gpus-per-node", per_node) if options.num_gpus > 0 else ()
    hosts = ("--nodelist", ",".join(job.hosts), "--nodes", str(len(job.hosts)), "--ntasks-per-node", per_node)
    # --export separates values with commas and cannot quote them, so they travel in srun's own environment.
    head = ("srun", "-n", str(job.world_size), *options.launcher_args, *hosts, *devices, "--export=ALL")
    return RunnerCommand((*head, *_rank_command(job)), _variables(job))


RUNNERS: Mapping[str, Runner] = {
    "ssh": Runner(("ssh",), "an ssh client (OpenSSH)", None),
    "pdsh": Runner(("pdsh",), "pdsh (package pdsh)", _pdsh),
    "openmpi": Runner(("mpirun", "ompi_info"), "Open MPI", _openmpi),
    "mpich": Runner(("mpirun",), "MPICH", _hydra),
    "impi": Runner(("mpirun",), "Intel MPI", _hydra),
    "mvapich": Runner(("mpirun", "mpiname"), "MVAPICH", _hydra),
    "slurm": Runner(("srun", "sinfo"), "the Slurm client programs", _slurm),
}


def describe(job: Job, place: Location, options: Namespace) -> str:
    """Return the text of ``--dry_run``: world, meeting point, variables, exact commands; secret values are masked.

    Raises UsageError when the runner cannot run the job.
    """
    job, build = replace(job, exports=masked(job.exports)), RUNNERS[options.launcher].build
    lines = [f"world: {job.world_size} rank(s) on {len(job.hosts)} host(s)"]
    kind = "devices" if place.uses_devices else "the CPU, slots"
    for node, (host, slots) in enumerate(job.world.items()):
        ranks = range(job.first_rank(node), job.first_rank(node) + len(slots))
        lines.append(f"  {host}: {kind} {','.join(map(str, slots))}; ranks {','.join(map(str, ranks))}")
    port = f"port {job.master_port}" if job.master_port else "a free port that node 0 chooses"
    where = f"{job.master_addr}, {port}" if job.master_addr else "found by the ranks in their scheduler's variables"
    lines.append(f"meeting point: {where}")
    if place.node_rank is not None:
        lines.append(f"node {place.node_rank} runs in this process, as with:")
        return "\n".join([*lines, f"  {shlex.join(node_command(job, place.node_rank))}\n"])
    lines += ["variables for the hosts:", *(f"  {name}={value}" for name, value in job.exports.items())]
    if build is not None:
        command = build(job, options)
        assignments = "".join(f"{name}={shlex.quote(value)} " for name, value in command.env.items())
        return "\n".join([*lines, "command:", f"  {assignments}{shlex.join(command.argv)}\n"])
    for node, host in enumerate(job.hosts):
        lines += [f"command for {host}:", f"  {shlex.join(ssh_command(job, node, options))}"]
    return "\n".join(lines) + "\n"
