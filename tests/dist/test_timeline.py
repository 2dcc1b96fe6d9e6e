"""What ``observe`` shows of a run is what happened: one trace of all ranks, a record of every update, and the rank that
the others wait for; and an engine that nobody watches is what it was.
"""

import contextlib
import errno
import gzip
import json
import logging
import subprocess
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepspeed.checkpoint.format import folders
from deepspeed.comm.collectives import AxisGroup
from deepspeed.comm.point_to_point import Wire
from deepspeed.errors import UsageError
from deepspeed.monitor.log import logger
from deepspeed.monitor.runfile import read_run
from deepspeed.profiling.timeline import collect, observer
from deepspeed.profiling.timeline.collect import clock_offset
from deepspeed.profiling.timeline.observer import Observer
from deepspeed.tools.report.run import page
from deepspeed.tools.verify.grads import full_parameters
from tests.harness import pipes
from tests.harness.launched import environment
from tests.harness.lockstep import equal
from tests.harness.logs import logged
from tests.harness.patience import slowdown
from tests.harness.pool import RankPool
from tests.harness.training import make_config, outcome, start
from tests.harness.warm import Warm

WIDTH, BLOCKS, MICROS = 8, 3, 2


def _model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS)])


def _config(stage: int, folder: str, **changes: Any) -> dict[str, Any]:
    zero = {"param_persistence_threshold": 0, **changes.pop("zero", {})}
    observe = {"trace": f"{folder}/t.json.gz", "steps": [2, 3], "run": f"{folder}/run", **changes.pop("observe", {})}
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": MICROS, "observe": observe}
    return make_config(stage, zero=zero, **config, **changes)


def _train(engine: Any, steps: int, *, slow_rank: int = -1, nap_s: float = 0.0) -> list[float]:
    torch.manual_seed(dist.get_rank())
    losses = []
    for _ in range(steps * MICROS):
        if dist.get_rank() == slow_rank:
            time.sleep(nap_s)
        loss = engine(torch.randn(2, WIDTH)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def _state(engine: Any) -> list[Any]:
    """What an observer changes of an engine: names of objects, and how many hooks and listeners there are."""
    runtime, gradients = engine.runtime, engine.runtime.gradients
    objects = [engine, runtime, gradients, runtime.agreement, runtime._stream, *gradients._streams, engine.monitor]
    objects += [engine.basic_optimizer, *engine._parts.tiers.drives]
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in engine.module.modules())
    groups = [g for g in (engine.mesh.job, *engine.mesh.groups)]
    names = [sorted(vars(o)) for o in objects]
    listeners = [len(each) for each in (runtime.events, engine._clock.events, *(g.ledger for g in groups))]
    return [names, hooks, listeners, len(logger.handlers)]


def _watched(stage: int, folder: str, steps: int) -> dict[str, Any]:
    config = _config(stage, folder)
    plain = start(_model(), {k: v for k, v in config.items() if k != "observe"})
    losses = _train(plain, steps)
    bare = _state(plain)
    weights = full_parameters(plain.module)
    plain.destroy()
    engine = start(_model(), config)
    watched = _state(engine)
    same = _train(engine, steps) == losses
    out = {"same": same and equal(full_parameters(engine.module), weights), "losses": losses}
    if stage == 3:
        engine.save_checkpoint(f"{folder}/saved")
    _close_observer(engine)
    states = {"bare": bare, "watched": watched, "after": _state(engine)}
    engine.destroy()
    return out | states


def _close_observer(engine: Any) -> None:
    for callback in [*engine._lasting._exit_callbacks]:
        owner = getattr(callback[1], "__wrapped__", None)
        if isinstance(getattr(owner, "__self__", None), Observer):
            owner.__self__.close()


def _events(path: Path) -> tuple[list[dict[str, Any]], dict[tuple[int, int], str]]:
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    return [e for e in events if e["ph"] != "M"], rows


def _check_rows(events: list[dict[str, Any]]) -> None:
    """Perfetto shows a row as a stack: spans lie in each other or apart."""
    rows = defaultdict(list)
    for e in events:
        if e["ph"] == "X":
            assert e["dur"] >= 0
            rows[e["pid"], e["tid"]].append((e["ts"], -e["dur"], e["name"]))
    for spans in rows.values():
        ends: list[float] = []
        for begin, less, name in sorted(spans):
            while ends and ends[-1] <= begin + 0.002:
                ends.pop()
            assert not ends or begin - less <= ends[-1] + 0.002, name
            ends.append(begin - less)


@pytest.mark.parametrize("stage", [3, 1])
def test_the_trace_and_the_record_show_what_happened_and_change_nothing(
    pool2: RankPool, tmp_path: Path, stage: int
) -> None:
    results = pool2.run(_watched, stage, str(tmp_path), 4)
    for result in results:
        assert result["same"], "watched, it computes the same, bit by bit"
        assert result["after"] == result["bare"], "afterwards nothing is left of it"
        assert result["watched"] != result["bare"]
    events, rows = _events(tmp_path / "t.json.gz")
    _check_rows(events)
    for rank in (0, 1):
        mine = [e for e in events if e["pid"] == rank]
        names = Counter((rows[rank, e["tid"]], e["name"]) for e in mine)
        for step in (2, 3):
            assert names["phases", f"step {step}"] == 1
        assert (names["phases", "forward"], names["phases", "backward"], names["phases", "step"]) == (4, 4, 2)
        assert names["compute", "optimizer"] == 2
        for block in range(BLOCKS):
            assert names["compute", f"forward {block}"] == names["compute", f"backward {block}"] == 2 * MICROS
        sent = [e for e in mine if rows[rank, e["tid"]] == "collectives"]
        assert all(e["args"]["bytes"] > 0 and e["args"]["ranks"] == 2 for e in sent)
        assert any(key[0] == "waits" and key[1] == "agreement" for key in names)
        if stage == 3:
            uses = names["prefetch", "hit"] + names["prefetch", "miss"]
            assert uses == 2 * MICROS * 2 * BLOCKS and names["prefetch", "miss"] > 0
            assert {e["args"]["unit"] for e in sent if e["name"] == "all_gather"} == {"0", "1", "2"}
            assert names["waits", "gather of 1"] and names["waits", "reduction of 1"]
        else:
            assert names["waits", "publish the update"] == 2
    record = read_run(tmp_path / "run")
    steps = record.of("step")
    assert record.over and [s["step"] for s in steps] == [1, 2, 3, 4]
    losses = results[0]["losses"]
    for n, step in enumerate(steps):
        assert step["loss"] == pytest.approx(sum(losses[MICROS * n : MICROS * (n + 1)]) / MICROS, rel=1e-5)
        assert step["total_ms"] >= step["forward_ms"] + step["backward_ms"] + step["step_ms"] > 0
        assert 0 < step["wait_ms"] <= step["communication_ms"] and step["grad_norm"] > 0 and step["memory"]["host"] > 0
    shown = sorted(e["dur"] / 1e3 for e in events if e["pid"] == 0 and e["name"] in ("step 2", "step 3"))
    assert shown == pytest.approx(sorted(s["total_ms"] for s in steps[1:3]), rel=1e-3)
    assert [len(line["ranks"]) for line in record.of("ranks")] == [2]
    saved = record.of("checkpoint")
    assert len(saved) == (stage == 3)
    for line in saved:
        assert line["step"] == 4 and line["bytes"] > 1000 and 0 < line["seconds"] <= line["until_named_s"]


def _slow(folder: str, nap_s: float) -> list[str]:
    monitor = {"csv_monitor": {"enabled": True, "output_path": folder, "job_name": "csv"}}
    engine = start(_model(), _config(3, folder, observe={"trace": None, "slow_steps": 3}, **monitor))
    with logged(logging.WARNING) as lines, contextlib.ExitStack() as stack:
        stack.callback(engine.destroy)
        _train(engine, 5, slow_rank=1, nap_s=nap_s)
        end = time.monotonic() + 100
        while True:
            named = torch.tensor(float(any("is slow" in line for line in lines) or time.monotonic() > end))
            dist.all_reduce(named)
            if named:
                break
            _train(engine, 2, slow_rank=1, nap_s=nap_s)
        _train(engine, 3, slow_rank=1, nap_s=nap_s)
    return lines


def test_a_rank_that_sleeps_is_named_once_and_the_others_are_not(pool3: RankPool, tmp_path: Path) -> None:
    nap_s = 0.05 * slowdown()  # longer than what a busy machine adds to the others' work
    lines = pool3.run(_slow, str(tmp_path), nap_s)
    slow = [line for line in lines[0] if "is slow" in line]
    assert len(slow) == 1 and slow[0].startswith("rank 1 "), lines
    assert not [line for line in lines[1] + lines[2] if "is slow" in line], "one rank says it"
    record = read_run(tmp_path / "run")
    assert [line["rank"] for line in record.of("slow")] == [1] and record.of("slow")[0]["times"] > 1.2
    state = {s["rank"]: s for s in record.ranks["ranks"]}
    assert sorted(state) == [0, 1, 2]
    assert state[1]["work"][0] > 90, "two naps a step"
    assert state[0]["wait"][0] > 60 and state[2]["wait"][0] > 60, "the others wait for it"
    (metric,) = (tmp_path / "csv").glob("*_slow_rank.csv")
    assert metric.read_text().splitlines()[1].endswith(",1.0")
    (waits,) = (tmp_path / "csv").glob("*_exposed_communication_ms.csv")
    assert len(waits.read_text().splitlines()) > 5, "the monitor has it from the same notes"


def _short(folder: str) -> tuple[list[bool], list[Any], list[Any]]:
    """Updates so short, for the price, that their notes would cost too much: whether the engine was listened to."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deepspeed.profiling.timeline.listen._PRICE", 1e-9)
        config = _config(3, folder, observe={"steps": [16, 17]})
        bare = start(_model(), {k: v for k, v in config.items() if k != "observe"})
        before = _state(bare)
        bare.destroy()
        engine = start(_model(), config)
        heard = []
        for _ in range(20):
            heard.append(bool(engine.runtime.events))
            _train(engine, 1)
        _close_observer(engine)
        after = _state(engine)
        engine.destroy()
    return heard, before, after


def test_of_short_updates_few_are_noted_and_a_trace_has_all_of_its_own(pool2: RankPool, tmp_path: Path) -> None:
    for heard, before, after in pool2.run(_short, str(tmp_path)):
        assert heard == [n <= 10 or 15 <= n <= 17 for n in range(1, 21)], "the first ones, and for the trace"
        assert after == before
    steps = read_run(tmp_path / "run").of("step")
    assert [s["step"] for s in steps] == [*range(1, 21)], "every update has its line and its phases"
    assert all(s["total_ms"] >= s["forward_ms"] + s["backward_ms"] + s["step_ms"] > 0 for s in steps)
    noted = [s["step"] for s in steps if "wait_ms" in s]
    assert noted == [*range(1, 11), 16, 17] and all(s["wait_ms"] > 0 for s in steps if s["step"] in noted)
    assert all("prefetch_hits" in s for s in steps if s["step"] in noted)
    events, rows = _events(tmp_path / "t.json.gz")
    names = Counter((rows[e["pid"], e["tid"]], e["name"]) for e in events if e["pid"] == 0)
    assert names["prefetch", "hit"] + names["prefetch", "miss"] == 2 * MICROS * 2 * BLOCKS
    assert names["waits", "gather of 1"] and names["waits", "reduction of 1"]


def _apart(ahead_s: float) -> tuple[int, int]:
    """The clock of rank 1 is so far ahead."""
    group = AxisGroup(dist.group.WORLD, dist.get_world_size(), dist.get_rank(), tuple(range(2)), "gloo")
    real = time.perf_counter_ns
    with pytest.MonkeyPatch.context() as patch:
        shift = int(ahead_s * 1e9) if dist.get_rank() else 0
        patch.setattr(time, "perf_counter_ns", lambda: real() + shift)
        return clock_offset(group)


def test_clocks_that_are_apart_are_found_to_be_so(pool2: RankPool) -> None:
    (first, _), (second, _) = pool2.run(_apart, 5.0)
    assert first == 0 and abs(second - 5e9) < 5e7, "within 50 ms on a busy machine"


def _second_begins_first(path: str) -> None:
    rank = dist.get_rank()
    group = AxisGroup(dist.group.WORLD, dist.get_world_size(), rank, tuple(range(2)), "gloo")
    rows: list[collect.Row] = [(0, "step 1", 9_000 - 4_000 * rank, 2_000, None)]
    collect.write_trace(path, f"rank {rank}", rows, group, 0)


def test_a_trace_begins_with_the_first_span_of_any_rank(pool2: RankPool, tmp_path: Path) -> None:
    pool2.run(_second_begins_first, str(tmp_path / "t.json.gz"))
    events, _ = _events(tmp_path / "t.json.gz")
    assert [(e["pid"], e["ts"], e["dur"]) for e in events] == [(0, 4.0, 2.0), (1, 0.0, 2.0)]


def _cannot(folder: str) -> str:
    (Path(folder) / "file").write_text("")
    dist.barrier()
    with pytest.raises(UsageError) as error:
        start(_model(), _config(3, f"{folder}/file"))
    with pytest.raises(UsageError, match="Is a directory.*Name another file"):  # not at the end of the trace
        start(_model(), _config(3, folder, observe={"trace": folder}))
    engine = start(_model(), _config(3, folder, observe={"trace": None}))  # and the ranks go on together
    _train(engine, 1)
    engine.destroy()
    return str(error.value)


def test_a_file_that_cannot_be_written_is_an_error_on_all_ranks(pool2: RankPool, tmp_path: Path) -> None:
    errors = pool2.run(_cannot, str(tmp_path))
    assert all("cannot be written" in error and "Name another" in error for error in errors)


def _early(folder: str) -> list[str]:
    with logged(logging.WARNING) as lines:
        engine = start(_model(), _config(3, folder, observe={"run": None, "steps": [1, 9]}))
        _train(engine, 2)
        engine.destroy()
    return lines


def test_a_run_that_ends_within_the_trace_says_so(pool2: RankPool, tmp_path: Path) -> None:
    lines = pool2.run(_early, str(tmp_path))
    assert any("ends after update 2" in line and "after 9" in line for line in lines[0])
    assert not [*tmp_path.iterdir()], "and leaves nothing"


def test_a_run_of_one_rank_has_a_trace_and_a_record_too(pool1: RankPool, tmp_path: Path) -> None:
    pool1.run(_early, str(tmp_path))
    events, _ = _events(tmp_path / "t.json.gz")
    assert {e["name"] for e in events} >= {"step 1", "step 2"}


LEFT_SCRIPT = """
import sys
import torch
import deepspeed
config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "Adam"}, "checkpoint": {"async": True}}
config["observe"] = {"run": sys.argv[1]}
engine, *_ = deepspeed.initialize(model=torch.nn.Linear(4, 1), config=config)
for _ in range(5):
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.step()
engine.save_checkpoint(sys.argv[1] + "/saved")
raise ValueError("the data is bad")
"""


def test_a_script_that_leaves_its_engine_has_a_whole_record(tmp_path: Path, warm: Warm) -> None:
    command = [warm.python, "-c", LEFT_SCRIPT, str(tmp_path)]
    ended = subprocess.run(command, env=environment(), cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 1 and ended.stderr.count("Traceback") == 1, ended.stderr
    run = read_run(tmp_path)
    assert [line["step"] for line in run.updates] == [1, 2, 3, 4, 5]
    (saved,) = run.of("checkpoint")
    assert saved["step"] == 5 and saved["bytes"] > 0
    assert run.over and any("has ended with ValueError" in text for _, text in page.facts(run))


def _saved_behind(folder: str) -> str:
    """Save twice in the background, of which the first fails; the engine ends right after the second."""
    engine = start(_model(), _config(1, folder, observe={"trace": None}, checkpoint={"async": True}))
    _train(engine, 1)
    with patch.object(folders, "publish", side_effect=OSError(errno.ENOSPC, "No space left on device")):
        engine.save_checkpoint(f"{folder}/saved", tag="bad")
        failed = outcome(engine.wait_for_checkpoint)
    engine.save_checkpoint(f"{folder}/saved", tag="good")
    engine.destroy()
    return failed


def test_a_save_in_the_background_is_recorded_once_it_has_its_name(pool1: RankPool, tmp_path: Path) -> None:
    (failed,) = pool1.run(_saved_behind, str(tmp_path))
    assert "No space left on device" in failed
    run = read_run(tmp_path / "run")
    (saved,) = run.of("checkpoint")
    assert saved["path"].endswith("/good") and saved["bytes"] > 0
    assert any("/bad was not saved" in line["text"] for line in run.of("warning"))


def _unwatched() -> tuple[list[str], int]:
    """What an engine adds that is asked for no watch, trace or record: threads and listeners."""
    before = set(threading.enumerate())
    engine = start(_model(), make_config(3, zero={"param_persistence_threshold": 0}))
    mesh = engine.mesh
    _train(engine, 1)
    started = [thread.name for thread in threading.enumerate() if thread not in before]
    started = [name for name in started if not name.startswith("Dummy")]  # torch's own, seen from Python
    groups = {id(g): g for g in (*vars(mesh).values(), *mesh.groups, *mesh.made) if isinstance(g, AxisGroup)}
    listeners = sum(len(group.ledger) for group in groups.values())
    engine.destroy()
    return started, listeners


def test_off_runs_no_thread_and_no_listener(pool2: RankPool) -> None:
    assert pool2.run(_unwatched) == [([], 0)] * 2


def _traced(folder: str, zero: dict[str, Any], most: int) -> None:
    """Four updates in a trace, with room for ``most`` spans."""
    with patch.object(observer, "_MOST_SPANS", most):
        engine = start(_model(), _config(3, folder, zero=zero, observe={"run": None, "steps": [1, 4]}))
        _train(engine, 4)
        engine.destroy()


def test_the_trace_shows_transfers_between_tiers(pool2: RankPool, tmp_path: Path) -> None:
    zero = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    pool2.run(_traced, str(tmp_path), zero, 100_000)
    events, rows = _events(tmp_path / "t.json.gz")
    names = Counter((e["pid"], e["name"]) for e in events if rows[e["pid"], e["tid"]] == "tier transfers")
    assert all(names[rank, what] for rank in (0, 1) for what in ("read", "write"))


def test_memory_of_a_trace_is_bounded_and_what_had_no_room_is_counted(pool2: RankPool, tmp_path: Path) -> None:
    pool2.run(_traced, str(tmp_path), {}, 150)
    events, _ = _events(tmp_path / "t.json.gz")
    assert len([e for e in events if e["pid"] == 0 and not e["name"].startswith("step ")]) <= 150
    text = gzip.decompress((tmp_path / "t.json.gz").read_bytes()).decode()
    assert "spans had no room" in text


def _in_turn(folder: str) -> None:
    """A disk that is full on the first rank: the others have sent what they had, and training goes on."""
    with patch.object(collect, "_write_rank", side_effect=OSError(errno.ENOSPC, "No space left on device")):
        engine = start(_model(), _config(3, folder, observe={"run": None}))
        _train(engine, 5)
        engine.destroy()
    wire = Wire(AxisGroup(dist.group.WORLD, 2, dist.get_rank(), (0, 1), "gloo"))
    if dist.get_rank():
        assert wire.bytes(0) == b"x"
    else:
        wire.send_bytes(b"x", 1)


def test_a_full_disk_costs_the_trace_and_not_the_run(pool2: RankPool, tmp_path: Path) -> None:
    pool2.run(_in_turn, str(tmp_path))
    assert not [*tmp_path.iterdir()]


def _pipeline(folder: str) -> list[float]:
    observe = {"trace": f"{folder}/t.json.gz", "steps": [2, 3], "run": f"{folder}/run"}
    specs, config = pipes.layers(), pipes.config(1, 4, observe=observe)
    return pipes.pipe_run(specs, config, stages=2, steps=4)[0]


def test_a_pipeline_is_seen_too(pool2: RankPool, tmp_path: Path) -> None:
    losses = pool2.run(_pipeline, str(tmp_path))[0]
    record = read_run(tmp_path / "run")
    assert [step["loss"] for step in record.of("step")] == pytest.approx(losses, rel=1e-5)
    assert record.over and all(step["wait_ms"] > 0 for step in record.of("step"))
    events, rows = _events(tmp_path / "t.json.gz")
    _check_rows(events)
    waits = Counter((e["pid"], e["name"]) for e in events if rows[e["pid"], e["tid"]] == "waits")
    assert all(waits[rank, "messages of the pipeline"] for rank in (0, 1))
