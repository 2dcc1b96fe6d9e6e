"""Launchers and scripts that start at once: forks of one process that has imported torch, which takes most of a start.

``Warm.python`` stands in for ``python`` with ``-m``, ``-c`` or a script: it hands its arguments, variables, folder,
network namespace and standard streams to that process. It gets the signals for the launcher and ends as that does; when
it is killed, so is the launcher. Of the package only what a launcher imports is there before.

Ranks of a launcher with the variable ``RANKS`` are such forks too, of which it knows the stand-ins: it names other
process ids than the ranks do, and what ends a rank by Ctrl-C is an ordinary error to it.
"""

import atexit
import contextlib
import ctypes
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RANKS = "TEST_PYTHON_OF_RANKS"
CLIENT = """#!{python} -IS
import json, os, signal, socket, sys

def be(end):
    if end < 0:
        if end != -signal.SIGKILL:  # which nobody can handle
            signal.signal(-end, signal.SIG_DFL)
        os.kill(os.getpid(), -end)
    os._exit(end)

launcher = 0
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
    if signal.getsignal(number) is not signal.SIG_IGN:
        signal.signal(number, lambda number, frame: os.kill(launcher, number) if launcher else be(-number))
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.connect({path!r})
request = json.dumps([sys.argv[1:], dict(os.environ), os.getcwd(), os.getpid()]).encode()
socket.send_fds(server, [request], [0, 1, 2])
os.closerange(0, 3)  # so that the end of the launcher is seen at once
launcher = int(server.recv(100))
be(int(server.recv(100) or -9))
"""


class Warm:
    """The process, until ``close``; ``python`` is the program to call."""

    def __init__(self, folder: Path) -> None:
        path = str(folder / "socket")
        self.python = str(folder / "python")
        Path(self.python).write_text(CLIENT.format(python=sys.executable, path=path))
        Path(self.python).chmod(0o755)
        command = [sys.executable, "-m", "tests.harness.warm", path]
        pipe = subprocess.PIPE  # nothing is written there, but what is opened on it can be given to any stream later
        self._server = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe)
        while not os.path.exists(path):
            assert self._server.poll() is None, "the process that forks launchers did not start"
            time.sleep(0.01)

    def close(self) -> None:
        self._server.kill()
        self._server.communicate()


def _become(request: bytes, streams: list[int]) -> None:
    """Run in this process, a fork, what the client was called for; does not return."""
    words, environment, folder, client = json.loads(request)
    for target, stream in enumerate(streams):
        os.dup2(stream, target)
    os.closerange(3, 1000)
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # what was found before the variables were those of the client
    sys.executable = environment.get(RANKS, sys.executable)
    if "DS_CRASH_REPORT" in environment:  # as Python does when a rank begins
        importlib.import_module("deepspeed.launcher.crash_report.sitecustomize")
    space = f"/proc/{client}/ns/net"
    if os.readlink(space) != os.readlink("/proc/self/ns/net"):
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(os.open(space, os.O_RDONLY | os.O_CLOEXEC), 0x40000000) != 0:
            raise OSError(ctypes.get_errno(), "setns")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through="-u" in words)  # type: ignore[union-attr]
    status = _run(words)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status if isinstance(status, int) else 0 if status is None else 1)


def _run(words: list[str]) -> object:
    """The status with which ``python`` ends that is given these words."""
    while words[0] not in ("-m", "-c") and words[0].startswith("-"):
        if words.pop(0) == "-W":
            warnings.simplefilter(words.pop(0))  # type: ignore[arg-type]
    kind, sys.argv = words[0], words[words[0] == "-m" :]
    if kind == "-m":
        try:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        except SystemExit as end:
            return end.code
        return 0
    status: object = 0
    sys.path[:0] = [str(Path(kind).parent) if kind != "-c" else "", *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    text, file = (sys.argv.pop(1), "<string>") if kind == "-c" else (Path(kind).read_text(), kind)
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    main.__file__ = file
    try:
        exec(compile(text, file, "exec"), vars(main))
    except SystemExit as end:
        status = end.code
        if isinstance(status, str):
            print(status, file=sys.stderr)
    except BaseException as error:
        trace = error.__traceback__.tb_next  # type: ignore[union-attr]
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error.with_traceback(trace), trace
        sys.excepthook(type(error), error, trace)
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    return status


def serve(path: str) -> None:
    """Fork for every client, until standard input ends."""
    import torch._dynamo  # noqa: F401 - the first step of an optimizer does

    import deepspeed.launcher.node.supervisor  # noqa: F401

    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path + "~")
    listener.listen(64)
    os.rename(path + "~", path)
    ready = selectors.DefaultSelector()
    ready.register(0, selectors.EVENT_READ, "end")
    ready.register(listener, selectors.EVENT_READ, "call")
    running: dict[int, tuple[int, socket.socket]] = {}
    while True:
        for key, _ in ready.select():
            if key.data == "end":
                return
            if key.data == "call":
                client, _ = listener.accept()
                request, streams, _, _ = socket.recv_fds(client, 1 << 20, 3)
                if (launcher := os.fork()) == 0:
                    try:
                        _become(request, streams)
                    finally:
                        traceback.print_exc()
                        os._exit(99)
                for stream in streams:
                    os.close(stream)
                with contextlib.suppress(OSError):  # it was killed meanwhile: its end of the socket says so below
                    client.send(str(launcher).encode())
                running[launcher] = os.pidfd_open(launcher), client
                ready.register(client, selectors.EVENT_READ, launcher)
                ready.register(running[launcher][0], selectors.EVENT_READ, launcher)
            elif key.data in running and isinstance(key.fileobj, socket.socket):  # the client was killed
                os.kill(key.data, signal.SIGKILL)
                ready.unregister(key.fileobj)
            elif key.data in running:
                ended, client = running.pop(key.data)
                status = os.waitstatus_to_exitcode(os.waitpid(key.data, 0)[1])
                with contextlib.suppress(OSError, KeyError):
                    ready.unregister(client)
                    client.send(str(status).encode())
                ready.unregister(ended)
                os.close(ended)
                client.close()


if __name__ == "__main__":
    serve(sys.argv[1])
