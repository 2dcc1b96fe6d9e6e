"""torch's elastic agent with this launcher's ranks: when to restart is its decision, how ranks start and end is ours.

``SimpleElasticAgent`` leaves starting, stopping and watching workers to its subclasses. Here they are the rank
processes of every job (``node.ranks``): crash reports name the rank that failed first, no process outlives the agent.
"""

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from typing import Any

from torch.distributed import Store, TCPStore
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousError

from deepspeed.errors import PreemptedExit, UsageError
from deepspeed.launcher.elastic.membership import ASKED, JOIN, Membership
from deepspeed.launcher.job import Job
from deepspeed.launcher.machine import own_address, pid_file, plan_cores
from deepspeed.launcher.node.hub import await_port, bind_store
from deepspeed.launcher.node.loop import FAILURE_GRACE_S, join_limit, signals_to, tell_command, watch_command
from deepspeed.launcher.node.ranks import KILL_S, Guard, Ranks, made, scratch_path
from deepspeed.launcher.node.supervisor import rank_arguments, rank_environment, rank_log_files
from deepspeed.launcher.node.verdict import LOST_HOST_STATUS, RankEnd, Verdict, interrupted, judge, preempted
from deepspeed.monitor.log import logger

_TORCHS = re.compile(r"torch\.distributed\.elastic(\.|$)")  # loggers; several have a level of their own
_POLL_S = 0.1
_TELL_S = 3.0  # how long to wait for what other nodes say of their ranks
_FAREWELL_S = 1.5  # nodes that wait to be taken in look once a second


class NodeAgent(SimpleElasticAgent):
    """Run the ranks of one node, round after round. ``received``: signals of this process, which the ranks get too.

    ``guard`` watches this process from the start to the end, also while no rank runs; its maker dismisses it.
    ``tells``: say on the terminal that a signal was received.
    """

    def __init__(self, job: Job, membership: Membership, guard: Guard, *, scratch: str, tells: bool) -> None:
        assert job.elastic is not None
        spec = WorkerSpec(
            role="default",
            local_world_size=1,  # until the first rendezvous
            rdzv_handler=membership,
            entrypoint=sys.executable,
            max_restarts=job.elastic.max_restarts,
            monitor_interval=_POLL_S,
        )
        super().__init__(spec)
        self._job, self._membership, self._scratch = job, membership, scratch
        membership.set_ranks = lambda ranks: setattr(spec, "local_world_size", ranks)
        self._ranks: Ranks | None = None
        self.guard, self._tells = guard, tells
        self.received: list[int] = []  # after a second one the ranks get no time
        self.verdict: Verdict | None = None
        self._starting = False

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self._starting = True  # it may wait for long: a signal ends it
        try:
            self._obey()
            super()._rendezvous(worker_group)
        finally:
            self._starting = False

    def _assign_worker_ranks(
        self, store: Store, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        start = self._membership.round  # all nodes know it, where torch's way would wait for one that is lost meanwhile
        job = replace(self._job, world=start.world)
        first, size = job.first_rank(start.node), job.world_size
        return [Worker(i, first + i, first + i, size, size) for i in range(spec.local_world_size)]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        start = self._membership.round
        job = replace(self._job, world=start.world, master_addr=start.address)
        if job.log_dir:
            job = replace(job, log_dir=os.path.join(job.log_dir, f"round{start.number}"))
        ranks, number = len(job.devices(start.node)), start.number
        if start.number:
            logger.info("round %d: %d ranks on %d node(s)", number, job.world_size, len(job.hosts))
        scratch = os.path.join(self._scratch, f"round{number}")
        os.makedirs(scratch, exist_ok=True)
        self._ranks = Ranks(self.guard, lambda exitcode: None, scratch=scratch, stdin=subprocess.DEVNULL)
        go = {"port": start.port, "run_id": f"{self._membership.get_run_id()}_{number}"}
        more = {
            "TORCHELASTIC_RESTART_COUNT": str(number),
            "TORCHELASTIC_MAX_RESTARTS": str(worker_group.spec.max_restarts),
            "DS_CHECKPOINT_NOTE": os.path.join(self._scratch, "checkpoint"),
            **({"DS_ELASTIC_SAVED": saved} if (saved := self._membership.saved) else {}),
        }
        cores = plan_cores(job, ranks)
        for local, log_file in enumerate(rank_log_files(job, start.node)):
            environment = rank_environment(job, start.node, local, go, cores[local]) | more
            self._ranks.start(
                job.first_rank(start.node) + local, rank_arguments(job, local), environment, log_file, cores[local]
            )
        return dict.fromkeys(range(ranks))

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        over = self._membership.over
        number = int(over.removeprefix(ASKED)) if over.startswith(ASKED) else None
        if over == JOIN:
            number = signal.SIGTERM  # after a checkpoint those that take part save once more and end by themselves
        ends = self._end_ranks(number or 0, FAILURE_GRACE_S if number is None else self._job.signal_grace)
        if over != JOIN:
            self._end_with(ends)
        if ends:
            self._membership.leave_ends([asdict(end) for end in ends])

    def _exit_barrier(self) -> None:
        pass  # all have ended well before one node's agent comes here: see ``Membership.end_well``

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self._end_ranks(death_sig, 0.0)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        assert self._ranks is not None
        self._obey()
        done = self._ranks.all_ended  # first: the last one may fail in between
        failed = self._ranks.failures(ended_only=True)
        if not failed:
            done = done and self._membership.end_well()
            results = {worker.global_rank: None for worker in worker_group.workers} if done else {}
            return RunResult(WorkerState.SUCCEEDED if done else WorkerState.HEALTHY, return_values=results)
        over = self._membership.over
        if over != JOIN:
            self._end_with(failed)
        if over:  # another node's ranks failed first, or all start anew: no crash of ours
            return RunResult(WorkerState.HEALTHY)
        first = self._membership.end_round("a rank failed")
        # No signal: it would ask for a save, for which the rank that failed lacks.
        ends = self._end_ranks(0, FAILURE_GRACE_S)
        self._end_with(ends)
        self._membership.leave_ends([asdict(end) for end in ends])
        dead = [end for end in ends if end.exitcode < 0 and not end.is_consequence and not end.stopped_by_us]
        crashes = self._membership.count_crash() if first == "a rank failed" else 0
        # The number of restarts that are left counts from the last checkpoint on, and is that of all nodes.
        self._remaining_restarts = worker_group.spec.max_restarts + 1 - max(1, crashes)
        if self._remaining_restarts > 0:
            start = self._membership.round
            base = replace(self._job, world=start.world).first_rank(start.node)
            self._membership.lose([end.rank - base for end in dead])
            cause = self._cause(0.0)
            logger.warning(
                "%s; starting again from %s (%d of %d restarts without a new checkpoint)",
                cause.text.partition("\n")[0].removeprefix("deepspeed: ").partition("; all")[0],
                self._membership.saved or "the beginning",
                max(1, crashes),
                worker_group.spec.max_restarts,
            )
        return RunResult(WorkerState.FAILED)

    def interrupt(self, number: int) -> None:
        """Note a signal to end; safe in a signal handler. Raises SignalException while waiting for other nodes."""
        self.received.append(number)
        if self._starting:
            raise SignalException(f"signal {number}", signal.Signals(number))
        if self._tells and len(self.received) == 1:
            wait = f"waiting up to {self._job.signal_grace:g} s for the ranks to end"
            with contextlib.suppress(OSError):
                os.write(2, f"deepspeed: {signal.Signals(number).name} received; {wait}\n".encode())

    def _obey(self) -> None:
        """Forward a received signal, give the ranks their time, and leave. Raises SignalException then."""
        if not self.received:
            return
        number = self.received[0]
        self.verdict = interrupted(number)
        if self._ranks is not None:
            self._ranks.signal(number)
            self._ask(number)
            self._wait(self._ranks, self._job.signal_grace, signals=2)
            self._end_with(self._ranks.failures(ended_only=True))
        raise SignalException(f"signal {number}", signal.Signals(number))

    def _ask(self, number: int) -> None:
        """End the job on all nodes: their ranks get ``number``, and time to end."""
        with contextlib.suppress(RuntimeError):  # the store is gone; the ranks of this node get theirs all the same
            self._membership.end_round(f"{ASKED}{number}")
            self._membership.set_closed()
            if self.verdict == preempted():
                self._membership.agree_on(self.verdict)

    def _end_with(self, ends: list[RankEnd]) -> None:
        """End the job when one of the ranks has saved and ended: no rank ends so before the checkpoint is complete.

        Raises SignalException then.
        """
        if not any(end.exitcode == PreemptedExit.exit_status for end in ends):
            return
        self.verdict = preempted()
        self._ask(0)
        self._end_ranks(0, self._job.signal_grace)
        raise SignalException("preempted", signal.SIGTERM)

    def _end_ranks(self, number: int, grace_s: float) -> list[RankEnd]:
        """Let the ranks end, after ``number`` if not 0, then kill; return the ends of ranks that did not return 0.

        Forgets the round's ranks and process groups, whose numbers other processes may get.
        """
        ranks = self._ranks
        if ranks is None:
            return []
        if number and grace_s > 0 and not ranks.all_ended:
            ranks.signal(number)
        self._wait(ranks, grace_s, signals=2)
        ranks.kill_groups()
        self._wait(ranks, KILL_S)
        self._ranks = None
        ranks.reap()
        self.guard, before = Guard([self._scratch]), self.guard
        before.dismiss()
        return ranks.failures()

    def _wait(self, ranks: Ranks, limit_s: float, *, signals: float = float("inf")) -> None:
        until = time.monotonic() + limit_s
        while not ranks.all_ended and time.monotonic() < until and len(self.received) < signals:
            time.sleep(0.02)

    def _cause(self, wait_s: float) -> Verdict:
        """Return the verdict on what ended this round, from the reports of all nodes."""
        reports = self._membership.ends(wait_s)
        several = len(reports) > 1
        ends = [
            RankEnd(**end).on_another_clock(ahead_s, host=host if several else "")
            for host, (ahead_s, listed) in reports.items()
            for end in listed
        ]
        return judge(ends, [], show_traceback=True)

    def decide(self) -> Verdict:
        """Run all rounds; return the verdict on the job, which is that of all nodes."""
        try:
            result = self.run()
        except SignalException:
            number = self.received[0] if self.received else signal.SIGTERM
            verdict = self.verdict = self.verdict or interrupted(number)
        except RendezvousClosedError:
            return self._verdict_elsewhere()
        except (RendezvousError, UsageError) as error:
            verdict = Verdict(LOST_HOST_STATUS, f"deepspeed: {error or type(error).__name__}\n")
        else:
            if result is None:  # of torch, for a node more than the job takes
                return self._verdict_elsewhere()
            verdict = self._given_up() if result.is_failed() else Verdict(0)
        return self._membership.agree_on(verdict)

    def _verdict_elsewhere(self) -> Verdict:
        """Return the verdict of the node that ended the job."""
        if self._membership.outside:
            logger.info("the job has ended; it has not taken this node in")
        return self._membership.agreed(longest_end(self._job), lambda: bool(self.received))

    def _given_up(self) -> Verdict:
        self._membership.set_closed()
        cause, limit = self._cause(_TELL_S), self._worker_group.spec.max_restarts
        why = f"deepspeed: given up after {limit} restart(s) without a new checkpoint (--max_restarts {limit})\n"
        return Verdict(cause.status or 1, why + cause.text)


def longest_end(job: Job) -> float:
    """Return the most seconds that any node takes to end, from the moment it knows that the job is to end."""
    return job.signal_grace + 2 * KILL_S + _TELL_S


def _join(job: Job, node_rank: int, *, runner: str) -> Store:
    """Return the store in which the nodes meet: node 0's, or the command's over ssh."""
    if node_rank == 0 and runner != "ssh":
        return bind_store(job.master_addr, job.master_port)
    await_port(job.master_addr, job.master_port, join_limit())
    return TCPStore(job.master_addr, job.master_port, is_master=False, wait_for_workers=False)


def _tell(verdict: Verdict, runner: str) -> None:
    """Tell how the job has ended: the command where one reads this, else whoever reads the terminal."""
    if runner == "ssh":
        tell_command({"kind": "verdict", "status": verdict.status, "text": verdict.text})
        return
    sys.stdout.flush()
    sys.stderr.write(verdict.text)
    sys.stderr.flush()


def run_elastic_node(job: Job, node_rank: int, *, runner: str = "") -> int:
    """Run one node's part of the elastic ``job`` and return the job's exit status; no process of it is left here then.

    ``runner`` "ssh": a ``deepspeed`` command elsewhere started this node and reads its output. The status is 0, that of
    the rank that failed first in the last round, 200 when all ranks have saved and ended on a signal, 128 + S after
    signal S. Raises UsageError before any rank is started, or when too few ranks come together.
    """
    assert job.elastic is not None
    for name in filter(_TORCHS.match, list(logging.root.manager.loggerDict)):
        logging.getLogger(name).setLevel(logging.ERROR)  # what they have to say, this launcher says
    if job.elastic.max_nodes > 1 and job.master_port == 0:
        raise UsageError("--master_port is needed when nodes are started one by one: the others cannot know a free one")
    host = job.hosts[node_rank] if node_rank < len(job.hosts) else f"node{node_rank}"
    devices = job.devices(min(node_rank, len(job.hosts) - 1))
    agent: NodeAgent | None = None

    def hear(kind: str, *values: Any) -> None:  # of the command, from a thread
        number, immediate = (signal.SIGTERM, True) if kind == "lost" else values
        number = signal.SIGTERM if number == signal.SIGPIPE else number
        for _ in range(1 + immediate):  # the main thread may be waiting for other nodes, which only a signal ends
            os.kill(os.getpid(), number)

    with contextlib.ExitStack() as stack:
        stop = lambda n: agent.interrupt(n) if agent is not None else sys.exit(128 + n)  # noqa: E731
        stack.enter_context(signals_to(stop, signal.SIGUSR1))
        if job.pid_file:
            stack.enter_context(pid_file(job.pid_file))
        scratch = scratch_path()
        guard = Guard([scratch])
        stack.callback(lambda: (guard if agent is None else agent.guard).dismiss())
        stack.enter_context(made(scratch))
        if runner == "ssh":
            tell_command({"kind": "join"})
            watch_command(hear)
        store = _join(job, node_rank, runner=runner)
        address = "127.0.0.1" if job.master_addr == "127.0.0.1" else own_address(job.master_addr)
        note = os.path.join(scratch, "checkpoint")
        membership = Membership(store, job.elastic, host=host, address=address, devices=devices, note=note)
        agent = NodeAgent(job, membership, guard, scratch=scratch, tells=runner != "ssh")
        verdict = _decided(agent)
        with contextlib.suppress(RuntimeError):
            membership.shutdown()
        _tell(verdict, runner)
        _part(agent, membership, longest_end(job) if node_rank == 0 and runner != "ssh" else 0.0)
    return verdict.status


def _decided(agent: NodeAgent) -> Verdict:
    try:
        return agent.decide()
    except RuntimeError as error:  # torch's of the store
        why = str(error).partition("\n")[0]
        text = f"deepspeed: the store in which the nodes meet is gone: {why}\n"
        return agent.verdict or Verdict(LOST_HOST_STATUS, text)


def _part(agent: NodeAgent, membership: Membership, wait_s: float) -> None:
    """Leave the job: give the others their time, where the store goes with this process; one more signal ends that."""
    heard = len(agent.received)
    with contextlib.suppress(RuntimeError):
        if membership.leave(wait_s, lambda: len(agent.received) > heard) and wait_s:
            time.sleep(_FAREWELL_S)
