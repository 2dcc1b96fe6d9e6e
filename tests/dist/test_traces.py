"""A behaviour can be followed in few files: docs/traces.md lists them, and a traced run takes that way."""

import pickle
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from deepspeed.launcher.fanout import FanOut
from deepspeed.launcher.node.verdict import Verdict
from deepspeed.tools.verify.models import case_named
from tests.harness.pool import RankPool
from tests.harness.tracer import ROOT, Call, Step, Tracer, missing
from tests.harness.training import make_config, start, train_step
from tests.harness.warm import Warm

PAGE = (Path(__file__).parents[2] / "docs" / "traces.md").read_text()
MOST_FILES = {
    # One more in the first two than when the runtime agreed on collectives itself: `zero/sync/order.py`.
    "Gather a unit before its module runs": 6,
    "Reduce a gradient": 5,
    "A step whose optimizer states rest on a drive": 9,
    "Save a checkpoint": 7,
    "A rank dies": 6,
}


def way(title: str) -> list[Step]:
    """The functions that the page lists for a behaviour."""
    section = PAGE.split(f"### {title}\n", 1)[1].split("\n#", 1)[0]
    return [Step(*found) for found in re.findall(r"^    ([\w/]+\.py) +(\w+)", section, re.MULTILINE)]


@pytest.mark.parametrize("title", MOST_FILES)
def test_the_page_names_few_files_and_functions_that_exist(title: str) -> None:
    steps = way(title)
    assert 3 <= len({step.file for step in steps}) <= MOST_FILES[title], steps
    for step in steps:
        assert re.search(rf"^ *def {step.function}\(", Path(ROOT, step.file).read_text(), re.MULTILINE), step


def traced(title: str, zero: dict[str, Any], folder: str) -> str:
    """On one rank: train until every rank knows the order of the units, then follow one more forward, backward or
    step, or a save.
    """
    case = case_named("plain")
    engine = start(case.build(), make_config(3, zero=zero))
    for step in range(3):
        train_step(engine, case, step)
    steps = way(title)
    tracer = Tracer({step.function for step in steps})
    if title.startswith("Save"):
        tracer.of(lambda: engine.save_checkpoint(folder))
    else:
        tracer.of(lambda: train_step(engine, case, 3))
    engine.destroy()
    return missing(steps, tracer.calls)


NODE = """
import pickle, sys
from deepspeed.launcher.job import Job
from deepspeed.launcher.node.supervisor import run_node
from tests.harness.tracer import Tracer
job = Job({{"a": (0,)}}, {script!r}, cwd={folder!r}, python=sys.executable)
tracer = Tracer({functions!r})
tracer.of(lambda: run_node(job, 0, runner="ssh"))
with open({folder!r} + "/calls", "wb") as file:
    pickle.dump([(tuple(call.step), tuple(map(tuple, call.via))) for call in tracer.calls], file)
"""


def test_a_dead_rank_takes_the_way_of_the_page(tmp_path: Path, warm: Warm) -> None:
    """The command that hears all nodes in this process, the launcher of a node in another, a rank that is killed."""
    steps = way("A rank dies")
    functions = {step.function for step in steps}
    script = tmp_path / "rank.py"
    script.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    node = NODE.format(script=str(script), folder=str(tmp_path), functions=functions)
    tracer = Tracer(functions)
    verdicts: list[Verdict] = []
    job = FanOut(["a"], [[warm.python, "-c", node]], grace_s=10.0)
    tracer.of(lambda: verdicts.append(job.run()))
    assert verdicts[0].status == 128 + signal.SIGKILL
    with (tmp_path / "calls").open("rb") as file:
        calls = [Call(Step(*step), tuple(Step(*passed) for passed in via)) for step, via in pickle.load(file)]
    assert not (why := missing(steps, calls + tracer.calls)), why


@pytest.mark.parametrize("title", [title for title in MOST_FILES if title != "A rank dies"])
def test_a_run_takes_the_way_of_the_page(pool2: RankPool, tmp_path: Path, title: str) -> None:
    drive = {"device": "nvme", "nvme_path": str(tmp_path / "drive")}
    zero = {"offload_optimizer": drive} if "drive" in title else {}
    (tmp_path / "drive").mkdir()
    first, second = pool2.run(traced, title, zero, str(tmp_path / "saved"))
    assert not first, first
    assert not second or title.startswith("Save"), second  # the first rank alone joins and publishes
