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
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LOG_TAIL_LINES = 60
GRACE_SECONDS = 3.0  # how long the other ranks may take to report after the first one failed


class RankFailure(RuntimeError):
    """Some rank raised, died or hung; the message holds every rank's account, ``types`` the exception class names."""

    def __init__(self, message: str, types: dict[int, str]) -> None:
        super().__init__(message)
        self.types = types


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _context() -> BaseContext:
    """Forkserver where there is one: torch and deepspeed are imported once, and a new rank costs milliseconds."""
    # Thread counts are read when torch is imported, so they must be in the environment before the server starts.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    # torch imports its compiler front end at the first optimizer step; once here is cheaper than once in every rank.
    context.set_forkserver_preload(
        ["torch", "torch.distributed", "torch._dynamo", "deepspeed", "deepspeed.verify.grads"]
    )
    return context


def _enter_world(rank: int, world: int, folder: str, port: int) -> None:
    """Send output to this rank's log, arm the stack dump and join the process group."""
    log = open(Path(folder) / f"rank{rank}.log", "a", buffering=1, encoding="utf-8")  # noqa: SIM115  open for the life of the rank
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    faulthandler.enable(log)
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="127.0.0.1")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=timedelta(seconds=120)
    )


def _serve(rank: int, world: int, folder: str, port: int, connection: Connection) -> None:
    """Body of one rank: receive (fn, args), answer (True, result) or (False, class name, traceback)."""
    threading.Thread(target=_end_with_starter, daemon=True).start()
    _enter_world(rank, world, folder, port)
    gc.freeze()  # a collection after every call must not walk through all of torch
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            return
        answer: tuple[Any, ...]
        try:
            torch.manual_seed(0)
            function, args, kwargs = pickle.loads(message)
            answer = (True, function(*args, **kwargs))
            payload = pickle.dumps(answer)
        except BaseException as error:
            answer = (False, type(error).__name__, traceback.format_exc())
            payload = pickle.dumps(answer)
        connection.send_bytes(payload)
        answer = ()
        gc.collect()


def _end_with_starter() -> None:
    """Inside a call a rank does not see its pipe end: of a killed command it would go on until it is done."""
    if (starter := multiprocessing.parent_process()) is not None:
        starter.join()
        os._exit(1)


class RankPool:
    """``world`` ranks on this machine joined by gloo; use as a context manager or call :meth:`close`."""

    def __init__(self, world: int, *, time_limit: float = 60.0) -> None:
        self.world = world
        self.time_limit = time_limit
        self._context = _context()
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._log_starts: list[int] = []

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the ranks if they are not running."""
        if self._processes:
            return
        self._folder = tempfile.TemporaryDirectory(prefix="dspool-")
        port = _free_port()
        for rank in range(self.world):
            ours, theirs = multiprocessing.Pipe()
            process = self._context.Process(  # type: ignore[attr-defined]
                target=_serve, args=(rank, self.world, self._folder.name, port, theirs), daemon=True, name=f"rank{rank}"
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def close(self) -> None:
        """End the ranks: kindly when they are idle, by SIGKILL when they do not react."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(timeout=1.0)
            if process.is_alive():
                process.kill()
                process.join()
        self._processes, self._connections = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def run(
        self, function: Callable[..., Any], *args: Any, time_limit: float | None = None, **kwargs: Any
    ) -> list[Any]:
        """Call ``function(*args, **kwargs)`` on every rank; results in rank order.

        ``function`` is pickled by reference, so it must live at the top level of an importable module.
        Raises :class:`RankFailure` when any rank raises, dies, or needs more than ``time_limit`` seconds.
        """
        self.start()
        self._log_starts = [
            self._log(rank).stat().st_size if self._log(rank).exists() else 0 for rank in range(self.world)
        ]
        message = pickle.dumps((function, args, kwargs))
        for connection in self._connections:
            with contextlib.suppress(BrokenPipeError):  # a dead rank is reported by _collect, with its log
                connection.send_bytes(message)
        answers = self._collect(self.time_limit if time_limit is None else time_limit)
        if all(answer is not None and answer[0] for answer in answers):
            return [answer[1] for answer in answers if answer is not None]
        failure = self._failure(answers, function)
        self.kill()
        raise failure

    def _collect(self, limit: float) -> list[tuple[Any, ...] | None]:
        answers: list[tuple[Any, ...] | None] = [None] * self.world
        pending = dict(zip(self._connections, range(self.world), strict=True))
        deadline = time.monotonic() + limit
        while pending and (left := deadline - time.monotonic()) > 0:
            for connection in wait(list(pending), timeout=left):
                assert isinstance(connection, Connection)
                rank = pending.pop(connection)
                try:
                    answers[rank] = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    answers[rank] = (False, "died", f"the process ended with exit code {self._exit_code(rank)}")
                if not answers[rank][0]:  # type: ignore[index]
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return answers

    def _exit_code(self, rank: int) -> int | None:
        self._processes[rank].join(timeout=1.0)
        return self._processes[rank].exitcode

    def _failure(self, answers: list[tuple[Any, ...] | None], function: Callable[..., Any]) -> RankFailure:
        for rank, answer in enumerate(answers):
            pid = self._processes[rank].pid
            if answer is None and pid is not None and hasattr(signal, "SIGUSR1"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR1)  # the hung rank writes the stacks of its threads into its log
        time.sleep(0.3)
        parts, types = [f"{getattr(function, '__qualname__', function)} failed on {self.world} ranks"], {}
        for rank, answer in enumerate(answers):
            if answer is not None and answer[0]:
                parts.append(f"--- rank {rank}: finished")
                continue
            types[rank] = "hung" if answer is None else answer[1]
            text = "no answer within the time limit; its stacks are below" if answer is None else answer[2]
            parts.append(f"--- rank {rank}: {types[rank]}\n{text.rstrip()}\n{self._log_tail(rank)}".rstrip())
        return RankFailure("\n".join(parts), types)

    def _log(self, rank: int) -> Path:
        assert self._folder is not None
        return Path(self._folder.name) / f"rank{rank}.log"

    def _log_tail(self, rank: int) -> str:
        """What this rank wrote during the failed call."""
        written = self._log(rank).read_bytes()[self._log_starts[rank] :] if self._log(rank).exists() else b""
        lines = written.decode("utf-8", errors="replace").splitlines()
        return "\n".join(["... log of this rank:", *lines[-LOG_TAIL_LINES:]]) if lines else ""

    def kill(self) -> None:
        """End the ranks at once."""
        for process in self._processes:
            if process.is_alive():
                process.kill()
        self.close()


def resolve(reference: str) -> Any:
    """Import ``module:attribute``; the current folder counts as importable.

    Raises ValueError with a sentence when the text has no colon, the module cannot be imported or lacks the attribute.
    """
    module_name, colon, attribute = reference.partition(":")
    if not colon or not module_name or not attribute:
        raise ValueError(
            f"{reference!r} does not name a function; write it as module:function, for example my_model:build"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = __import__(module_name, fromlist=[attribute])
    except ImportError as error:
        raise ValueError(f"cannot import {module_name!r} (searched from {os.getcwd()}): {error}") from error
    if not hasattr(module, attribute):
        raise ValueError(f"module {module_name!r} ({module.__file__}) has no attribute {attribute!r}")
    return getattr(module, attribute)
