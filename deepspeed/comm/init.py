"""Starting the process group: from a launcher's variables, from MPI or Slurm, or for one process alone."""

import atexit
import gc
import math
import os
import re
import socket
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from deepspeed.comm import trace
from deepspeed.constants import DEFAULT_PROCESS_GROUP_TIMEOUT, TORCH_DISTRIBUTED_DEFAULT_PORT
from deepspeed.device import get_accelerator
from deepspeed.errors import DeepSpeedConfigError, UsageError
from deepspeed.observe.log import log_dist

_LOOPBACK = "127.0.0.1"


class Rendezvous(NamedTuple):
    """Who this process is and where the ranks meet. ``port`` None: the process is alone and needs no meeting point."""

    rank: int
    world_size: int
    local_rank: int
    address: str
    port: int | None


class _Scheduler(NamedTuple):
    """Variables in which a scheduler states rank, world size, local rank and local size."""

    name: str
    rank: str
    world_size: str
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]


# Slurm: the STEP variables exist only under srun; a batch script run once has SLURM_PROCID=0 and the job's SLURM_NTASKS,
# and would wait for ranks that never come.
_SCHEDULERS = (
    _Scheduler(
        "Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", ("OMPI_COMM_WORLD_LOCAL_RANK",), ("OMPI_COMM_WORLD_LOCAL_SIZE",)
    ),
    _Scheduler("MVAPICH", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", ("MV2_COMM_WORLD_LOCAL_RANK",), ("MV2_COMM_WORLD_LOCAL_SIZE",)),
    _Scheduler("MPI (PMI)", "PMI_RANK", "PMI_SIZE", ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"), ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE")),
    _Scheduler("Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", ("SLURM_LOCALID",), ()),
)


def _first(env: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((env[name] for name in names if env.get(name)), None)


def _first_slurm_host(nodelist: str) -> str:
    """``gpu[03-05,9],login1`` -> ``gpu03``."""
    match = re.match(r"([^,\[]+)(?:\[([0-9]+)[^\]]*\])?([^,\[]*)", nodelist.strip())
    if match is None:
        raise DeepSpeedConfigError(f"SLURM_STEP_NODELIST={nodelist!r} names no machine; set MASTER_ADDR.")
    return "".join(part or "" for part in match.groups())


def _scheduler_address(env: Mapping[str, str], scheduler: _Scheduler, world_size: int) -> str:
    if env.get("MASTER_ADDR"):
        return env["MASTER_ADDR"]
    if nodelist := _first(env, ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")):
        return _first_slurm_host(nodelist)
    if azure := env.get("AZ_BATCH_MASTER_NODE"):
        return azure.partition(":")[0]
    if world_size == 1 or _first(env, scheduler.local_size) == str(world_size):
        return _LOOPBACK
    raise DeepSpeedConfigError(
        f"{scheduler.name} started {world_size} ranks on several machines but does not say which machine holds rank 0; "
        "set MASTER_ADDR to its name (for example mpirun -x MASTER_ADDR=host0 ...)."
    )


def from_scheduler(env: Mapping[str, str], port: int) -> Rendezvous | None:
    """What MPI's or Slurm's variables in ``env`` say; None when there are none. Pure."""
    for scheduler in _SCHEDULERS:
        if scheduler.rank in env and scheduler.world_size in env:
            rank, world_size = int(env[scheduler.rank]), int(env[scheduler.world_size])
            local_rank = int(_first(env, scheduler.local_rank) or env.get("LOCAL_RANK") or 0)
            address = _scheduler_address(env, scheduler, world_size)
            return Rendezvous(rank, world_size, local_rank, address, int(env.get("MASTER_PORT") or port))
    return None


def discover(env: Mapping[str, str], port: int = TORCH_DISTRIBUTED_DEFAULT_PORT, auto_mpi_discovery: bool = True) -> Rendezvous:
    """Identity of this process from ``env``: a launcher's variables first, then MPI or Slurm, else one process alone. Pure.

    Raises DeepSpeedConfigError when the variables are there only in part.
    """
    if not env.get("RANK"):
        # some MPI launchers export WORLD_SIZE to all ranks and leave the rank to MPI's own variables
        if auto_mpi_discovery and (found := from_scheduler(env, port)) is not None:
            return found
        if not env.get("WORLD_SIZE"):
            return Rendezvous(0, 1, int(env.get("LOCAL_RANK") or 0), env.get("MASTER_ADDR") or _LOOPBACK, None)
    missing = [name for name in ("RANK", "WORLD_SIZE") if not env.get(name)]
    if missing:
        raise DeepSpeedConfigError(f"The environment has only one of RANK and WORLD_SIZE: {missing[0]} is not set; set both or neither.")
    rank, world_size = int(env["RANK"]), int(env["WORLD_SIZE"])
    if not 0 <= rank < world_size:
        raise DeepSpeedConfigError(f"RANK={rank} does not fit WORLD_SIZE={world_size}; ranks go from 0 to WORLD_SIZE - 1.")
    local_rank = int(env.get("LOCAL_RANK") or _local_rank_guess(env, rank))
    if world_size == 1:
        return Rendezvous(rank, 1, local_rank, env.get("MASTER_ADDR") or _LOOPBACK, None)
    if not env.get("MASTER_ADDR"):
        raise DeepSpeedConfigError(f"WORLD_SIZE={world_size} but MASTER_ADDR is not set; set it to the machine of rank 0.")
    return Rendezvous(rank, world_size, local_rank, env["MASTER_ADDR"], int(env.get("MASTER_PORT") or port))


def _local_rank_guess(env: Mapping[str, str], rank: int) -> int:
    per_node = int(env.get("LOCAL_WORLD_SIZE") or 0) or get_accelerator().device_count()
    return rank % per_node if per_node > 1 else 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_LOOPBACK, 0))
        return int(probe.getsockname()[1])


def _publish(found: Rendezvous) -> None:
    """Write the identity where ``torch.distributed`` and other libraries look; never over an existing value."""
    values = {"RANK": found.rank, "WORLD_SIZE": found.world_size, "LOCAL_RANK": found.local_rank, "MASTER_ADDR": found.address}
    for name, value in values.items():
        os.environ.setdefault(name, str(value))
    if not os.environ.get("MASTER_PORT"):
        os.environ["MASTER_PORT"] = str(_free_port() if found.port is None else found.port)


def mpi_discovery(distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT, verbose: bool = True) -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT from the variables of MPI or Slurm; needs no mpi4py."""
    found = from_scheduler(os.environ, distributed_port) or discover(os.environ, distributed_port)
    _publish(found)
    if verbose:
        log_dist(f"discovered rank {found.rank} of {found.world_size}, local rank {found.local_rank}, meeting at {found.address}")


def _timeout(requested: timedelta) -> timedelta:
    minutes = os.environ.get("DEEPSPEED_TIMEOUT")
    if requested is not DEFAULT_PROCESS_GROUP_TIMEOUT or not minutes:
        return requested
    try:
        value = float(minutes)
    except ValueError:
        value = math.nan
    if not value > 0:
        raise DeepSpeedConfigError(f"DEEPSPEED_TIMEOUT={minutes!r} must be a positive number of minutes.")
    return timedelta(minutes=value)


def _start(backend: str, timeout: timedelta, found: Rendezvous, init_method: str | None) -> None:
    if init_method is not None:
        dist.init_process_group(backend, init_method=init_method, timeout=timeout, rank=found.rank, world_size=found.world_size)
    elif found.port is None:
        # Nobody to meet: an in-process store needs no port, so parallel single-process jobs cannot collide.
        dist.init_process_group(backend, store=dist.HashStore(), timeout=timeout, rank=0, world_size=1)
    else:
        dist.init_process_group(backend, init_method="env://", timeout=timeout, rank=found.rank, world_size=found.world_size)


def _leave_group() -> None:
    """Let gloo's worker threads end before the interpreter does.

    A worker that drops the last reference to a tensor needs the interpreter; one that asks for it during finalization ends the
    process with SIGABRT after a successful run.
    """
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT,
    verbose: bool = True,
    timeout: timedelta = DEFAULT_PROCESS_GROUP_TIMEOUT,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Make sure that ``torch.distributed`` has a process group; an existing one is adopted, a second call does nothing.

    ``dist_backend`` None means the device's own (nccl, gloo, ...). Who this process is comes from ``rank`` and ``world_size``,
    else RANK / WORLD_SIZE / LOCAL_RANK / MASTER_ADDR / MASTER_PORT, else MPI or Slurm variables, else the process is alone;
    what was found is written to those variables where they are unset. ``timeout`` defaults to ``DEEPSPEED_TIMEOUT``
    minutes, or 10. The device is not touched. ``config`` (dict or parsed) may hold a ``comms_logger`` block.

    Raises UsageError with ``dist_init_required=False`` and no group, DeepSpeedConfigError for contradictory variables.
    """
    if config is not None:
        trace.configure(deepspeed_config=config)
    if dist.is_initialized():
        group_rank, group_size = dist.get_rank(), dist.get_world_size()
        os.environ.setdefault("LOCAL_RANK", str(_local_rank_guess({**os.environ, "WORLD_SIZE": str(group_size)}, group_rank)))
        return
    if dist_init_required is False:
        raise UsageError("dist_init_required=False, but there is no process group; start one before, or leave the argument out.")
    if not dist.is_available():
        raise UsageError("This build of PyTorch has no torch.distributed; install one that has.")
    env: dict[str, str] = dict(os.environ)
    if rank >= 0 and world_size > 0:
        env.update(RANK=str(rank), WORLD_SIZE=str(world_size))
        if init_method is not None:
            env.setdefault("MASTER_ADDR", _LOOPBACK)
    found = discover(env, distributed_port, auto_mpi_discovery)
    _publish(found)
    backend = dist_backend or get_accelerator().communication_backend_name()
    if verbose:
        where = "alone" if found.port is None else f"meeting at {found.address}:{os.environ['MASTER_PORT']}"
        log_dist(f"starting torch.distributed with {backend}: rank {found.rank} of {found.world_size}, {where}")
    _start(backend, _timeout(timeout), found, init_method)
    if backend == "gloo":
        atexit.register(_leave_group)
