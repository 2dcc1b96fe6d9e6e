"""Elastic jobs: whatever is killed, training goes on from the newest complete checkpoint, and no sample is lost or
repeated.
"""

import logging
import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.checkpoint.format.folders import MANIFEST
from deepspeed.client.elastic import SIGNALS, Alarm
from deepspeed.elasticity import take_part
from tests.harness import elastic
from tests.harness.elastic import ElasticJob, records, settings
from tests.harness.launched import wait_until
from tests.harness.logs import logged
from tests.harness.pool import RankPool
from tests.harness.training import outcome

pytestmark = pytest.mark.timeout(900)
FOUR = ("--num_gpus", "4", "--min_ranks", "2", "--max_ranks", "4")


def assert_only_whole_checkpoints(folder: Path) -> None:
    """The last two, as the configuration says, and nothing of a save that was cut short."""
    names = {path.name for path in (folder / "checkpoints").iterdir()}
    whole = {name for name in names if (folder / "checkpoints" / name / MANIFEST).is_file()}
    assert len(whole) == 2 and not [name for name in names if name.startswith(".")], names
    assert not [path for path in names - whole if (folder / "checkpoints" / path).is_dir()], names


def assert_same_training(disturbed: Path, pool: RankPool, alone: Path, steps: int) -> None:
    """Each update of ``disturbed`` saw the very samples of a run on one rank, and so came to the same loss."""
    pool.run(elastic.train, str(alone), steps=steps, every=0)
    ours, theirs = records(disturbed), records(alone)
    assert sorted(ours) == sorted(theirs) == list(range(steps))
    assert [ours[step][0] for step in range(steps)] == [theirs[step][0] for step in range(steps)]
    assert max(abs(ours[step][1] - theirs[step][1]) for step in range(steps)) < 1e-3
    assert theirs[steps - 1][1] < 0.8 * theirs[0][1]  # it does learn something


@pytest.mark.exhaustive
def test_learning_rate_and_loss_scale_go_on_over_restarts(tmp_path: Path, pool1: RankPool) -> None:
    """In fp16, with each of two ranks killed once: every update has those of a run on one rank, and its samples."""
    words = ("--steps", "60", "--pause", "0.1", "--every", "5", "--fp16")
    job = ElasticJob(tmp_path / "job", "--num_gpus", "2", words=words)
    job.until(lambda: job.updates() >= 12, "twelve updates")
    job.kill(0)
    job.until(lambda: job.updates() >= 30 and len(job.pids()) == 2, "thirty updates, and two ranks", 300.0)
    job.kill(1)
    status, out = job.finish()
    assert status == 0 and out.count("failed first, with signal SIGKILL; starting again from") == 2, out
    pool1.run(elastic.train, str(tmp_path / "alone"), steps=60, every=0, config=elastic.FP16)
    set_alone = settings(tmp_path / "alone")
    assert settings(job.folder) == set_alone
    scales = [scale for _, (_, scale) in sorted(set_alone.items())]
    steps = [later / earlier for earlier, later in zip(scales[:-1], scales[1:], strict=True)]
    assert set(steps) == {0.5, 1.0, 2.0}  # an update that is left out, and windows that are not
    assert len({rate for (rate,), _ in set_alone.values()}) > 10
    ours, theirs = records(job.folder), records(tmp_path / "alone")
    assert sorted(ours) == list(range(60)) and [ours[i][0] for i in range(60)] == [theirs[i][0] for i in range(60)]
    assert max(abs(ours[i][1] / theirs[i][1] - 1) for i in range(60) if elastic.SPOILT not in ours[i][0]) < 0.05
    assert {ranks for _, _, ranks in ours.values()} == {1, 2}
    assert_only_whole_checkpoints(job.folder)


def _asked(folder: str, rank: int) -> tuple[int, int]:
    """Train until ``rank`` has been sent SIGTERM in its third update: the status, and how many updates were made."""
    before = [(number, signal.getsignal(number)) for number in SIGNALS]
    wakeup = signal.set_wakeup_fd(-1)
    torch.manual_seed(0)
    engine, _, loader, _ = deepspeed.initialize(
        model=nn.Linear(8, 1), config=elastic.CONFIG, training_data=elastic.Numbers()
    )
    try:
        take_part(engine, folder)
        for _, x, y in loader:
            engine.backward(nn.functional.mse_loss(engine(x), y))
            if engine.global_steps == 2 and engine.global_rank == rank:
                os.kill(os.getpid(), signal.SIGTERM)
            engine.step()
    except SystemExit as end:
        return int(end.code or 0), engine.global_steps
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before:
            signal.signal(number, handler)
        engine.destroy()
    return 0, engine.global_steps


def test_a_signal_to_one_rank_makes_all_save_the_same_update(tmp_path: Path, pool2: RankPool) -> None:
    assert pool2.run(_asked, str(tmp_path), 1) == [(200, 3)] * 2
    assert [file.name for file in tmp_path.glob("global_step*")] == ["global_step3"]


def _rolled_back(folder: str) -> str:
    """The course in the newest checkpoint, where update 4 was trained and saved, left for checkpoint 2, and trained
    again.
    """
    config = elastic.CONFIG | {"checkpoint": {"emergency_deadline": None}}
    engine, *_ = deepspeed.initialize(model=nn.Linear(8, 1), config=config)
    state = take_part(engine, folder, every=2)
    for course in ("first", "second"):
        state["course"] = course
        while engine.global_steps < 4:
            engine.backward(engine(torch.ones(3, 8)).sum())
            engine.step()
        if course == "first":
            engine.load_checkpoint(folder, tag="global_step2")
    found = engine.load_checkpoint(folder)[1]["take_part"]["course"]
    engine.destroy()
    return str(found)


def test_an_update_that_is_trained_again_after_a_rollback_is_saved_again(tmp_path: Path, pool1: RankPool) -> None:
    assert pool1.run(_rolled_back, str(tmp_path)) == ["second"]


def _open() -> tuple[int, list[str]]:
    """How many files and pipes this process has open, and its threads that wait for signals."""
    return len(os.listdir("/proc/self/fd")), [t.name for t in threading.enumerate() if t.name == "emergency-save"]


def test_engines_that_took_part_end_in_any_order_and_leave_no_thread_and_no_pipe() -> None:
    (files, threads), handlers = _open(), [signal.getsignal(number) for number in SIGNALS]
    late = list[int]()
    first, second = Alarm(60.0, late.append), Alarm(60.0, late.append)
    first.close()
    os.kill(os.getpid(), signal.SIGUSR1)
    wait_until(lambda: second.asked == signal.SIGUSR1, 30, "the signal")
    assert not first.asked
    second.close()
    # what earlier tests have left to the collector may close files meanwhile
    wait_until(lambda: _open()[0] <= files and _open()[1] == threads, 30, "the pipe and the thread to go")
    assert [signal.getsignal(number) for number in SIGNALS] == handlers and not late


def _two_take_part(folder: str) -> list[str]:
    """What engines say that take part: the first, the second beside it, the first again, one whose deadline is null,
    and the second when the first has ended.
    """
    quiet = elastic.CONFIG | {"checkpoint": {"emergency_deadline": None}}
    actor, critic, silent = (
        deepspeed.initialize(model=nn.Linear(8, 1), config=config)[0]
        for config in (elastic.CONFIG, elastic.CONFIG, quiet)
    )
    said = [outcome(lambda engine=engine: take_part(engine, folder)) for engine in (actor, critic, actor, silent)]
    actor.destroy()
    said.append(outcome(lambda: take_part(critic, folder)))
    critic.destroy()
    silent.destroy()
    return said


def test_signals_save_one_engine_of_a_process_and_another_is_refused(tmp_path: Path, pool1: RankPool) -> None:
    (said,) = pool1.run(_two_take_part, str(tmp_path))
    assert [bool(text) for text in said] == [False, True, False, False, False]
    assert "UsageError" in said[1] and "catches PreemptedExit" in said[1]


def _said_at_the_start(folder: str, latest: bytes | None) -> tuple[int, list[str], list[str]]:
    """The update that ``take_part`` goes on from, what is said of the checkpoint, and what of that is a warning;
    ``latest``: what is in that file.
    """
    engine, *_ = deepspeed.initialize(model=nn.Linear(8, 1), config=elastic.CONFIG)
    if latest is not None and engine.global_rank == 0:
        (Path(folder) / "latest").write_bytes(latest)
    dist.barrier()
    with logged(logging.INFO, set_level=logging.INFO) as lines, logged(logging.WARNING) as warnings:
        take_part(engine, folder)
        begun = engine.global_steps
        while not engine.global_steps:
            engine.backward(engine(torch.ones(3, 8)).sum())
            engine.step()
        if not begun:
            engine.save_checkpoint(folder)
    engine.destroy()
    return begun, *([line for line in said if "latest" in line] for said in (lines, warnings))


def test_the_first_start_is_no_warning_and_an_empty_latest_costs_no_start(tmp_path: Path, pool2: RankPool) -> None:
    (begun, said, warned), (_, *other) = pool2.run(_said_at_the_start, str(tmp_path), None)
    assert begun == 0 and other == [[], []]
    assert len(said) == 1 and "nothing was loaded" in said[0] and not warned
    again = pool2.run(_said_at_the_start, str(tmp_path), b"")
    assert [begun for begun, *_ in again] == [1, 1]
    assert len(again[0][1]) == 1 and "nothing in its file 'latest'; loading its newest" in again[0][1][0]


@pytest.mark.exhaustive
def test_a_job_that_is_asked_to_end_goes_on_later_with_another_number_of_ranks(tmp_path: Path, pool1: RankPool) -> None:
    first = ElasticJob(tmp_path / "job", "--num_gpus", "2", words=("--steps", "50", "--pause", "0.1"))
    first.until(lambda: first.updates() >= 9, "nine updates")
    first.process.send_signal(signal.SIGTERM)
    status, out = first.finish()
    assert status == 200, out
    again = ElasticJob(tmp_path / "job", "--num_gpus", "3", words=("--steps", "50"), name="again")
    assert again.finish()[0] == 0
    assert_same_training(tmp_path / "job", pool1, tmp_path / "alone", 50)


@pytest.mark.exhaustive
def test_a_script_that_would_begin_anew_is_stopped(tmp_path: Path) -> None:
    job = ElasticJob(
        tmp_path / "job",
        *("--num_gpus", "2", "--max_restarts", "1"),
        words=("--fail", "forgets", "--every", "2", "--pause", "0.2", "--steps", "99"),
    )
    job.until(lambda: (job.folder / "checkpoints" / "latest").exists(), "a checkpoint")
    job.kill(1)
    status, out = job.finish()
    assert status == 1 and "it would repeat samples. Call deepspeed.elasticity.take_part(engine, folder)" in out, out


@pytest.mark.exhaustive
def test_the_same_script_under_torchrun(tmp_path: Path, pool1: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    program = ("torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=2")
    job = ElasticJob(tmp_path / "job", words=("--steps", "40", "--pause", "0.1", "--every", "5"), program=program)
    job.until(lambda: job.updates() >= 8, "eight updates")
    job.kill(1)
    assert job.process.wait(240) == 0, job.out.read_text()
    assert_same_training(job.folder, pool1, tmp_path / "alone", 40)


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_a_random_rank_killed_twenty_times_costs_no_sample(tmp_path: Path, pool1: RankPool) -> None:
    """Kills at any moment: in a step, in a save, while ranks start."""
    chance, steps, kills = random.Random(0), 240, 0
    words = ("--steps", str(steps), "--pause", "0.1", "--every", "6")
    job = ElasticJob(tmp_path / "job", *FOUR, "--max_restarts", "20", words=words)
    while kills < 20:
        goal = job.updates() + chance.randrange(1, 7)
        job.until(lambda goal=goal: job.updates() >= min(goal, steps - 20), f"update {goal}", 300.0)
        time.sleep(chance.random())
        if alive := job.pids():
            try:
                job.kill(chance.choice(sorted(alive)))
            except (KeyError, ProcessLookupError):
                continue
            kills += 1
    status, out = job.finish(900.0)
    assert status == 0, out
    assert {ranks for _, _, ranks in records(job.folder).values()} == {2, 3, 4}
    assert_only_whole_checkpoints(job.folder)
    assert_same_training(job.folder, pool1, tmp_path / "alone", steps)
