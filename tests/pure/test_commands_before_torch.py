"""A command answers ``--help`` and a wrong line before it imports torch, which takes seconds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deepspeed.tools.verify.cli import GATES
from tests.pure.test_command_statuses import MAINS, MEASURES, WRONG

CHECKPOINTS = ("verify", "info", "diff", "audit", "export", "import", "prune")
HELP = [
    *(f"{name} --help" for name in MAINS),
    *(f"ds_bench {name} --help" for name in MEASURES),
    *(f"ds_checkpoint {name} --help" for name in CHECKPOINTS),
    *(f"ds_config {name} --help" for name in ("check", "show", "init")),
    *(f"ds_verify {name} --help" for name in GATES),
    "ds_report run --help",
]
# Right lines about what is not there: a model, memory, a drive, a place in an epoch or a run.
LOOKS = (
    *("ds_bench access --params", "ds_bench ckpt", "ds_bench io", "ds_bench load", "ds_io --folder"),
    *("ds_verify grads --model", "ds_verify grads --config", "ds_verify data --at", "ds_verify data --samples"),
    *("ds_verify resume --at 20", "ds_verify 3d --"),
)
LINES = [*HELP, *(line for line in WRONG if not line.startswith(LOOKS))]

# One interpreter, which imports what the commands begin with, and a child of it for each line.
FORKS = """
import importlib, json, os, sys
wrong, lines = [], json.loads(sys.argv[1])
for place in lines.values():
    importlib.import_module(place.partition(":")[0])
for line, place in lines.items():
    child = os.fork()
    if child == 0:
        status = 1
        sys.stdout = sys.stderr = open(os.devnull, "w")
        try:
            module, _, name = place.partition(":")
            status = getattr(importlib.import_module(module), name)(line.split()[1:])
        except SystemExit as left:
            status = left.code
        except BaseException:
            status = 1
        os._exit(9 if "torch" in sys.modules else 0 if status in (None, 0, 2) else 1)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        wrong.append(line)
print(json.dumps(wrong))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_help_and_wrong_lines_import_no_torch(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"train_batch_size": 8, "optimizer": {"type": "AdamW"}}))
    (tmp_path / "wrong.json").write_text(json.dumps({"train_batch_size": 8, "zero_optimisation": {}}))
    lines = {line.format(*[tmp_path] * 2): MAINS[line.split()[0]] for line in LINES}
    command = [sys.executable, "-c", FORKS, json.dumps(lines)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, cwd=tmp_path)
    assert done.returncode == 0 and json.loads(done.stdout) == [], done
