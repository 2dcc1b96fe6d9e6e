"""Runs all ranks of one job on this machine and answers with one exit status.

Built on the process layer of torch's elastic agent (``torch.distributed.elastic.multiprocessing``), which starts every rank
as the leader of its own process group and turns signals into exceptions. The agent above that layer is not used: it reaps
ranks in a way that loses which one failed first, gives survivors 30 s after a failure, leaves the children of a dead rank
alone, and expands ``$`` in the user's arguments.

The rendezvous store lives here, as under torchrun, and is bound before any rank starts. Without a port of the user's choice
the kernel picks one, so jobs that start at the same moment cannot collide.
"""

import contextlib
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType

from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, PContext, SignalException, start_processes

from deepspeed.errors import UsageError
from deepspeed.launcher import crash_report, rank_exec
from deepspeed.launcher.verdict import RankEnd, first_failure, shell_status

FAILURE_GRACE_S = 3.0  # how long survivors of a failed rank may take to end
SIGNAL_GRACE_S = 10  # how long all ranks may take after Ctrl-C or SIGTERM; a second signal ends them at once
_POLL_S = 0.05
_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")


@dataclass(frozen=True)
class NodeJob:
    """One job on one machine.

    ``head`` is the command up to and including the script, ``tail`` what the user wrote behind it; ``--local_rank=N`` goes
    between them when ``local_rank_argument`` is set. ``master_port`` 0 lets the kernel choose.
    """

    head: tuple[str, ...]
    tail: tuple[str, ...]
    ranks: int
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    local_rank_argument: bool = True
    log_dir: str | None = None


class _Streams(LogsSpecs):
    """Every rank inherits the streams of the launcher; log files are opened by ``rank_exec`` in append mode."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        return LogsDest(stdouts=dict.fromkeys(envs, ""), stderrs=dict.fromkeys(envs, ""), error_files=dict.fromkeys(envs, os.devnull))

    @property
    def root_log_dir(self) -> str:
        return ""


def bind_store(job: NodeJob) -> TCPStore:
    """Start the rendezvous store; ``store.port`` is the port it got. Raises UsageError when the wanted port is taken."""
    try:
        return TCPStore(job.master_addr, job.master_port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    except (RuntimeError, OSError) as error:
        where = f"{job.master_addr}:{job.master_port}"
        raise UsageError(
            f"cannot listen on {where} ({_first_line(error)}); choose another --master_port, or leave it out to get a free one"
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def default_omp_threads(ranks: int) -> int:
    """Cores this process may use, shared out over ``ranks``; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // ranks)


def rank_environment(job: NodeJob, rank: int, *, port: int, report_file: str) -> dict[str, str]:
    """Variables that rank ``rank`` gets in addition to this process's own.

    The names of DeepSpeed, the names of torchrun (so that libraries recognise an elastic launch and use the launcher's
    store), and those by which ``crash_report`` is loaded and told where to write.
    """
    world = str(job.ranks)
    user_path = os.environ.get("PYTHONPATH")
    report_path = os.path.dirname(os.path.abspath(crash_report.__file__))
    environment = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": world,
        "LOCAL_SIZE": world,
        "CROSS_RANK": "0",
        "CROSS_SIZE": "1",
        "MASTER_ADDR": job.master_addr,
        "MASTER_PORT": str(port),
        "LOCAL_WORLD_SIZE": world,
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_RANK": str(rank),
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": world,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": f"deepspeed_{os.getpid()}_{port}",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(default_omp_threads(job.ranks)),
        "PYTHONPATH": os.pathsep.join([report_path, user_path]) if user_path else report_path,
        "DS_CRASH_REPORT": report_file,
    }
    if user_path:
        environment["DS_USER_PYTHONPATH"] = user_path
    return environment


def rank_arguments(job: NodeJob, rank: int, log_file: str) -> tuple[str, ...]:
    """Arguments of ``sys.executable`` that start rank ``rank`` through ``rank_exec``."""
    local_rank = (f"--local_rank={rank}",) if job.local_rank_argument else ()
    return ("-I", "-S", rank_exec.__file__, str(os.getpid()), log_file, *job.head, *local_rank, *job.tail)


def rank_log_files(job: NodeJob) -> dict[int, str]:
    """Rank -> log file (empty without a log directory); creates the directory. Raises UsageError when a file exists."""
    if job.log_dir is None:
        return dict.fromkeys(range(job.ranks), "")
    os.makedirs(job.log_dir, exist_ok=True)
    stamp = time.strftime("%Y%m%d%H%M%S")
    files = {rank: os.path.abspath(os.path.join(job.log_dir, f"{stamp}_rank{rank}.log")) for rank in range(job.ranks)}
    for file in files.values():
        if os.path.exists(file):
            raise UsageError(f"log file {file} exists already; name another directory with --enable_each_rank_log")
    return files


class _Watch:
    """Notes when and how each rank ended, and ends the others for good when one failed and they do not follow."""

    def __init__(self, pids: dict[int, int]) -> None:
        self._pids = pids
        self._lock = threading.Lock()
        self._ended_at: dict[int, float] = {}
        self._killed: set[int] = set()
        self._failed = threading.Event()
        if hasattr(os, "waitid"):
            for rank in pids:
                threading.Thread(target=self._wait, args=(rank,), daemon=True).start()
        threading.Thread(target=self._escalate, daemon=True).start()

    def _wait(self, rank: int) -> None:
        # WNOWAIT leaves the status to torch's own poll; only the moment matters here.
        try:
            info = os.waitid(os.P_PID, self._pids[rank], os.WEXITED | os.WNOWAIT)
            failed = info is None or info.si_code != os.CLD_EXITED or info.si_status != 0
        except ChildProcessError:
            failed = False  # reaped a moment ago by that poll, which judges the status
        with self._lock:
            self._ended_at[rank] = time.time()
        if failed:
            self._failed.set()

    def _escalate(self) -> None:
        self._failed.wait()
        time.sleep(FAILURE_GRACE_S)
        with self._lock:
            self._killed = set(self._pids) - set(self._ended_at)
        self.kill_groups()

    def kill_groups(self) -> None:
        """SIGKILL to every rank's process group: the rank itself and what it started."""
        for pid in self._pids.values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)

    def end(self, rank: int, exitcode: int, report_file: str) -> RankEnd:
        """What is known about the end of ``rank``."""
        with self._lock:
            moment, killed = self._ended_at.get(rank, time.time()), rank in self._killed
        raised_at, traceback = _read_report(report_file)
        return RankEnd(rank, self._pids[rank], exitcode, moment, raised_at=raised_at, traceback=traceback, stopped_by_us=killed)


def _read_report(report_file: str) -> tuple[float | None, str]:
    try:
        with open(report_file, encoding="utf-8") as file:
            moment, _, traceback = file.read().partition("\n")
        return float(moment), traceback
    except (OSError, ValueError):
        return None, ""  # the rank ended without an exception, or while it was writing


@contextlib.contextmanager
def _signals_and_quiet_torch() -> Iterator[None]:
    """Give back the caller's signal handlers afterwards, and keep torch's own account of the same events silent."""
    torch_log = logging.getLogger("torch.distributed.elastic")
    level = torch_log.level
    numbers = {name: getattr(signal, name) for name in _SIGNALS if hasattr(signal, name)}
    before = {name: signal.getsignal(number) for name, number in numbers.items()}
    # Under nohup SIGHUP is ignored, and stays so.
    handled = [name for name in numbers if name != "SIGHUP" or before[name] is not signal.SIG_IGN]
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(handled)
    torch_log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        del os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"]
        torch_log.setLevel(level)
        if threading.current_thread() is threading.main_thread():
            for name, handler in before.items():
                signal.signal(numbers[name], handler)


def _interrupted(processes: PContext, watch: _Watch, received: signal.Signals) -> int:
    """Pass ``received`` on, wait for the ranks to finish in their own way, and end them on a second signal."""

    def at_once(number: int, frame: FrameType | None) -> None:
        watch.kill_groups()

    if threading.current_thread() is threading.main_thread():
        for name in _SIGNALS:
            signal.signal(getattr(signal, name), at_once)
    sys.stderr.write(f"deepspeed: {received.name} received; waiting up to {SIGNAL_GRACE_S} s for the ranks to end\n")
    processes.close(received, SIGNAL_GRACE_S)
    watch.kill_groups()
    return shell_status(-received)


def _supervise(job: NodeJob, arguments: dict[int, tuple[str, ...]], environments: dict[int, dict[str, str]]) -> int:
    with _signals_and_quiet_torch():
        try:
            processes = start_processes("default", sys.executable, arguments, environments, _Streams())
        except SignalException as stop:
            return shell_status(-stop.sigval)  # ranks that did start end with this process, see rank_exec
        watch = _Watch(processes.pids())
        try:
            result = processes.wait(period=_POLL_S)
        except SignalException as stop:
            return _interrupted(processes, watch, stop.sigval)
    if result is None or not result.failures:
        return 0
    watch.kill_groups()
    ends = [watch.end(rank, failure.exitcode, environments[rank]["DS_CRASH_REPORT"]) for rank, failure in result.failures.items()]
    first = first_failure(ends)
    sys.stdout.flush()
    sys.stderr.write(first.describe(show_traceback=job.ranks > 1))
    sys.stderr.flush()
    return shell_status(first.exitcode)


def run_node(job: NodeJob) -> int:
    """Run the job to its end and return its exit status.

    0 when every rank returned 0; otherwise the status of the rank that failed first, 128 + S for one ended by signal S, and
    the same for a signal S that this process received. When it returns, no process of the job is left.
    Raises UsageError when the port is taken or a log file exists; no rank has been started then.
    """
    log_files = rank_log_files(job)
    store = bind_store(job)
    with tempfile.TemporaryDirectory(prefix="deepspeed_") as scratch:
        reports = {rank: os.path.join(scratch, f"rank{rank}") for rank in range(job.ranks)}
        environments = {rank: rank_environment(job, rank, port=store.port, report_file=reports[rank]) for rank in reports}
        arguments = {rank: rank_arguments(job, rank, log_files[rank]) for rank in reports}
        return _supervise(job, arguments, environments)
