"""A persistent pool of gloo ranks on this machine: start once, run many functions, never hang.

``pool.run(fn, *args)`` calls ``fn(*args)`` on every rank and returns the results in rank order. A rank that raises,
dies or exceeds the time limit fails the call with every rank's traceback; the pool is then killed, by process id,
and rebuilt at the next call, since the survivors may wait in a collective for ever.
"""

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import resource_tracker, util
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from deepspeed.comm.init import free_port
from deepspeed.errors import DeepSpeedError

LOG_TAIL_LINES = 60
GRACE_SECONDS = 3.0  # how long the other ranks may take to report after the first one failed


class RankFailure(DeepSpeedError, RuntimeError):
    """Failure of a rank that raised, died or hung; the message holds all ranks' accounts, ``types`` exception names."""

    def __init__(self, message: str, types: dict[int, str]) -> None:
        super().__init__(message)
        self.types = types


def rank_context() -> ForkServerContext:
    """Prepare a server that imports torch and deepspeed once, so that a new rank costs milliseconds."""
    # Thread counts are read when torch is imported, so they must be in the environment before the server starts.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = multiprocessing.get_context("forkserver")
    # torch imports its compiler front end at the first optimizer step; once here is cheaper than once in every rank.
    context.set_forkserver_preload(
        ["torch", "torch.distributed", "torch._dynamo", "deepspeed.engine.initialize", "deepspeed.tools.verify.grads"]
    )
    return context


def enter_world(rank: int, world: int, folder: str, port: int) -> None:
    """Send output to this rank's log, arm the stack dump and join the process group."""
    log = open(Path(folder) / f"rank{rank}.log", "a", buffering=1, encoding="utf-8")  # noqa: SIM115  open for the life of the rank
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    faulthandler.enable(log)
    faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="127.0.0.1")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=timedelta(seconds=120)
    )


def _serve(rank: int, world: int, folder: str, port: int, connection: Connection) -> None:
    """Run one rank: receive (fn, args), answer (True, result) or (False, class name, traceback)."""
    threading.Thread(target=_end_with_starter, daemon=True).start()
    enter_world(rank, world, folder, port)
    imported = 0
    while True:
        if len(sys.modules) > imported and "accelerate" not in sys.modules:  # whose globals keep engines for a while
            gc.freeze()  # a collection after every call must not walk through what calls import
            imported = len(sys.modules)
        try:
            message = connection.recv_bytes()
        except EOFError:
            return
        try:
            torch.manual_seed(0)
            function, args, kwargs = pickle.loads(message)
            payload = pickle.dumps((True, function(*args, **kwargs)))
        except BaseException as error:
            payload = pickle.dumps((False, type(error).__name__, traceback.format_exc()))
        connection.send_bytes(payload)
        gc.collect()


def scratch() -> tempfile.TemporaryDirectory[str]:
    """Make a folder for files of this run, inside the one of :mod:`multiprocessing`, whose name every rank inherits."""
    return tempfile.TemporaryDirectory(prefix="ds_verify_", dir=util.get_temp_dir())


def _end_with_starter() -> None:
    """End when the starting command ends: inside a call a rank does not see its pipe end, and would go on until done.

    The files of that command go as well, as it could not remove them.
    """
    starter = multiprocessing.parent_process()
    if starter is not None:
        starter.join()
        shutil.rmtree(util.get_temp_dir(), ignore_errors=True)
        os._exit(1)


class RankPool(contextlib.AbstractContextManager["RankPool"]):
    """Run ``world`` ranks on this machine joined by gloo; use as a context manager or call :meth:`close`.

    The ranks do not hear an interrupt at the terminal: it is for this process, which ends them.
    """

    def __init__(self, world: int, *, time_limit: float = 60.0) -> None:
        self.world = world
        self.time_limit = time_limit
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._processes: list[ForkServerProcess] = []
        self._connections: list[Connection] = []

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(at_once=kind is not None)

    def start(self) -> Path:
        """Start the ranks if they are not running; return the folder of their logs."""
        if self._folder is not None:
            return Path(self._folder.name)
        self._folder = scratch()
        try:
            context, port = rank_context(), free_port()
            resource_tracker.ensure_running()  # which ends with interrupts let through
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # children inherit it
            try:
                for rank in range(self.world):
                    ours, theirs = multiprocessing.Pipe()
                    args = (rank, self.world, self._folder.name, port, theirs)
                    process = context.Process(target=_serve, args=args, daemon=True, name=f"rank{rank}")
                    process.start()
                    theirs.close()
                    self._processes.append(process)
                    self._connections.append(ours)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        except BaseException:  # also an interrupt that came meanwhile: nobody else knows of those that run
            self.close(at_once=True)
            raise
        return Path(self._folder.name)

    def close(self, *, at_once: bool = False) -> None:
        """End the ranks: gracefully when they are idle, by SIGKILL ``at_once`` or when they do not react."""
        for connection in self._connections:
            connection.close()
        end = time.monotonic() + (0.0 if at_once else 1.0)
        for process in self._processes:
            process.join(max(0.0, end - time.monotonic()))
            process.kill()
        for process in self._processes:
            process.join()
        if self._folder is not None:
            self._folder.cleanup()
        self._folder = None
        self._processes.clear()
        self._connections.clear()

    def run(
        self, function: Callable[..., Any], *args: Any, time_limit: float | None = None, **kwargs: Any
    ) -> list[Any]:
        """Call ``function(*args, **kwargs)`` on every rank; return the results in rank order.

        ``function`` is pickled by reference, so it must live at the top level of an importable module. Raises
        :class:`RankFailure` when any rank raises, dies, or needs more than ``time_limit`` seconds.
        """
        folder = self.start()
        logs = [folder / f"rank{rank}.log" for rank in range(self.world)]
        starts = [log.stat().st_size if log.exists() else 0 for log in logs]
        message = pickle.dumps((function, args, kwargs))
        for connection in self._connections:
            with contextlib.suppress(BrokenPipeError):  # a dead rank is reported below, with its log
                connection.send_bytes(message)
        answers = self._collect(self.time_limit if time_limit is None else time_limit)
        if len(answers) == self.world and all(answer[0] for answer in answers.values()):
            return [answers[rank][1] for rank in range(self.world)]
        hung = [process for rank, process in enumerate(self._processes) if rank not in answers]
        for process in hung:
            with contextlib.suppress(ProcessLookupError):
                assert process.pid is not None
                os.kill(process.pid, signal.SIGUSR1)  # it writes the stacks of its threads into its log
        time.sleep(0.3 if hung else 0.0)
        written = [log.read_bytes()[start:] if log.exists() else b"" for log, start in zip(logs, starts, strict=True)]
        self.close(at_once=True)
        raise _failure(getattr(function, "__qualname__", str(function)), answers, written)

    def _collect(self, limit: float) -> dict[int, tuple[Any, ...]]:
        """Return the answers that come in time, by rank."""
        answers: dict[int, tuple[Any, ...]] = {}
        ranks: dict[Any, int] = {connection: rank for rank, connection in enumerate(self._connections)}
        deadline = time.monotonic() + limit
        while ranks and time.monotonic() < deadline:
            for connection in wait(list(ranks), timeout=max(0.0, deadline - time.monotonic())):
                assert isinstance(connection, Connection)
                rank = ranks.pop(connection)
                try:
                    answers[rank] = connection.recv()
                except (EOFError, ConnectionResetError):
                    self._processes[rank].join(timeout=1.0)
                    ending = f"the process ended with exit code {self._processes[rank].exitcode}"
                    answers[rank] = (False, "died", ending)
                if not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return answers


def _failure(function: str, answers: dict[int, tuple[Any, ...]], written: list[bytes]) -> RankFailure:
    """Return an error with every rank's account; ``written``: the log of each rank during the call."""
    parts, types = [f"{function} failed on {len(written)} ranks"], {}
    hung = (False, "hung", "no answer within the time limit; its stacks are below")
    for rank, log in enumerate(written):
        good, *account = answers.get(rank, hung)
        if good:
            parts.append(f"--- rank {rank}: finished")
            continue
        types[rank], text = account
        lines = log.decode("utf-8", errors="replace").splitlines()[-LOG_TAIL_LINES:]
        tail = "\n".join(["", "... log of this rank:", *lines]) if lines else ""
        parts.append(f"--- rank {rank}: {types[rank]}\n{text.rstrip()}{tail}")
    return RankFailure("\n".join(parts), types)
