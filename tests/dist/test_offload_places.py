"""Odd places for states: folders that vanish, filesystems without direct IO, paths that jobs share, buffers and memory
that are scarce. Each is a sentence or works, and leaves nothing behind.
"""

import errno
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepspeed.accelerator.device import Accelerator
from deepspeed.monitor.log import warning_once
from deepspeed.tier import aio, drive
from deepspeed.tier.arena import Arena
from deepspeed.zero import build as zero_build
from deepspeed.zero.memory import tiers
from tests.harness.offload import (
    CASES,
    CPU,
    FEW,
    STEPS,
    Plan,
    Variant,
    check,
    compare,
    descriptors,
    differences,
    differs_from,
    engine_for,
    open_files,
    train,
    variants,
)
from tests.harness.pool import RankPool
from tests.harness.training import make_config, outcome, start, train_step
from tests.harness.warm import Warm

pytestmark = pytest.mark.timeout(120)
ROOT = Path(__file__).resolve().parents[2]


# -- paths ---------------------------------------------------------------------------------------------------------


def refused_paths() -> list[str]:
    """What is said of a path with a tilde, and of a folder that this user may not write."""
    told = [outcome(lambda: engine_for("optim nvme", "~/drive"))]
    with tempfile.TemporaryDirectory() as locked:  # unlike pytest's folders, whose parents are closed to other users
        os.chmod(locked, 0o000)
        if os.geteuid() == 0:
            os.seteuid(65534)
        try:
            told += [outcome(lambda f=f: engine_for("optim nvme", f)) for f in (locked, f"{locked}/below")]
        finally:
            if os.getuid() == 0:
                os.seteuid(0)
    return told


def test_a_path_that_cannot_be_used_is_a_sentence(pool1: RankPool) -> None:
    """Of others tests/ops/test_staging_and_stored.py has it, of a drive that is not mounted test_bad_input.py."""
    (told,) = pool1.run(refused_paths)
    assert all("UsageError" in said and "nvme_path" in said for said in told), told
    assert "write the whole path" in told[0] and "may write" in told[1] and "may write" in told[2], told


def one_rank_has_no_drive(folder: str) -> str:
    return outcome(lambda: engine_for("both nvme", folder if dist.get_rank() == 0 else "/no/such/drive"))


def test_a_drive_missing_on_one_rank_is_said_on_all(pool2: RankPool, tmp_path: Path) -> None:
    said = pool2.run(one_rank_has_no_drive, str(tmp_path), time_limit=30)
    assert "rank 1" in said[0] and all("/no/such/drive" in text for text in said), said


def test_a_drive_that_holds_nothing_takes_no_space(tmp_path: Path) -> None:
    empty = drive.Drive(str(tmp_path), label="x", staging=1)
    regions = [empty.reserve(1 << 20) for _ in range(3)]
    assert os.fstat(empty._file._plain).st_blocks
    for region in regions:
        empty.free(region)
    assert not os.fstat(empty._file._plain).st_blocks and empty.reserve(4096).offset == 0
    empty.close()


def folder_vanishes(folder: str) -> list[str]:
    """The folder is removed between two steps."""
    case = CASES["wide"]()
    wanted = train(Plan(steps=3), Variant())
    engine = engine_for("grads nvme", f"{folder}/sub")
    train_step(engine, case, 0)
    dist.barrier()
    shutil.rmtree(f"{folder}/sub", ignore_errors=True)
    assert not os.path.exists(f"{folder}/sub")
    train_step(engine, case, 1)
    train_step(engine, case, 2)
    bad = differs_from(wanted, engine)
    engine.destroy()
    return bad


def test_a_folder_that_vanishes_does_no_harm(pool2: RankPool, tmp_path: Path) -> None:
    check(pool2.run(folder_vanishes, str(tmp_path)))


def _no_direct_io(patch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument", path)
        return real(path, flags, *rest, **named)

    patch.setattr(os, "open", refuse)


# What drives have in place of io_uring and direct IO, and what is then to be seen of them.
CONDITIONS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Callable[[Any], bool]]] = {
    "threads": (lambda patch: patch.setenv("DS_AIO_BACKEND", "threads"), lambda drive: drive.backend == "threads"),
    "libaio": (lambda patch: patch.setenv("DS_AIO_BACKEND", "libaio"), lambda drive: drive.backend == "libaio"),
    "no native code": (lambda patch: patch.setattr(aio, "try_load", lambda _: None), lambda d: d.backend == "python"),
    "no O_DIRECT": (_no_direct_io, lambda drive: not drive.direct),
}


def under_conditions(name: str, folder: str) -> list[str]:
    """What differs where the folder, or the machine, has it otherwise. Collective."""
    change, seen = CONDITIONS[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("DS_AIO_BACKEND", raising=False)
        change(patch)
        engine = engine_for("both nvme", folder)
        bad = [] if all(map(seen, engine._parts.tiers.drives)) else [f"the drives do not show {name}"]
        if name == "no O_DIRECT" and not any("page cache" in said for said in engine.places()):
            bad.append("it does not say that the page cache takes part")
        engine.destroy()
        return bad + compare(Plan(steps=3), folder, FEW)


@pytest.mark.parametrize("name", CONDITIONS)
def test_other_ways_of_io_change_no_bit(pool1: RankPool, tmp_path: Path, name: str) -> None:
    check(pool1.run(under_conditions, name, str(tmp_path)))


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no tmpfs at /dev/shm")
def test_tmpfs(pool1: RankPool) -> None:
    folder = f"/dev/shm/ds-test-{os.getpid()}"
    os.mkdir(folder)
    try:
        check(pool1.run(compare, Plan(steps=3), folder, FEW))
        assert os.listdir(folder) == []
    finally:
        os.rmdir(folder)


# -- jobs ----------------------------------------------------------------------------------------------------------

_JOB = """
import sys, time
from tests.harness.offload import CASES, engine_for, train_step
engine = engine_for("both nvme", sys.argv[1])
train_step(engine, CASES["wide"](), 0)
sys.stdout.write("ready\\n")
sys.stdout.flush()
while True:
    train_step(engine, CASES["wide"](), 1)
"""


def beside_a_killed_job(folder: str, python: str) -> list[str]:
    """This job trains on; another one on the same path is killed in the middle, and a third one starts after it."""
    case = CASES["wide"]()
    wanted = train(Plan(), Variant())
    engine = engine_for("grads nvme", folder)
    for step in range(2):
        train_step(engine, case, step)
    environment = {
        k: v
        for k, v in os.environ.items()
        if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_WORLD_SIZE")
    }
    other = subprocess.Popen(
        [python, "-c", _JOB, folder],
        env={**environment, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        assert other.stdout is not None
        ready = other.stdout.readline()
        train_step(engine, case, 2)
    finally:
        other.send_signal(signal.SIGKILL)
        other.wait()
        other.stdout.close()  # type: ignore[union-attr]
    bad = [] if ready == "ready\n" else ["the other job did not train"]
    bad += [f"it left {name}" for name in os.listdir(folder)]
    train_step(engine, case, 3)
    third = engine_for("both nvme", folder)
    for step in range(4, STEPS):
        train_step(third, case, step)
        train_step(engine, case, step)
    bad += differs_from(wanted, engine)
    third.destroy()
    engine.destroy()
    return bad


def test_a_killed_job_leaves_nothing_and_harms_nobody(pool1: RankPool, tmp_path: Path, warm: Warm) -> None:
    check(pool1.run(beside_a_killed_job, str(tmp_path), warm.python, time_limit=90))


def engines_in_a_row(folder: str) -> list[str]:
    """Descriptors and threads after five engines."""

    def once() -> None:
        engine = engine_for("grads nvme", folder)
        train_step(engine, CASES["wide"](), 0)
        engine.destroy()

    once()
    files, threads = open_files(), threading.active_count()
    for _ in range(5):
        once()
    bad, end = [], time.monotonic() + 20
    while (open_files() > files or threading.active_count() > threads) and time.monotonic() < end:
        time.sleep(0.05)  # a thread takes a moment to end
    if open_files() > files:
        bad.append(f"{open_files() - files} descriptors stay open: {sorted(descriptors())}")
    if threading.active_count() > threads:
        bad.append(f"{threading.active_count() - threads} threads stay")
    return bad


def test_no_descriptor_leaks(pool1: RankPool, tmp_path: Path) -> None:
    check(pool1.run(engines_in_a_row, str(tmp_path)))


# -- sizes and memory --------------------------------------------------------------------------------------------


def tiny_buffers(folder: str, optimizer: str) -> list[str]:
    """Every parameter is larger than every buffer; buffers of none at all are as small as can be."""
    place = {"device": "nvme", "nvme_path": folder}
    params = {**place, "max_in_cpu": 0, "buffer_size": 0, "buffer_count": 0}
    zero = {"offload_param": params, "offload_optimizer": {**place, "buffer_count": 0}, "sub_group_size": 1}
    plan = Plan(steps=3, config={"optimizer": {"type": optimizer, "params": {"lr": 1e-2}}})
    wanted, bad = train(plan, Variant()), []
    for grads in (False, True):
        bad += differences(wanted, train(plan, Variant(zero, grads=grads)), f"grads {grads}: ")
    return bad


@pytest.mark.in_make_test("AdamW")
@pytest.mark.parametrize("optimizer", ["AdamW", "Lamb"])
def test_a_parameter_larger_than_any_buffer(pool2: RankPool, tmp_path: Path, optimizer: str) -> None:
    check(pool2.run(tiny_buffers, str(tmp_path), optimizer))


def pinning_is_refused(folder: str) -> tuple[list[str], list[str]]:
    """Differences where pinning is tried and fails, and what the log says."""
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiers, "Arena", lambda *, pins, keep: Arena(pins=True, keep=keep))
        patch.setattr(Accelerator, "lock_memory", lambda *_: "no more page-locked memory")
        patch.setattr("deepspeed.monitor.log.logger.warning", lambda text, **_: said.append(text))
        warning_once.cache_clear()
        return compare(Plan(steps=2), folder, ("both nvme",)), said


def test_refused_pinning(pool1: RankPool, tmp_path: Path) -> None:
    ((bad, said),) = pool1.run(pinning_is_refused, str(tmp_path))
    assert not bad
    assert len(said) == 1 and "page-locked" in said[0] and "no more" in said[0], said


def refused_by_the_limit(folder: str) -> list[str]:
    """A limit that cannot be kept: an error before anything exists, a model that is as it was, and advice that
    works.
    """
    case, bad = CASES["wide"](), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zero_build.hostmem, "rss_bytes", lambda: 0)
        patch.setattr(drive, "_open_arena", lambda *_: pytest.fail("a file was made"))
        model = case.build().train()
        wanted = {name: value.detach().clone() for name, value in model.named_parameters()}
        batch = torch.ones(2, 6)
        expected = model(batch).detach()
        zero: dict[str, Any] = {"offload_optimizer": CPU, "prefetch_bucket_size": 0, "sub_group_size": 4096}
        for limit, words in (("200KB", "raise the limit or use more ranks"), ("800KB", "It fits with")):
            limited = make_config(3, zero=zero, memory={"host_limit": limit})
            said = outcome(lambda limited=limited: start(model, limited))
            wants = "DeepSpeedConfigError", "memory.host_limit", "optimizer state", words
            bad += [] if all(want in said for want in wants) else [f"{limit}: {said!r}"]
        bad += [name for name, value in model.named_parameters() if not torch.equal(value, wanted[name])]
        if not torch.equal(model(batch), expected) or any(hasattr(p, "_ds_unit") for p in model.parameters()):
            bad.append("the model is changed")
        patch.undo()
        patch.setattr(zero_build.hostmem, "rss_bytes", lambda: 0)
        zero = variants(folder)["tiles"].zero
        engine = start(model, make_config(3, zero={**zero, "prefetch_bucket_size": 0}, memory={"host_limit": "800KB"}))
        train_step(engine, case, 0)
        if engine.memory_plan().host > 800_000:
            bad.append(f"planned {engine.memory_plan().host}")
        engine.destroy()
    return bad


def test_a_limit_that_cannot_be_kept(pool1: RankPool, tmp_path: Path) -> None:
    check(pool1.run(refused_by_the_limit, str(tmp_path)))
    assert list(tmp_path.iterdir()) == []
