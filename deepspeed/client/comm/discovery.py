"""Who this process is and where the ranks meet, read from the variables of whatever started it. Pure.

RANK and WORLD_SIZE (torchrun, the deepspeed launcher, by hand) come first; what they leave open is taken from MPI's or
Slurm's variables, which also serve alone; without any of them the process is alone.
"""

import contextlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from deepspeed.client.constants import TORCH_DISTRIBUTED_DEFAULT_PORT
from deepspeed.errors import DeepSpeedConfigError

Env = Mapping[str, str]
Count = Callable[[], int]
LOOPBACK = "127.0.0.1"
# Below the range from which Linux hands out ports for outgoing connections. A prime number of ports: see job_port.
JOB_PORT_FIRST, JOB_PORT_COUNT = 20000, 9973
AZURE_PORT, AZURE_ONE_NODE_PORT = 6105, 54965


class Rendezvous(NamedTuple):
    """Identity of this process, and where ranks meet. ``port`` None: alone. ``local_size`` None: not known."""

    rank: int
    world_size: int
    local_rank: int
    address: str
    port: int | None
    local_size: int | None = None

    @property
    def one_machine(self) -> bool:
        """Tell whether all ranks are known to be on this machine."""
        return self.world_size in (1, self.local_size) or _leads_here(self.address)


class _Scheduler(NamedTuple):
    """Variables in which a scheduler states what it started; of several, the first that is set counts."""

    name: str
    rank: str
    world_size: str
    local_rank: str = ""
    local_size: str = ""
    job: str = ""  # their digits tell jobs apart and are the same on all ranks
    nodes: str = "SLURM_JOB_NODELIST"  # the machines, rank 0's first
    machines: str = ""  # how many there are


# Slurm comes behind MPI because mpirun starts its helpers through srun, whose variables the ranks then inherit: they
# count the helpers, differ between the first node and the others, and so lend MPI only the node list of the whole job.
# The Slurm row asks for a STEP variable, which exists only under srun: a batch script run once has SLURM_PROCID=0 and
# the job's SLURM_NTASKS, and would wait for ranks that never come. PMIx states no size; WORLD_SIZE must.
_MPI = ("COMM_WORLD_RANK", "COMM_WORLD_SIZE", "COMM_WORLD_LOCAL_RANK", "COMM_WORLD_LOCAL_SIZE")
_ROWS: list[list[str]] = [
    ["Open MPI", *(f"OMPI_{variable}" for variable in _MPI), "PMIX_NAMESPACE OMPI_MCA_ess_base_jobid"],
    ["MVAPICH", *(f"MV2_{variable}" for variable in _MPI)],
    [
        *("MPI (PMI)", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID PMI_LOCAL_RANK PALS_LOCAL_RANKID"),
        *("MPI_LOCALNRANKS PMI_LOCAL_SIZE PALS_LOCAL_SIZE", "PMI_JOBID PALS_APID"),
    ],
    [
        *("Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "", "SLURM_JOB_ID SLURM_STEP_ID"),
        *("SLURM_STEP_NODELIST SLURM_JOB_NODELIST", "SLURM_STEP_NUM_NODES"),
    ],
    ["PMIx", "PMIX_RANK", "WORLD_SIZE", "", "", "PMIX_NAMESPACE"],
]
_SCHEDULERS = [_Scheduler(*row) for row in _ROWS]


def _integer(env: Env, name: str, *, least: int = 0, most: float = math.inf) -> int:
    try:
        value = int(env[name])
    except ValueError:
        value = least - 1
    if least <= value <= most:
        return value
    whole = f"must be a whole number from {least} " + ("on" if most == math.inf else f"to {most}")
    raise DeepSpeedConfigError(f"the environment variable {name}={env[name]!r} {whole}; correct it, or unset it")


def _first(env: Env, *names: str) -> str:
    return next((name for name in " ".join(names).split() if env.get(name)), "")


def _optional(env: Env, *names: str, least: int = 0) -> int | None:
    return _integer(env, name, least=least) if (name := _first(env, *names)) else None


def _leads_here(address: str) -> bool:
    return address in ("localhost", "::1") or address.startswith("127.")


def interface_with(address: str, interfaces: Mapping[str, Iterable[str]]) -> str | None:
    """Return the network interface that has ``address``; None for a loopback one, which reaches no other machine."""
    if _leads_here(address):
        return None
    # the system writes a link-local IPv6 address as address%interface
    return next((name for name, has in interfaces.items() if address in {a.partition("%")[0] for a in has}), None)


def first_host(nodelist: str) -> str:
    """Return the first machine of a Slurm node list: ``gpu[03-05,9],login1`` -> ``gpu03``."""
    match = re.match(r"(?:[^,\[\]\s]|\[\d[^\]]*\])+", nodelist.strip())
    if match is None:
        raise DeepSpeedConfigError(f"the node list {nodelist!r} names no machine; set MASTER_ADDR to that of rank 0")
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", match.group())


def job_port(identity: str) -> int | None:
    """Derive a port from a job's identity, such as ``"<SLURM_JOB_ID>.<SLURM_STEP_ID>"``: 20000 + (its digits read
    as one number) mod 9973, None without a digit. All ranks compute the same one, and neighbouring jobs never meet.
    """
    digits = re.sub(r"\D", "", identity)
    return JOB_PORT_FIRST + int(digits) % JOB_PORT_COUNT if digits else None


def is_azure(env: Env) -> bool:
    """Tell whether this is an Azure ML job, whose machines are named by the batch service."""
    return bool(env.get("AZUREML_EXPERIMENT_ID")) and not env.get("DLTS_JOB_ID")


def _speaking(env: Env, rank: int, world_size: int) -> list[_Scheduler]:
    """Return the schedulers whose variables describe this very process, not one that started it."""
    return [row for row in _SCHEDULERS if env.get(row.rank) == str(rank) and env.get(row.world_size) == str(world_size)]


def _address(env: Env, scheduler: _Scheduler | None, *, one_machine: bool) -> str | None:
    """Return the address of rank 0; None when no variable tells it."""
    azure = env if is_azure(env) else {}
    if address := env.get("MASTER_ADDR"):
        return address
    if one_machine:
        return azure.get("AZ_BATCHAI_MPI_MASTER_NODE") or LOOPBACK
    if nodes := _first(env, scheduler.nodes if scheduler else ""):
        return first_host(env[nodes])
    if node := azure.get("AZ_BATCH_MASTER_NODE"):
        return node.partition(":")[0]
    with contextlib.suppress(ValueError, LookupError, TypeError):  # SageMaker: a JSON list of machines
        return str(json.loads(env["SM_HOSTS"])[0]) if env.get("SM_TRAINING_ENV") else None
    return None


def _port(env: Env, scheduler: _Scheduler | None, port: int, *, one_machine: bool) -> int:
    """Return MASTER_PORT, else a ``port`` that the program chose, else one derived from the job, else the usual one."""
    if env.get("MASTER_PORT"):
        return _integer(env, "MASTER_PORT", least=1, most=65535)
    if port != TORCH_DISTRIBUTED_DEFAULT_PORT:
        return port
    if is_azure(env):
        return AZURE_ONE_NODE_PORT if one_machine else AZURE_PORT
    identity = ".".join(env.get(name, "") for name in scheduler.job.split()) if scheduler is not None else ""
    return job_port(identity) or port


def adopted(env: Env, rank: int, world_size: int, devices: Count = lambda: 1) -> Rendezvous:
    """Describe a rank of a client's process group by ``env``; local ranks not set there count round ``devices``."""
    speaking = _speaking(env, rank, world_size)
    local_rank = _optional(env, "LOCAL_RANK", *(row.local_rank for row in speaking))
    if world_size == 1:  # what a launcher left of other ranks is not about this process
        local_size: int | None = 1
    elif any(env.get(row.machines) == "1" for row in speaking):
        local_size = world_size
    else:
        local_size = _optional(env, "LOCAL_WORLD_SIZE", "LOCAL_SIZE", *(row.local_size for row in speaking), least=1)
    if local_rank is None:
        local_rank = rank % (local_size or max(1, devices()))
    return Rendezvous(rank, world_size, local_rank, env.get("MASTER_ADDR", ""), None, local_size)


def scheduled(env: Env) -> tuple[int, int] | None:
    """Return rank and number of ranks by MPI's or Slurm's variables, or None. Contradictions: DeepSpeedConfigError."""
    # Slurm's rank without a size is no sign of anything but a batch script.
    rows = [row for row in _SCHEDULERS if env.get(row.rank) and (env.get(row.world_size) or row.name != "Slurm")]
    if not rows:
        return None
    row = min(rows, key=lambda row: not env.get(row.world_size))
    if not env.get(row.world_size):
        text = f"{row.rank}={env[row.rank]} says that {row.name} started this process, but {row.world_size} is not set"
        hint = f"set it on every rank, or unset {row.rank} to run alone"
        raise DeepSpeedConfigError(f"{text}, so the number of ranks is unknown; {hint}")
    world_size = _integer(env, row.world_size, least=1)
    if _optional(env, "WORLD_SIZE", least=1) not in (None, world_size):
        text = f"WORLD_SIZE={env['WORLD_SIZE']}, but {row.name} started {world_size} ranks ({row.world_size})"
        hint = "unset WORLD_SIZE, or set RANK too when the ranks are counted in another way"
        raise DeepSpeedConfigError(f"{text}; {hint}")
    return _integer(env, row.rank), world_size


def discover(
    env: Env, port: int = TORCH_DISTRIBUTED_DEFAULT_PORT, *, auto_mpi_discovery: bool = True, devices: Count = lambda: 1
) -> Rendezvous:
    """Identify this process by ``env``: RANK and WORLD_SIZE first, then MPI or Slurm, else one process alone.

    ``port`` is used when nothing names another; ``devices`` as in ``adopted``. Raises DeepSpeedConfigError, which names
    the variable, when variables are missing or contradict.
    """
    # some MPI launchers export WORLD_SIZE to all ranks and leave the rank to MPI's own variables
    started = scheduled(env) if auto_mpi_discovery and not env.get("RANK") else None
    missing = [name for name in ("RANK", "WORLD_SIZE") if not env.get(name)]
    if started is None and len(missing) == 2:
        return Rendezvous(0, 1, _optional(env, "LOCAL_RANK") or 0, env.get("MASTER_ADDR") or LOOPBACK, None)
    if started is None and missing:
        text = f"the environment has only one of RANK and WORLD_SIZE: {missing[0]} is not set"
        raise DeepSpeedConfigError(f"{text}; set both or neither")
    rank, world_size = started or (_integer(env, "RANK"), _integer(env, "WORLD_SIZE", least=1))
    if rank >= world_size:
        text = f"RANK={rank} does not fit WORLD_SIZE={world_size}"
        raise DeepSpeedConfigError(f"{text}; ranks go from 0 to WORLD_SIZE - 1")
    process = adopted(env, rank, world_size, devices)
    if world_size == 1:
        return process._replace(address=process.address or LOOPBACK)
    local_size = process.local_size
    if local_size is not None and not process.local_rank < local_size <= world_size:
        text = f"local rank {process.local_rank} does not fit {local_size} ranks on this machine and"
        hint = "correct LOCAL_RANK and LOCAL_WORLD_SIZE (or what MPI or Slurm states)"
        raise DeepSpeedConfigError(f"{text} WORLD_SIZE={world_size} in all; {hint}")
    scheduler = next(iter(_speaking(env, rank, world_size)), None)
    one_machine = local_size == world_size
    address = _address(env, scheduler, one_machine=one_machine)
    if address is None:
        who = f"{scheduler.name} started {world_size} ranks" if scheduler else f"WORLD_SIZE={world_size}"
        text = f"{who}, but nothing says which machine holds rank 0: MASTER_ADDR is not set"
        hint = "set it to that machine's name on every rank (for example mpirun -x MASTER_ADDR=host0 ...)"
        raise DeepSpeedConfigError(f"{text}; {hint}")
    return process._replace(address=address, port=_port(env, scheduler, port, one_machine=one_machine))
