"""Starting the process group: from a launcher's variables, from MPI or Slurm, or for one process alone."""

import atexit
import gc
import math
import os
import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from deepspeed.comm import trace
from deepspeed.comm.rendezvous import LOOPBACK, Rendezvous, discover, from_scheduler, is_azure, local_rank_of
from deepspeed.constants import DEFAULT_PROCESS_GROUP_TIMEOUT, TORCH_DISTRIBUTED_DEFAULT_PORT
from deepspeed.device import get_accelerator
from deepspeed.errors import DeepSpeedConfigError, UsageError
from deepspeed.observe.log import log_dist


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def _device_count() -> int:
    return get_accelerator().device_count()


def _publish(found: Rendezvous) -> None:
    """Write the identity where ``torch.distributed`` and other libraries look; never over an existing value."""
    values = {"RANK": found.rank, "WORLD_SIZE": found.world_size, "LOCAL_RANK": found.local_rank, "MASTER_ADDR": found.address}
    if found.local_size is not None:
        values["LOCAL_WORLD_SIZE"] = found.local_size
    values["MASTER_PORT"] = os.environ.get("MASTER_PORT") or (_free_port() if found.port is None else found.port)
    for name, value in values.items():
        if not os.environ.get(name):
            os.environ[name] = str(value)
    if is_azure(os.environ):
        # NCCL would choose docker's bridge, which leads to no other machine
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "^docker0,lo")


def mpi_discovery(distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT, verbose: bool = True) -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT from the variables of MPI or Slurm; needs no mpi4py."""
    found = from_scheduler(os.environ, distributed_port, devices=_device_count) or discover(
        os.environ, distributed_port, devices=_device_count
    )
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
    what was found is written to those variables where they are unset. Without MASTER_PORT and with the default
    ``distributed_port`` the port follows from Slurm's or Open MPI's job id (:func:`deepspeed.comm.rendezvous.job_port`), so that
    two jobs on one machine do not meet. ``timeout`` defaults to ``DEEPSPEED_TIMEOUT`` minutes, or 10. The device is
    not touched. ``config`` (dict or parsed) may hold a ``comms_logger`` block.

    Raises UsageError with ``dist_init_required=False`` and no group, DeepSpeedConfigError for contradictory variables.
    """
    if config is not None:
        trace.configure(deepspeed_config=config)
    if dist.is_initialized():
        group_rank, group_size = dist.get_rank(), dist.get_world_size()
        os.environ["LOCAL_RANK"] = str(local_rank_of(os.environ, group_rank, group_size, devices=_device_count))
        return
    if dist_init_required is False:
        raise UsageError("dist_init_required=False, but there is no process group; start one before, or leave the argument out.")
    if not dist.is_available():
        raise UsageError("This build of PyTorch has no torch.distributed; install one that has.")
    env: dict[str, str] = dict(os.environ)
    if rank >= 0 and world_size > 0:
        env.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    if init_method is not None:
        env.setdefault("MASTER_ADDR", LOOPBACK)  # the meeting point is in the method
    found = discover(env, distributed_port, auto_mpi_discovery=auto_mpi_discovery, devices=_device_count)
    _publish(found)
    backend = dist_backend or get_accelerator().communication_backend_name()
    if verbose:
        where = "alone" if found.port is None else f"meeting at {found.address}:{os.environ['MASTER_PORT']}"
        log_dist(f"starting torch.distributed with {backend}: rank {found.rank} of {found.world_size}, {where}")
    _start(backend, _timeout(timeout), found, init_method)
    if backend == "gloo":
        atexit.register(_leave_group)
