"""Commands of the simulated device, all in one process: torch is loaded once, and knows that device once."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
_RUN_ALL = """
import contextlib, importlib, io, json, sys
ended = []
for argv in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = importlib.import_module(f"deepspeed.tools.{argv[0]}.cli").main(argv[1:])
    ended.append([code, out.getvalue(), err.getvalue()])
json.dump(ended, sys.stdout)
"""


class Ended(NamedTuple):
    """How a command ended."""

    code: int
    stdout: str
    stderr: str


def run_all(commands: Mapping[str, Sequence[str]], folder: Path, *, limit_s: int = 550) -> dict[str, Ended]:
    """How each command ended in ``folder``; the first word is its place in ``deepspeed.tools``."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _RUN_ALL], input=json.dumps(list(commands.values())),
        cwd=folder, env=environment, capture_output=True, text=True, timeout=limit_s,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return {name: Ended(*how) for name, how in zip(commands, json.loads(done.stdout), strict=True)}
