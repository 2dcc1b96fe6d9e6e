"""Commands that start ranks: the variables they get, a script for the ranks, and how to wait for what they do.

The ranks of ``SCRIPT`` write who they are into a folder, and then do what the ``mode`` says: end (``ok``), wait for a
signal with a child of their own (``hang``), or go wrong. They import torch only to ``reduce``.
"""

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.harness.patience import too_long

ROOT = Path(__file__).resolve().parents[2]
RUNNER = ("-m", "deepspeed.launcher.runner")  # the command ``deepspeed``, behind a Python
START_S = 60.0  # generous: several interpreters import torch at once on a busy machine

SCRIPT = """
import atexit, json, os, signal, subprocess, sys, time

out, mode = sys.argv[-2:]
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if mode == "reduce":
    import deepspeed, torch, torch.distributed as dist
    # Finds the interface between the hosts: their names lead to their loopbacks.
    deepspeed.init_distributed(verbose=False)
    total = torch.tensor([float(rank + 1)])
    dist.all_reduce(total)
    os.write(1, f"sum {total.item():g}\\n".encode())  # one write: unbuffered print makes two, and ranks share the pipe
child = subprocess.Popen(["sleep", "300"]).pid if mode == "hang" else 0
def stopped(*_):
    open(os.path.join(out, f"graceful{rank}"), "w").close()
    sys.exit(1)
if mode == "hang":
    signal.signal(signal.SIGINT, stopped)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open(os.path.join(out, f"rank{rank}.tmp"), "w") as file:
    cores = [*os.sched_getaffinity(0)]
    json.dump({"argv": sys.argv[1:], "env": dict(os.environ), "pid": os.getpid(), "child": child, "cores": cores}, file)
os.rename(file.name, os.path.join(out, f"rank{rank}.json"))
if mode == "reduce":
    sys.exit(dist.destroy_process_group())
if mode == "ok":
    sys.exit(print(f"rank {rank} done", flush=True))
while mode != "hang" and len([name for name in os.listdir(out) if name.endswith(".json")]) < world:
    time.sleep(0.01)
if mode == "exit3" and rank == 1:
    os._exit(3)
if mode == "segv" and rank == 0:
    os.kill(os.getpid(), signal.SIGSEGV)
if mode.startswith("raise") and rank == world - 1:
    open(os.path.join(out, "raised"), "w").close()
    if mode == "raise":
        atexit.register(time.sleep, 1)  # a process with torch takes long to end, so that its peer ends first
    raise ValueError("the cause")
if mode == "raise":
    while not os.path.exists(os.path.join(out, "raised")):
        time.sleep(0.01)
    time.sleep(0.1)  # as long as a peer needs to see a connection break
    raise ConnectionError("a consequence")
time.sleep(300)
"""


def environment(**variables: str) -> dict[str, str]:
    """The variables of a command on the CPU, without those of a job that this process may be part of."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC", "DS_", "MASTER_"))}
    return kept | {"PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"} | variables


def wait_until(condition: Callable[[], object], seconds: float, what: str) -> None:
    """Wait, and fail when it takes more than ``seconds`` of an idle machine."""
    begun = time.monotonic()
    while not condition():
        assert not too_long(begun, seconds), f"waited {seconds} s for {what}"
        time.sleep(max(0.02, (time.monotonic() - begun) / 10))  # seldom, as each late look takes time of the others


class Launched:
    """A command that runs ``SCRIPT`` on ranks, with what they write in ``folder/out`` and its temporary files in a
    folder of its own.
    """

    late_s = 0.0  # how much later than the command its temporary files may go

    def __init__(
        self, folder: Path, command: Sequence[str], mode: str, *words: str, script: str = "", **variables: str
    ) -> None:
        """``command`` ends before the script, which gets ``words``; ``script``: what runs in place of ``SCRIPT``."""
        self.out = folder / "out"
        self.out.mkdir(parents=True, exist_ok=True)
        self.scratch = Path(tempfile.mkdtemp(dir=folder))
        if not (folder / "script.py").exists():  # another launcher of the same job may be about to read it
            (folder / "script.py").write_text(SCRIPT)
        self.process = subprocess.Popen(
            [*command, script or str(folder / "script.py"), *words, str(self.out), mode],
            cwd=folder,
            env=environment(TMPDIR=str(self.scratch), **variables),
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            # A shell may have left SIGINT ignored for background jobs, which the ranks would inherit.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )

    def rank(self, rank: int) -> dict[str, Any]:
        """What rank ``rank`` wrote; waits until it has."""
        file = self.out / f"rank{rank}.json"
        wait_until(lambda: file.exists() or self.process.poll() is not None, START_S, f"rank {rank} to start")
        if not file.exists():
            out, err = self.process.communicate()
            raise AssertionError(f"the job ended with status {self.process.returncode}\n{out}\n{err}")
        return json.loads(file.read_text())

    def finish(self, *, left: int = 0) -> tuple[int, str, str]:
        """Status, stdout and stderr; ``left`` temporary files are left (a host that dies cannot clean up)."""
        try:
            out, err = self.process.communicate(timeout=START_S)
        finally:
            if self.process.poll() is None:
                self.process.kill()
        wait_until(lambda: len(list(self.scratch.iterdir())) == left, self.late_s, f"all but {left} files to go")
        return self.process.returncode, out, err
