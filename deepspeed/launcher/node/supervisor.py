"""Runs the ranks of one node and answers with the exit status of the whole job, which is the same on every node.

The way of a dead rank: ``ranks`` (the process ends), ``Member`` (what this node does), ``hub`` (all nodes hear of it)
and ``verdict`` (what was to blame); over ssh the verdict goes through ``loop`` to ``deepspeed.launcher.fanout``.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time

from deepspeed.accelerator.device import get_accelerator
from deepspeed.errors import UsageError
from deepspeed.launcher import crash_report
from deepspeed.launcher.job import Job, check_node_rank
from deepspeed.launcher.machine import pid_file, plan_cores
from deepspeed.launcher.node.hub import Hub, Spoke, bind_store
from deepspeed.launcher.node.loop import (
    FAILURE_GRACE_S,
    LOSS_GRACE_S,
    EventLoop,
    Message,
    signals_to,
    tell_command,
    watch_command,
    watch_output,
)
from deepspeed.launcher.node.ranks import KILL_S, Guard, Ranks, made, scratch_path
from deepspeed.launcher.node.verdict import LOST_HOST_STATUS, Verdict, interrupted


def rank_environment(job: Job, node_rank: int, local: int, go: Message, cores: tuple[int, ...]) -> dict[str, str]:
    """Return the variables of rank ``local`` of node ``node_rank`` in addition to this process's own.

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
        "DS_SIGNAL_GRACE_S": f"{job.signal_grace:g}",
        **({"DS_HANG_TIMEOUT": job.hang_timeout} if job.hang_timeout else {}),
        **({"DS_USER_PYTHONPATH": user_path} if user_path else {}),
    }
    environment = {name: str(value) for equal, value in names.items() for name in equal.split()}
    if job.on_devices:
        get_accelerator().set_visible_devices_envs(environment, list(devices))
    return environment


def rank_arguments(job: Job, local: int) -> tuple[str, ...]:
    """Return the command line of local rank ``local``."""
    # A program that cannot be started is then the rank's failure, with a shell's words and status.
    head = ("/bin/sh", "-c", 'exec "$0" "$@"')
    if not job.no_python:
        head = (sys.executable, "-u", *(("-m",) if job.module else ()))
    return (*head, job.script, *((f"--local_rank={local}",) if job.local_rank_argument else ()), *job.arguments)


def rank_log_files(job: Job, node_rank: int) -> list[str]:
    """Return a log file per local rank ("" without a log directory, which is made). UsageError when one exists."""
    ranks = range(len(job.devices(node_rank)))
    if job.log_dir is None:
        return [""] * len(ranks)
    os.makedirs(job.log_dir, exist_ok=True)
    stamp = os.path.join(os.path.abspath(job.log_dir), time.strftime("%Y%m%d%H%M%S"))
    files = [f"{stamp}_rank{job.first_rank(node_rank) + local}.log" for local in ranks]
    for file in filter(os.path.exists, files):
        raise UsageError(f"log file {file} exists already; name another directory with --enable_each_rank_log")
    return files


class Member(EventLoop):
    """Run the ranks of one node, as its launcher and a member of the job, from ``go`` to the verdict.

    Signals, ends of ranks and messages of the hub all arrive as events from handlers and threads. ``orphaned`` is the
    verdict of a node that has lost the hub or its command, and must judge alone. Raises as ``run_node``.
    """

    def __init__(self, job: Job, node_rank: int) -> None:
        super().__init__()
        self._job, self._node_rank, self.grace_s = job, node_rank, job.signal_grace
        self._cores = plan_cores(job, len(job.devices(node_rank)))
        self._log_files = rank_log_files(job, node_rank)
        self._stopping = self._killed = self._reported = False
        self._verdict: Verdict | None = None
        self.orphaned: Verdict | None = None

    def run(self, ranks: Ranks, link: Hub | Spoke) -> Verdict:
        """Handle events until the job is decided; no rank of this node is left then."""
        self._ranks, self._link, self.tick_s = ranks, link, link.tick_s
        try:
            while self._verdict is None:
                self.handle_next()
            return self._verdict
        finally:
            if self._stopping or not ranks.all_ended:
                ranks.kill_groups()
            ranks.reap()
            link.close()

    def _on_tick(self) -> None:
        self._link.tick()

    def _on_port(self, port: int) -> None:
        if isinstance(self._link, Spoke):
            self._link.port.put(port)

    def _on_refused(self, why: str) -> None:
        self._verdict = Verdict(LOST_HOST_STATUS, f"deepspeed: {why}\n")

    def _on_hub(self, message: Message) -> None:
        kind = message["kind"]
        if kind == "go" and not self._stopping:
            job, node_rank = self._job, self._node_rank
            for local, (log_file, cores) in enumerate(zip(self._log_files, self._cores, strict=True)):
                rank, argv = job.first_rank(node_rank) + local, rank_arguments(job, local)
                self._ranks.start(rank, argv, rank_environment(job, node_rank, local, message, cores), log_file, cores)
        elif kind == "stop":
            self._stop(message["signal"], message["grace"])
        elif kind == "verdict":
            self._verdict = Verdict(message["status"], message["text"])

    def _on_lost(self, text: str) -> None:
        self.orphaned = Verdict(LOST_HOST_STATUS, text)
        self._stop(signal.SIGTERM, LOSS_GRACE_S)
        if self._reported:
            self._verdict = self.orphaned

    def _on_rank(self, exitcode: int) -> None:
        if exitcode != 0 and not self._stopping:
            # The other nodes first: they need the time more.
            self._link.send({"kind": "failed"})
            self._stop(signal.SIGTERM, FAILURE_GRACE_S)
        if self._ranks.all_ended:
            self._report()

    def _on_interrupt(self, number: int, immediate: bool) -> None:  # noqa: FBT001 - a value of an event
        if not self._link.joined:
            self._verdict = interrupted(number)
            return
        self._link.send({"kind": "signal", "number": number, "immediate": immediate})
        self._stop(number, 0.0 if immediate else self._job.signal_grace)

    def _stop(self, number: int, grace_s: float) -> None:
        """End the ranks: send ``number`` to each, once, and SIGKILL to the rest after ``grace_s``."""
        deadline = time.monotonic() + grace_s
        first, self._stopping = not self._stopping, True
        if self._ranks.all_ended:
            self._report()
        elif not self._reported:
            if first and grace_s > 0:
                self._ranks.signal(number)
            self.deadline = deadline if self.deadline is None else min(deadline, self.deadline)

    def _on_deadline(self) -> None:
        if self._killed:
            self._report()
        else:
            self._killed = True
            self._ranks.kill_groups()
            self.deadline = time.monotonic() + KILL_S

    def _report(self) -> None:
        """Tell the hub how the ranks of this node ended, once."""
        if self._reported:
            return
        self._reported, self.deadline = True, None
        if self._stopping:
            self._ranks.kill_groups()
        ends = [vars(end) for end in self._ranks.failures()]
        self._link.send({"kind": "report", "ends": ends, "now": time.time()})
        if self.orphaned is not None:
            self._verdict = self.orphaned


def run_node(job: Job, node_rank: int, *, runner: str = "") -> int:
    """Run one node's part of ``job`` to the job's end and return the job's exit status, equal on all nodes.

    ``runner``: the program through which a ``deepspeed`` command on another machine started this node and reads its
    output (``ssh``, ``pdsh``). The status is that of the rank that failed first, 128 + S for a signal S that ended it
    or that a launcher received, 1 when a host was lost or the nodes did not find each other. No process of the job is
    left on this node then. Raises UsageError before any rank is started, for a port that is taken and the like.
    """
    check_node_rank(node_rank, len(job.hosts))
    if len(job.hosts) > 1 and job.master_port == 0 and runner != "ssh":
        reason = "when nodes are started one by one: the others cannot know a port that node 0 chooses"
        raise UsageError(f"--master_port is needed {reason}")
    member = Member(job, node_rank)
    with contextlib.ExitStack() as stack:
        stack.enter_context(signals_to(lambda number: member.post("signal", number), signal.SIGUSR1))
        if job.pid_file:
            stack.enter_context(pid_file(job.pid_file))
        scratch = scratch_path()
        guardian = Guard([scratch, *([job.pid_file] if job.pid_file else [])])
        stack.callback(guardian.dismiss)
        stack.enter_context(made(scratch))
        stdin = subprocess.DEVNULL if runner else None
        ranks = Ranks(guardian, lambda exitcode: member.post("rank", exitcode), scratch=scratch, stdin=stdin)
        # The store goes last: it must be there until the last rank of the last node has ended.
        store = bind_store(job.master_addr, job.master_port) if node_rank == 0 else None
        post = member.post
        link = Spoke(job, node_rank, post) if store is None else Hub(job, store, post, port=store.port)
        if runner == "ssh":
            tell_command({"kind": "join", **({} if store is None else {"port": store.port})})
            watch_command(member.post)
        elif isinstance(link, Spoke):
            link.port.put(job.master_port)
        if runner == "pdsh":
            watch_output(member.post)
        verdict = member.run(ranks, link)
        # Of the launchers of one pdsh only one speaks; over ssh the command does.
        if runner == "ssh":
            tell_command({"kind": "verdict", "status": verdict.status, "text": verdict.text})
        elif not runner or node_rank == 0 or member.orphaned:
            sys.stdout.flush()
            sys.stderr.write(verdict.text)
            sys.stderr.flush()
    return verdict.status
