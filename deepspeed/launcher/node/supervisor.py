"""Runs the ranks of one node and answers with the exit status of the whole job, which is the same on every node.

This module turns a job into the ranks' commands and environments. The way of a dead rank: ``ranks`` (the process ends),
``member`` (what this node does), ``links`` or ``store`` (the others hear of it), ``hub`` and ``verdict`` (what was to
blame), and ``deepspeed.launcher.fanout``, where the hub is if the nodes were started over ssh.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass

from deepspeed.device import get_accelerator
from deepspeed.errors import UsageError
from deepspeed.launcher import crash_report
from deepspeed.launcher.affinity import RankCores, plan_cores
from deepspeed.launcher.job import Job
from deepspeed.launcher.machine import remove_stale_pid_file
from deepspeed.launcher.node import rank_exec
from deepspeed.launcher.node.hub import Message
from deepspeed.launcher.node.links import FrameLink, Link, watch_output
from deepspeed.launcher.node.member import Member
from deepspeed.launcher.node.ranks import Guard, RankCommand, Ranks, signals_to
from deepspeed.launcher.node.store import HostLink, StoreLink, bind_store, meeting_point


@dataclass(frozen=True)
class NodeJob:
    """One node's part of a job. ``cores`` has one entry per rank of the node, or is None where ranks are not pinned."""

    job: Job
    node_rank: int
    cores: list[RankCores] | None = None

    @property
    def devices(self) -> tuple[int, ...]:
        """Device ids that all ranks of this node may use; there are as many as ranks."""
        return self.job.world[self.job.hosts[self.node_rank]]

    def rank(self, local: int) -> int:
        """Global rank of local rank ``local``."""
        return self.job.first_rank(self.node_rank) + local


def rank_environment(node: NodeJob, local: int, go: Message, report_file: str) -> dict[str, str]:
    """Variables that rank ``local`` of this node gets in addition to this process's own.

    The names of DeepSpeed, the names of torchrun (so that libraries recognise an elastic launch and use the launcher's
    store), the visible devices, and those by which ``crash_report`` is loaded and told where to write.
    """
    job, ranks = node.job, len(node.devices)
    if node.cores is not None:
        threads = str(len(node.cores[local].cores))
    else:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, cores // ranks))
    user_path = os.environ.get("PYTHONPATH")
    report_path = os.path.dirname(os.path.abspath(crash_report.__file__))
    names = {
        "RANK ROLE_RANK": node.rank(local),
        "LOCAL_RANK": local,
        "WORLD_SIZE ROLE_WORLD_SIZE": job.world_size,
        "LOCAL_SIZE LOCAL_WORLD_SIZE": ranks,
        "CROSS_RANK GROUP_RANK": node.node_rank,
        "CROSS_SIZE GROUP_WORLD_SIZE": len(job.hosts),
        "MASTER_ADDR": job.master_addr,
        "MASTER_PORT": go["port"],
        "ROLE_NAME": "default",
        "TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_RUN_ID": go["run_id"],
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        "OMP_NUM_THREADS": threads,
        "PYTHONPATH": os.pathsep.join([report_path, user_path]) if user_path else report_path,
        "DS_CRASH_REPORT": report_file,
        **({"DS_USER_PYTHONPATH": user_path} if user_path else {}),
    }
    environment = {name: str(value) for equal, value in names.items() for name in equal.split()}
    if job.on_devices:
        get_accelerator().set_visible_devices_envs(environment, list(node.devices))
    return environment


def rank_arguments(node: NodeJob, local: int, log_file: str) -> tuple[str, ...]:
    """The command line that starts rank ``local`` of this node through ``rank_exec``."""
    job, cores = node.job, node.cores[local] if node.cores is not None else RankCores(())
    command: tuple[str, ...] = (job.script,)
    if not job.no_python:
        command = (sys.executable, "-u", *(("-m",) if job.module else ()), job.script)
    if cores.memory_nodes and (numactl := shutil.which("numactl")):
        command = (numactl, "-m", ",".join(map(str, cores.memory_nodes)), *command)
    local_rank = (f"--local_rank={local}",) if job.local_rank_argument else ()
    pinned = ",".join(map(str, cores.cores))
    head = (sys.executable, "-I", "-S", rank_exec.__file__, str(os.getpid()), log_file, pinned)
    return (*head, *command, *local_rank, *job.arguments)


def rank_log_files(node: NodeJob) -> list[str]:
    """One log file per local rank, "" without a log directory, which is made. Raises UsageError when a file exists."""
    folder, ranks = node.job.log_dir, range(len(node.devices))
    if folder is None:
        return [""] * len(ranks)
    os.makedirs(folder, exist_ok=True)
    stamp = os.path.join(os.path.abspath(folder), time.strftime("%Y%m%d%H%M%S"))
    files = [f"{stamp}_rank{node.rank(local)}.log" for local in ranks]
    for file in filter(os.path.exists, files):
        raise UsageError(f"log file {file} exists already; name another directory with --enable_each_rank_log")
    return files


@contextlib.contextmanager
def _pid_file(path: str | None) -> Iterator[None]:
    """Keep this process's id in ``path``. Raises UsageError when the file names another living process."""
    if path is None:
        yield
        return
    remove_stale_pid_file(path)
    try:
        with open(path, "x", encoding="ascii") as file:
            file.write(str(os.getpid()))
    except FileExistsError:
        raise UsageError(f"pid file {path} exists already; another job uses it, or remove it if none does") from None
    try:
        yield
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def run_node(job: Job, node_rank: int, *, runner: str = "") -> int:
    """Run one node's part of ``job`` to the job's end and return the job's exit status, equal on all nodes.

    ``runner``: the program through which a ``deepspeed`` command on another machine started this node and reads its
    output (``ssh``, ``pdsh``). The status is that of the rank that failed first, 128 + S for a signal S that ended it
    or that a launcher received, 1 when a host was lost or the nodes did not find each other. No process of the job is
    left on this node then. Raises UsageError before any rank is started, for a port that is taken and the like.
    """
    nodes = len(job.hosts)
    if not 0 <= node_rank < nodes:
        what = f"is not one of the {nodes} node(s) of this job; count from 0 to {nodes - 1}"
        raise UsageError(f"--node_rank {node_rank} {what}")
    if nodes > 1 and job.master_port == 0 and runner != "ssh":
        what = "when nodes are started one by one: the others cannot know a port that node 0 chooses"
        raise UsageError(f"--master_port is needed {what}")
    node = NodeJob(job, node_rank, plan_cores(job, len(job.world[job.hosts[node_rank]])))
    log_files = rank_log_files(node)

    def start(go: Message) -> Ranks:
        commands = []
        for local, log_file in enumerate(log_files):
            report_file = os.path.join(scratch, f"rank{local}")
            environment = rank_environment(node, local, go, report_file)
            argv = rank_arguments(node, local, log_file)
            commands.append(RankCommand(node.rank(local), argv, environment, report_file))
        stdin = subprocess.DEVNULL if runner else None
        return Ranks(commands, guardian, lambda index: member.post("rank", index), stdin=stdin)

    member = Member(start)
    with contextlib.ExitStack() as stack:
        stack.enter_context(signals_to(lambda number: member.post("signal", number)))
        stack.enter_context(_pid_file(job.pid_file))
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="deepspeed_"))
        guardian = Guard([scratch, *([os.path.abspath(job.pid_file)] if job.pid_file else [])])
        stack.callback(guardian.dismiss)
        # The store goes last: it must be there until the last rank of the last node has ended.
        store = bind_store(job.master_addr, job.master_port) if node_rank == 0 else None
        link: Link
        if runner == "ssh":
            link = FrameLink(member.post)
            link.send(meeting_point(store) if store is not None else {"kind": "join"})
        elif store is not None:
            link = HostLink(job, store, member.post)
        else:
            link = StoreLink(job, node_rank, member.post)
        if runner == "pdsh":
            watch_output(lambda: member.post("gone"))
        verdict = member.run(link)
        # Of the launchers of one pdsh only one speaks; over ssh the command does.
        if not runner or (runner == "pdsh" and (node_rank == 0 or member.orphaned)):
            sys.stdout.flush()
            sys.stderr.write(verdict.text)
            sys.stderr.flush()
    return verdict.status
