"""Runs the ranks of one node and answers with the exit status of the whole job, which is the same on every node.

This module turns a job into the ranks' commands and environments. The way of a dead rank: ``ranks`` (the process ends),
``member`` (what this node does), ``hub`` (all nodes hear of it) and ``verdict`` (what was to blame); over ssh the
verdict goes through ``command`` to ``deepspeed.launcher.fanout``.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time

from deepspeed.device import get_accelerator
from deepspeed.errors import UsageError
from deepspeed.launcher import crash_report
from deepspeed.launcher.affinity import plan_cores
from deepspeed.launcher.job import Job, check_node_rank
from deepspeed.launcher.machine import pid_file
from deepspeed.launcher.node.command import tell_command, watch_command, watch_output
from deepspeed.launcher.node.hub import Hub, Spoke, bind_store
from deepspeed.launcher.node.loop import Message, signals_to
from deepspeed.launcher.node.member import Member
from deepspeed.launcher.node.ranks import Guard, RankCommand, Ranks


def rank_environment(job: Job, node_rank: int, local: int, go: Message, cores: tuple[int, ...]) -> dict[str, str]:
    """Variables that rank ``local`` of node ``node_rank`` gets in addition to this process's own.

    The names of DeepSpeed, the names of torchrun (so that libraries recognise an elastic launch and use the launcher's
    store), the visible devices, and those by which ``crash_report`` is loaded.
    """
    devices = job.devices(node_rank)
    ranks = len(devices)
    threads = os.environ.get("OMP_NUM_THREADS") or max(1, len(os.sched_getaffinity(0)) // ranks)
    user_path = os.environ.get("PYTHONPATH")
    report_path = os.path.dirname(os.path.abspath(crash_report.__file__))
    names = {
        "RANK ROLE_RANK": job.first_rank(node_rank) + local,
        "LOCAL_RANK": local,
        "WORLD_SIZE ROLE_WORLD_SIZE": job.world_size,
        "LOCAL_SIZE LOCAL_WORLD_SIZE": ranks,
        "CROSS_RANK GROUP_RANK": node_rank,
        "CROSS_SIZE GROUP_WORLD_SIZE": len(job.hosts),
        "MASTER_ADDR": job.master_addr,
        "MASTER_PORT": go["port"],
        "ROLE_NAME": "default",
        "TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_RUN_ID": go["run_id"],
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        "OMP_NUM_THREADS": len(cores) or threads,
        "PYTHONPATH": os.pathsep.join([report_path, user_path]) if user_path else report_path,
        "DS_LAUNCHER_PID": os.getpid(),
        **({"DS_USER_PYTHONPATH": user_path} if user_path else {}),
    }
    environment = {name: str(value) for equal, value in names.items() for name in equal.split()}
    if job.on_devices:
        get_accelerator().set_visible_devices_envs(environment, list(devices))
    return environment


def rank_arguments(job: Job, local: int) -> tuple[str, ...]:
    """The command line of local rank ``local``."""
    # A program that cannot be started is then the rank's failure, with a shell's words and status.
    head = ("/bin/sh", "-c", 'exec "$0" "$@"')
    if not job.no_python:
        head = (sys.executable, "-u", *(("-m",) if job.module else ()))
    return (*head, job.script, *((f"--local_rank={local}",) if job.local_rank_argument else ()), *job.arguments)


def rank_log_files(job: Job, node_rank: int) -> list[str]:
    """One log file per local rank, "" without a log directory, which is made. Raises UsageError when a file exists."""
    ranks = range(len(job.devices(node_rank)))
    if job.log_dir is None:
        return [""] * len(ranks)
    os.makedirs(job.log_dir, exist_ok=True)
    stamp = os.path.join(os.path.abspath(job.log_dir), time.strftime("%Y%m%d%H%M%S"))
    files = [f"{stamp}_rank{job.first_rank(node_rank) + local}.log" for local in ranks]
    for file in filter(os.path.exists, files):
        raise UsageError(f"log file {file} exists already; name another directory with --enable_each_rank_log")
    return files


def run_node(job: Job, node_rank: int, *, runner: str = "") -> int:
    """Run one node's part of ``job`` to the job's end and return the job's exit status, equal on all nodes.

    ``runner``: the program through which a ``deepspeed`` command on another machine started this node and reads its
    output (``ssh``, ``pdsh``). The status is that of the rank that failed first, 128 + S for a signal S that ended it
    or that a launcher received, 1 when a host was lost or the nodes did not find each other. No process of the job is
    left on this node then. Raises UsageError before any rank is started, for a port that is taken and the like.
    """
    check_node_rank(node_rank, len(job.hosts))
    if len(job.hosts) > 1 and job.master_port == 0 and runner != "ssh":
        what = "when nodes are started one by one: the others cannot know a port that node 0 chooses"
        raise UsageError(f"--master_port is needed {what}")
    cores, log_files = plan_cores(job, len(job.devices(node_rank))), rank_log_files(job, node_rank)

    def start(go: Message) -> Ranks:
        commands = []
        for local, log_file in enumerate(log_files):
            report_file = os.path.join(scratch, f"rank{local}")
            environment = rank_environment(job, node_rank, local, go, cores[local])
            environment["DS_CRASH_REPORT"] = report_file
            rank, argv = job.first_rank(node_rank) + local, rank_arguments(job, local)
            commands.append(RankCommand(rank, argv, environment, report_file, log_file, cores[local]))
        stdin = subprocess.DEVNULL if runner else None
        return Ranks(commands, guardian, lambda index: member.post("rank", index), stdin=stdin)

    member = Member(start)
    with contextlib.ExitStack() as stack:
        stack.enter_context(signals_to(lambda number: member.post("signal", number)))
        stack.enter_context(pid_file(job.pid_file))
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="deepspeed_"))
        guardian = Guard([scratch, *([os.path.abspath(job.pid_file)] if job.pid_file else [])])
        stack.callback(guardian.dismiss)
        # The store goes last: it must be there until the last rank of the last node has ended.
        store = bind_store(job.master_addr, job.master_port) if node_rank == 0 else None
        link = Spoke(job, node_rank, member.post) if store is None else Hub(job, store, member.post)
        if runner == "ssh":
            tell_command({"kind": "join", **({} if store is None else {"port": store.port})})
            watch_command(member.post)
        elif isinstance(link, Spoke):
            link.port.put(job.master_port)
        if runner == "pdsh":
            watch_output(lambda: member.post("interrupt", signal.SIGTERM, True))  # noqa: FBT003
        verdict = member.run(link)
        # Of the launchers of one pdsh only one speaks; over ssh the command does.
        if runner == "ssh":
            tell_command({"kind": "verdict", "status": verdict.status, "text": verdict.text})
        elif not runner or node_rank == 0 or member.orphaned:
            sys.stdout.flush()
            sys.stderr.write(verdict.text)
            sys.stderr.flush()
    return verdict.status
