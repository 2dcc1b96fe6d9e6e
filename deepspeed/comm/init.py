"""Starting the process group: from a launcher's variables, from MPI or Slurm, or for one process alone."""

import atexit
import contextlib
import gc
import os
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import torch.distributed as dist

from deepspeed.accelerator.device import get_accelerator, take_device
from deepspeed.client.comm import comms_log
from deepspeed.client.comm.discovery import LOOPBACK, Rendezvous, adopted, discover, interface_with, is_azure, scheduled
from deepspeed.client.comm.faults import show_plainly
from deepspeed.client.constants import DEFAULT_PROCESS_GROUP_TIMEOUT, TORCH_DISTRIBUTED_DEFAULT_PORT
from deepspeed.comm.hang.watch import watch
from deepspeed.errors import DeepSpeedConfigError, UsageError
from deepspeed.monitor.log import log_dist, logger

_GLOO_THREADS = b"gloo_tcp"  # how the names of the threads begin that move gloo's bytes
_ELSEWHERE = "192.0.2.1"  # an address of no machine (RFC 5737): the way to it is the default route


def available_backends() -> list[str]:
    """Return the communication backends that this build of torch has."""
    return [name for name in ("gloo", "nccl", "xccl", "mpi", "ucc") if getattr(dist, f"is_{name}_available", bool)()]


def free_port() -> int:
    """Return a port of this machine on which nobody listens now."""
    with socket.create_server((LOOPBACK, 0)) as probe:
        return int(probe.getsockname()[1])


def _publish(ranks: Rendezvous) -> None:
    """Write the ranks' identity where ``torch.distributed`` and other libraries look; never over an existing value."""
    port = os.environ.get("MASTER_PORT") or ranks.port
    if port is None:
        port = free_port()
    values: dict[str, object] = {"RANK": ranks.rank, "WORLD_SIZE": ranks.world_size, "LOCAL_RANK": ranks.local_rank}
    values |= {"LOCAL_WORLD_SIZE": ranks.local_size, "MASTER_ADDR": ranks.address, "MASTER_PORT": port}
    os.environ.update({k: str(v) for k, v in values.items() if v is not None and not os.environ.get(k)})
    if is_azure(os.environ):
        # NCCL would choose docker's bridge, which leads to no other machine
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "^docker0,lo")


def mpi_discovery(distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT, verbose: bool = True) -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT from MPI's or Slurm's variables, without mpi4py."""
    env = dict(os.environ)
    if scheduled(env) is not None:  # their word comes before RANK here
        env.pop("RANK", None)
    ranks = discover(env, distributed_port, devices=get_accelerator().device_count)
    _publish(ranks)
    if verbose:
        log_dist(f"discovered rank {ranks.rank} of {ranks.world_size}, meeting at {ranks.address}")


def _timeout(requested: timedelta) -> timedelta:
    minutes = os.environ.get("DEEPSPEED_TIMEOUT")
    if requested is not DEFAULT_PROCESS_GROUP_TIMEOUT or not minutes:
        return requested
    with contextlib.suppress(ValueError, OverflowError):
        if (limit := timedelta(minutes=float(minutes))) > timedelta():
            return limit
    raise DeepSpeedConfigError(f"DEEPSPEED_TIMEOUT={minutes!r} must be a positive number of minutes.")


def _source_address(host: str) -> str:
    """Return this machine's address on the way to ``host``; nothing is sent."""
    family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def _prepare(backend: str, ranks: Rendezvous) -> None:
    """Set up the device and the network before groups are made. gloo carries the control messages of nccl jobs too
    and, left to itself, listens where this machine's own name points to, often the loopback.
    """
    # torch's device_id stays unset: with it every later new_group of some ranks only, such as those that carry weights
    # to inference engines, is a split that all ranks would have to take part in.
    if backend != "gloo":
        take_device(ranks.local_rank)
    if ranks.one_machine or os.environ.get("GLOO_SOCKET_IFNAME"):
        return
    interfaces = {name: [a.address for a in addresses] for name, addresses in psutil.net_if_addrs().items()}
    for host in filter(None, (ranks.address, _ELSEWHERE)):  # rank 0's own name may lead to its loopback
        with contextlib.suppress(OSError):
            if name := interface_with(_source_address(host), interfaces):
                os.environ["GLOO_SOCKET_IFNAME"] = name
                return


@contextlib.contextmanager
def naming_threads(backend: str) -> Iterator[None]:
    """Name gloo's threads that start inside after gloo: before torch 2.13 they take the name of the starting thread."""
    comm = Path("/proc/thread-self/comm")
    name = comm.read_bytes() if backend == "gloo" and os.access(comm, os.W_OK) else b""
    if name:
        comm.write_bytes(_GLOO_THREADS)
    try:
        yield
    finally:
        if name:
            comm.write_bytes(name)


def take_turns(policy: int = getattr(os, "SCHED_BATCH", 0)) -> None:
    """Let gloo's threads wait for their turn on a busy processor, as batch programs do, instead of taking it from
    whoever wakes them. That is mostly a rank in the middle of a send, with a lock that they would then spin on.

    A policy that somebody has chosen for the program (``chrt``) stays.
    """
    with contextlib.suppress(OSError):  # no /proc, or that of other process numbers
        if os.readlink("/proc/self") != str(os.getpid()):
            return
        for comm in Path("/proc/self/task").glob("*/comm"):
            with contextlib.suppress(OSError):  # it has ended, or the machine does not allow it
                thread = int(comm.parent.name)
                ordinary = os.sched_getscheduler(thread) in (os.SCHED_OTHER, os.SCHED_BATCH)
                if ordinary and comm.read_bytes().startswith(_GLOO_THREADS):
                    os.sched_setscheduler(thread, policy, os.sched_param(0))


def _start(backend: str, timeout: timedelta, ranks: Rendezvous, init_method: str | None) -> None:
    # Nobody to meet: an in-process store needs no port, so parallel single-process jobs cannot collide.
    store = dist.HashStore() if init_method is None and ranks.port is None else None
    method = None if store is not None else init_method or "env://"
    with naming_threads(backend):
        dist.init_process_group(backend, method, timeout, ranks.world_size, ranks.rank, store)


def _leave_at_exit(limit_s: float = 20.0) -> None:
    """Let gloo's worker threads, which carry nccl's control messages too, end before the interpreter does: a thread
    that asks for it during finalization, to drop a tensor, ends the process with SIGABRT. A thread that waits for ranks
    that are gone is left after ``limit_s`` seconds.
    """
    asked, ended, owner = threading.Event(), threading.Event(), os.getpid()

    def leave() -> None:
        asked.wait()
        try:
            if dist.is_initialized():
                dist.destroy_process_group()
        finally:
            ended.set()

    def at_exit() -> None:
        if os.getpid() != owner:  # a fork has this registration, but neither the thread nor the group's
            return
        gc.collect()
        asked.set()
        if not ended.wait(limit_s):
            logger.warning("the process group has not ended within %g s; the process ends without it", limit_s)

    threading.Thread(target=leave, name="leave-group", daemon=True).start()  # at exit Python starts no threads any more
    atexit.register(at_exit)


def _adopt() -> None:
    """Take over the existing process group, and write its ranks to the environment variables that are unset."""
    ranks = adopted(os.environ, dist.get_rank(), dist.get_world_size(), devices=get_accelerator().device_count)
    os.environ["LOCAL_RANK"] = str(ranks.local_rank)
    if dist.get_backend() != "fake":  # whose ranks are no processes
        for name, value in (("RANK", ranks.rank), ("WORLD_SIZE", ranks.world_size)):
            os.environ[name] = os.environ.get(name) or str(value)
    _prepare(dist.get_backend(), ranks)


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

    ``dist_backend`` None means the device's own (nccl, gloo, ...). This process's rank comes from ``rank`` and
    ``world_size``, else RANK / WORLD_SIZE / LOCAL_RANK / MASTER_ADDR / MASTER_PORT, else MPI or Slurm variables, else
    the process is alone. Those of the variables that are unset are set to the values found, or to an existing group's.
    Without MASTER_PORT and with the default ``distributed_port`` the port follows from the job's id
    (``discovery.job_port``). ``timeout`` defaults to ``DEEPSPEED_TIMEOUT`` minutes, or 10. The local rank's device
    becomes the current one, unless another is current already or the backend is gloo. Where ranks are on several
    machines, GLOO_SOCKET_IFNAME, if unset, is set to the interface that leads to rank 0. ``config`` may hold
    ``comms_logger``.

    Raises UsageError with ``dist_init_required=False`` and no group, DeepSpeedConfigError for contradictory variables.
    """
    if config is not None:
        comms_log.configure(deepspeed_config=config)
    if dist.is_initialized():
        _adopt()
        show_plainly()
        watch()
        return
    if dist_init_required is False:
        reason = "dist_init_required=False, but there is no process group"
        raise UsageError(f"{reason}; start one before, or leave the argument out.")
    env: dict[str, str] = dict(os.environ)
    if rank >= 0 and world_size > 0:
        env.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    if init_method is not None and not init_method.startswith("env:"):
        # The meeting point is in the method; a file's is on no machine, and may be shared by several.
        env["MASTER_ADDR"] = urlsplit(init_method).hostname or env.get("MASTER_ADDR") or socket.gethostname()
    count = get_accelerator().device_count
    ranks = discover(env, distributed_port, auto_mpi_discovery=auto_mpi_discovery, devices=count)
    _publish(ranks)
    backend = dist_backend or get_accelerator().communication_backend_name()
    if verbose:
        where = "alone" if ranks.port is None else f"meeting at {ranks.address}:{os.environ['MASTER_PORT']}"
        log_dist(f"starting torch.distributed with {backend}: rank {ranks.rank} of {ranks.world_size}, {where}")
    _prepare(backend, ranks)
    _start(backend, _timeout(timeout), ranks, init_method)
    _leave_at_exit()
    show_plainly()
    watch()
