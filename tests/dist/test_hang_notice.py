"""By default a job that stands still is told where its ranks wait, once, and goes on; no collective costs more."""

import re
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepspeed.comm.hang import watch as hang
from deepspeed.comm.hang.explain import explain
from deepspeed.comm.hang.stacks import WATCHERS
from tests.harness.experts import Stacked, tokens_of
from tests.harness.launched import RUNNER, environment
from tests.harness.patience import slowdown
from tests.harness.pool import RankPool
from tests.harness.training import make_config, start
from tests.harness.warm import RANKS, Warm

pytestmark = pytest.mark.timeout(300)

ALONE = """
import os, time
import torch
import deepspeed

config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
config["zero_optimization"] = {"stage": 3}
engine = deepspeed.initialize(model=torch.nn.Linear(4, 4), config=config)[0]
engine.backward(engine(torch.randn(2, 4)).sum())
engine.step()
if engine.global_rank == 0:
    engine.save_checkpoint("ckpt")
else:
    while not os.path.exists("told"):
        time.sleep(0.05)
    engine.save_checkpoint("ckpt")
engine.destroy()
"""


def test_a_rank_alone_in_save_checkpoint_is_told_that_every_rank_must_call_it(tmp_path: Path, warm: Warm) -> None:
    script = tmp_path / "train.py"
    script.write_text(ALONE)
    env = environment(DS_HANG_NOTICE=f"{1.5 * min(slowdown(), 5):.1f}", **{RANKS: warm.python})
    command = [warm.python, *RUNNER, "--num_gpus", "2", str(script)]
    process = subprocess.Popen(command, cwd=tmp_path, env=env, text=True, stderr=subprocess.PIPE)
    lines: list[str] = []

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line.rstrip())
            if "must call" in line:
                (tmp_path / "told").touch()

    reader = threading.Thread(target=read)
    reader.start()
    try:
        assert process.wait(timeout=200) == 0, lines
    finally:
        process.kill()
        reader.join()
        assert process.stderr is not None
        process.stderr.close()
    (start,) = [i for i, line in enumerate(lines) if "stands still" in line]
    assert "nothing is ended" in lines[start], lines
    assert lines[start + 1] == "  every rank must call save_checkpoint(): rank 0 did, rank 1 did not"
    told = "\n".join(lines[start + 2 : start + 4])
    assert re.search(r"rank 1 \(pid \d+ on .*\) runs code outside collectives \(train.py:1[56]\), step 1", told), lines
    assert re.search(r"rank 0 \(pid \d+ on .*\) waits in \w+ \(train.py:12\), step 1", told), lines
    assert (tmp_path / "ckpt" / "latest").is_file()


def _watched(limit_s: float | None) -> tuple[list[str], list[bool], bool]:
    """Names of the threads that watch an engine with this limit, whether their watch ends the job, and whether it
    listens to the engine's groups.
    """
    engine = start(nn.Linear(4, 4), make_config(3, hang_timeout=limit_s))
    engine.backward(engine(torch.randn(2, 4)).sum())
    engine.step()
    names = sorted(t.name for t in threading.enumerate() if t.name.startswith(WATCHERS))
    living = [each for each in hang._WATCHES if not each.ended]
    # A busy machine needs more than a beat for an exchange: else its store would be called dead.
    assert all(each._alone_s >= 5 * each._beat_s for each in living if not each.ends)
    listens = any(group.ledger for group in (engine.mesh.job, engine.mesh.zero, *engine.mesh.groups))
    ends = [each.ends for each in living]
    engine.destroy()
    return names, ends, listens


def test_by_default_a_watch_looks_and_listens_to_no_collective_and_a_limit_replaces_it(pool2: RankPool) -> None:
    names = [f"{WATCHERS}-look", f"{WATCHERS}-talk"]
    assert pool2.run(_watched, None) == [(names, [False], False)] * 2
    assert [watched[1:] for watched in pool2.run(_watched, 600)] == [([True], True)] * 2


def _exchange_without_the_other(key: str) -> str:
    """What rank 0 reports of itself while rank 1 does not enter an exchange."""
    engine = start(Stacked(), make_config(1, expert_parallel={"enabled": True, "autoep_size": 2}, hang_timeout=600))
    (guard,) = (each for each in hang._WATCHES if not each.ended)
    store, told = dist.distributed_c10d._get_default_store(), list[str]()
    if dist.get_rank() == 0:

        def look() -> None:
            while "all_to_all" not in (report := guard._report()).what:
                time.sleep(0.01)
            told.append(f"{report.state}: {explain([report], 1.0)}")
            store.set(key, "seen")

        looking = threading.Thread(target=look)
        looking.start()
    else:
        store.wait([key])
    engine.backward(engine(tokens_of(0, dist.get_rank())))
    engine.destroy()
    return "".join(told)


def test_an_exchange_that_a_rank_does_not_enter_is_named(pool2: RankPool) -> None:
    report, _ = pool2.run(_exchange_without_the_other, "an exchange")
    assert "waits in all_to_all of 6 int64 on ep 2 in layers.0.experts" in report
