"""What goes wrong with a drive is a clear error or a working fallback: never a wrong number, a hang, or something left
behind.
"""

import contextlib
import errno
import gc
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.tier import aio, drive
from deepspeed.tier.aio import TransferError
from deepspeed.verify.models import Case
from deepspeed.zero import build as zero_build
from deepspeed.zero.memory import tiers
from tests.dist.test_offload_parity import (
    CASES,
    STEPS,
    Plan,
    check,
    compare,
    gradients_on_drive,
    same,
    snapshot,
    train,
    variants,
)
from tests.harness.pool import RankPool
from tests.harness.training import here, make_config, outcome, start, train_step

pytestmark = pytest.mark.timeout(120)
ROOT = Path(__file__).resolve().parents[2]


def engine_for(way: str, folder: str, **config: Any) -> Any:
    """An engine over the wide model."""
    variant = variants(folder)[way]
    with gradients_on_drive(forced=variant.grads):
        return start(
            CASES["wide"]().build().train(), make_config(3, zero={**variant.zero, **config.pop("zero", {})}, **config)
        )


def open_files() -> int:
    """Descriptors of this process."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def descriptors() -> list[str]:
    """What they stand for."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one of the listing itself
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return found


@contextlib.contextmanager
def file_size_limit(nbytes: int) -> Iterator[None]:
    """Files of this process cannot grow beyond that: to the process a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# -- no room -------------------------------------------------------------------------------------------------------


def full_at_start(folder: str) -> list[str]:
    """The error of ``initialize``; nothing stays open, and another engine works."""
    before, bad = open_files(), []
    with file_size_limit(100_000):
        said = outcome(lambda: engine_for("both nvme", folder))
    if "TransferError" not in said or "OSError" not in said or folder not in said or "nvme_path" not in said:
        bad.append(f"it says {said!r}")
    if open_files() != before:
        bad.append(f"{open_files() - before} descriptors stay open")
    engine = engine_for("both nvme", folder)
    train_step(engine, CASES["wide"](), 0)
    engine.destroy()
    return bad


def test_no_room_at_the_start(pool1: RankPool, tmp_path: Path) -> None:
    check(pool1.run(full_at_start, str(tmp_path)))
    assert list(tmp_path.iterdir()) == []


def refuses(engine: Any, case: Case) -> list[str]:
    """A torn engine says so at every turn, and can be destroyed."""
    bad = []
    uses: dict[str, Callable[[], Any]] = {
        "forward": lambda: case.seeded_loss(engine, here(9)),
        "backward": lambda: engine.backward(torch.ones((), requires_grad=True)),
        "step": engine.step,
        "forward again": lambda: case.seeded_loss(engine, here(9)),
    }
    for name, use in uses.items():
        said = outcome(use)
        if "UsageError" not in said or "half way" not in said or "checkpoint" not in said:
            bad.append(f"{name} says {said!r}")
    said = outcome(engine.destroy)
    return [*bad, f"destroy says {said}"] if said else bad


def full_in_the_first_step(folder: str) -> list[str]:
    """Optimizer slots find no room."""
    case, before = CASES["wide"](), open_files()
    engine = engine_for("tiles", folder)
    used = engine._parts.tiers.drives[0].used_bytes
    engine.backward(case.seeded_loss(engine, here(0))[0])
    with file_size_limit(used + 50_000):
        said = outcome(engine.step)
    bad = [] if "TransferError" in said and "nvme_path" in said else [f"it says {said!r}"]
    bad += refuses(engine, case)
    del engine
    return bad if open_files() == before else [*bad, "descriptors stay open"]


def test_no_room_in_the_first_step(pool1: RankPool, tmp_path: Path) -> None:
    check(pool1.run(full_in_the_first_step, str(tmp_path)))


_FULL_DISK = """
import sys
from tests.dist.test_offload_faults import engine_for
from tests.harness.training import outcome
sys.stdout.write(outcome(lambda: engine_for("both nvme", sys.argv[1])))
"""


def test_a_full_filesystem(tmp_path: Path) -> None:
    """The real thing, where one may mount a small one."""
    command = f'mount -t tmpfs -o size=128k small "{tmp_path}" && exec "{sys.executable}" -c "$SCRIPT" "{tmp_path}"'
    environment = {**os.environ, "SCRIPT": _FULL_DISK, "PYTHONPATH": str(ROOT), "DS_LOG_LEVEL": "ERROR"}
    if not shutil.which("unshare") or subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("this user may not mount")
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", command], env=environment, capture_output=True, text=True, timeout=90, cwd=ROOT
    )
    if done.returncode in (1, 32) and "mount" in done.stderr:
        pytest.skip("this user may not mount")
    assert "TransferError" in done.stdout and str(tmp_path) in done.stdout, done.stdout + done.stderr
    assert "the filesystem is full" in done.stdout and "nvme_path" in done.stdout, done.stdout


# -- transfers that fail -----------------------------------------------------------------------------------------


class LateFailure:
    """A transfer whose failure shows when somebody waits for it."""

    def __init__(self, transfer: Any) -> None:
        self._transfer = transfer
        self.nbytes = transfer.nbytes

    def wait(self) -> None:
        self._transfer.wait()
        raise TransferError(errno.EIO, "injected")

    def done(self) -> bool:
        return bool(self._transfer.done())


@contextlib.contextmanager
def failing(verb: str, *, at: int, late: bool, label: str = "", writes_data: bool = True) -> Iterator[list[int]]:
    """The transfer number ``at`` of ``verb`` (of drives whose label contains ``label``) fails; yields the count so
    far.
    """
    real, count = getattr(drive.Drive, verb), [0]

    def act(self: drive.Drive, region: Any, begin: int, values: torch.Tensor) -> Any:
        if label not in self.label:
            return real(self, region, begin, values)
        count[0] += 1
        if count[0] != at + 1:
            return real(self, region, begin, values)
        if not late:
            raise TransferError(errno.EIO, "injected")
        return LateFailure(real(self, region, begin, values if writes_data else values.clone().zero_()))

    setattr(drive.Drive, verb, act)
    try:
        yield count
    finally:
        setattr(drive.Drive, verb, real)


def fails_in_the_step(folder: str, way: str, verb: str, *, late: bool) -> list[str]:
    """A transfer fails at some tile of the second step: the step raises, and the engine refuses to go on."""
    case, bad, before = CASES["wide"](), [], open_files()
    for at in (0, 1, 4):
        engine = engine_for(way, folder)
        train_step(engine, case, 0)
        engine.backward(case.seeded_loss(engine, here(1))[0])
        with failing(verb, at=at, late=late, label="offload_optimizer"):
            said = outcome(engine.step)
        if "TransferError" not in said or "injected" not in said:
            bad.append(f"{verb} {at}: it says {said!r}")
        bad += [f"{verb} {at}: {line}" for line in refuses(engine, case)]
        del engine
    return bad if open_files() == before else [*bad, "descriptors stay open"]


@pytest.mark.parametrize(("verb", "late"), [("write", False), ("read", False), ("read", True)])
@pytest.mark.parametrize("way", ["one buffer", "half nvme"])
def test_a_transfer_that_fails_in_the_step(pool1: RankPool, tmp_path: Path, way: str, verb: str, late: bool) -> None:  # noqa: FBT001
    check(pool1.run(fails_in_the_step, str(tmp_path), way, verb, late=late))


def failed_write_is_found_later(folder: str, label: str, from_end: int) -> list[str]:
    """A background write of the step fails: from then on no forward gives a loss, however often one tries."""
    case, bad = CASES["wide"](), []
    engine = engine_for("both nvme", folder)
    train_step(engine, case, 0)
    engine.backward(case.seeded_loss(engine, here(1))[0])
    with failing("write", at=-1, late=True, label=label) as count:
        engine.step()
    engine.backward(case.seeded_loss(engine, here(2))[0])
    with failing("write", at=count[0] - from_end, late=True, label=label, writes_data=False):
        told = [outcome(engine.step)]
    for step in range(3, 6):  # until it is found, and then again and again
        told.append(outcome(lambda step=step: case.seeded_loss(engine, here(step))))
        if not told[-1]:
            told.append(outcome(lambda step=step: train_step(engine, case, step)))
    first = next((i for i, said in enumerate(told) if "injected" in said), None)
    if first is None:
        bad.append(f"nobody heard of the failed write: {told}")
    elif not all("TransferError" in said or "half way" in said for said in told[first:]):
        bad.append(f"after the failure was told, training goes on, or the reason is hidden: {told}")
    outcome(engine.destroy)
    return bad


@pytest.mark.parametrize("from_end", [1, 2, 3])
@pytest.mark.parametrize("label", ["offload_param", "offload_optimizer"])
def test_a_failed_background_write_is_never_forgotten(
    pool1: RankPool, tmp_path: Path, label: str, from_end: int
) -> None:
    check(pool1.run(failed_write_is_found_later, str(tmp_path), label, from_end))


def read_fails_in_forward(folder: str) -> list[str]:
    """A parameter cannot be read once (a cable, a timeout): the forward raises, the next one is right."""
    case, bad = CASES["wide"](), []
    wanted = train(Plan(steps=2), variants(folder)["none"])
    engine = engine_for("grads nvme", folder)
    train_step(engine, case, 0)
    for late in (False, True):
        for at in range(3):
            with failing("read", at=at, late=late, label="offload_param"):
                said = outcome(lambda: case.seeded_loss(engine, here(1)))
            if "injected" not in said:
                bad.append(f"read {at} late={late}: {said!r}")
    train_step(engine, case, 1)
    found = snapshot(engine)
    bad += [k for k, v in found.items() if not same(wanted[k], v)]
    bad += [f"{d.label}: buffers are lost" for d in engine._parts.tiers.drives if d.staging._out]
    engine.destroy()
    return bad


def test_a_read_that_fails_in_a_forward(pool1: RankPool, tmp_path: Path) -> None:
    check(pool1.run(read_fails_in_forward, str(tmp_path)))


def gradient_write_fails(folder: str, *, late: bool) -> list[str]:
    """A gradient cannot be written in the backward: backward or step raise, and the window can be repeated."""
    case, bad = CASES["wide"](), []
    wanted = train(Plan(steps=2), variants(folder)["none"])
    engine = engine_for("grads nvme", folder)
    train_step(engine, case, 0)
    with failing("write", at=0, late=late, label="offload_optimizer"):
        said = outcome(lambda: train_step(engine, case, 1))
    if "injected" not in said:
        bad.append(f"it says {said!r}")
    again = outcome(lambda: train_step(engine, case, 1))
    if not again:
        bad += [k for k, v in snapshot(engine).items() if not same(wanted[k], v)]
    elif "half way" not in again and "injected" not in again:
        bad.append(f"then it says {again!r}")
    said = outcome(engine.destroy)
    return [*bad, f"destroy says {said}"] if said else bad


@pytest.mark.parametrize("late", [False, True])
def test_a_gradient_that_cannot_be_written(pool1: RankPool, tmp_path: Path, late: bool) -> None:  # noqa: FBT001
    check(pool1.run(gradient_write_fails, str(tmp_path), late=late))


# -- paths ---------------------------------------------------------------------------------------------------------


def path_refusals(folder: str) -> dict[str, str]:
    """What is said about folders that cannot be used."""
    file = Path(folder) / "file"
    file.write_text("mine")
    paths = {
        "missing": f"{folder}/not/there",
        "file": str(file),
        "readonly": "/sys/kernel" if os.geteuid() == 0 else "/",
    }
    told = {name: outcome(lambda path=path: engine_for("both nvme", path)) for name, path in paths.items()}
    locked = Path(folder) / "locked"
    locked.mkdir(mode=0o000)
    if os.geteuid() == 0:
        os.seteuid(65534)
    try:
        told["locked"] = outcome(lambda: engine_for("optim nvme", str(locked)))
    finally:
        if os.getuid() == 0:
            os.seteuid(0)
    assert file.read_text() == "mine"
    return told


def test_a_path_that_cannot_be_used_is_a_sentence(pool1: RankPool, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents[:3]:
        parent.chmod(0o755)
    (told,) = pool1.run(path_refusals, str(tmp_path))
    for name, said in told.items():
        assert "UsageError" in said and "nvme_path" in said, (name, said)
    assert "is the drive mounted" in told["missing"] and "not" in told["missing"]
    assert "may write" in told["locked"], told["locked"]


def folder_vanishes(folder: str) -> list[str]:
    """The folder is removed between two steps."""
    case = CASES["wide"]()
    wanted = train(Plan(steps=3), variants(folder)["none"])
    engine = engine_for("grads nvme", f"{folder}/sub")
    train_step(engine, case, 0)
    torch.distributed.barrier()
    shutil.rmtree(f"{folder}/sub", ignore_errors=True)
    assert not os.path.exists(f"{folder}/sub")
    train_step(engine, case, 1)
    train_step(engine, case, 2)
    bad = [k for k, v in snapshot(engine).items() if not same(wanted[k], v)]
    engine.destroy()
    return bad


def test_a_folder_that_vanishes_does_no_harm(pool2: RankPool, tmp_path: Path) -> None:
    check(pool2.run(folder_vanishes, str(tmp_path)))


def without_o_direct(folder: str, *, simulate: bool) -> list[str]:
    """A filesystem that refuses O_DIRECT."""
    with pytest.MonkeyPatch.context() as patch:
        if simulate:
            real = os.open

            def refuse(path: Any, flags: int, *rest: Any, **named: Any) -> int:
                if flags & os.O_DIRECT:
                    raise OSError(errno.EINVAL, "Invalid argument", path)
                return real(path, flags, *rest, **named)

            patch.setattr(os, "open", refuse)
            engine = engine_for("both nvme", folder)
            assert not any(d.direct for d in engine._parts.tiers.drives) and any(
                "page cache" in said for said in engine.places()
            )
            engine.destroy()
        return compare(Plan(steps=3), folder, ("one buffer", "grads nvme"))


def test_no_o_direct(pool2: RankPool, tmp_path: Path) -> None:
    check(pool2.run(without_o_direct, str(tmp_path), simulate=True))


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no tmpfs at /dev/shm")
def test_tmpfs(pool2: RankPool) -> None:
    folder = f"/dev/shm/ds-test-{os.getpid()}"
    os.mkdir(folder)
    try:
        check(pool2.run(without_o_direct, folder, simulate=False))
        assert os.listdir(folder) == []
    finally:
        os.rmdir(folder)


# -- jobs ----------------------------------------------------------------------------------------------------------

_JOB = """
import sys, time
from tests.dist.test_offload_faults import CASES, engine_for, train_step
engine = engine_for("both nvme", sys.argv[1])
train_step(engine, CASES["wide"](), 0)
sys.stdout.write("ready\\n")
sys.stdout.flush()
while True:
    train_step(engine, CASES["wide"](), 1)
"""


def beside_a_killed_job(folder: str) -> list[str]:
    """This job trains on; another one on the same path is killed in the middle, and a third one starts after it."""
    case = CASES["wide"]()
    wanted = train(Plan(), variants(folder)["none"])
    engine = engine_for("grads nvme", folder)
    for step in range(2):
        train_step(engine, case, step)
    environment = {
        k: v
        for k, v in os.environ.items()
        if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_WORLD_SIZE")
    }
    other = subprocess.Popen(
        [sys.executable, "-c", _JOB, folder],
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
    bad += [k for k, v in snapshot(engine).items() if not same(wanted[k], v)]
    third.destroy()
    engine.destroy()
    return bad


def test_a_killed_job_leaves_nothing_and_harms_nobody(pool1: RankPool, tmp_path: Path) -> None:
    check(pool1.run(beside_a_killed_job, str(tmp_path), time_limit=90))


def one_job(folder: str) -> list[str]:
    """A job among others."""
    return compare(Plan(steps=4), folder, ("grads nvme", "one buffer"))


def test_two_jobs_on_one_path(pool1: RankPool, pool2: RankPool, tmp_path: Path) -> None:
    results: list[list[str]] = []
    threads = [
        threading.Thread(target=lambda pool=pool: results.extend(pool.run(one_job, str(tmp_path))))
        for pool in (pool1, pool2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 3
    check(results)
    assert list(tmp_path.iterdir()) == []


def engines_in_a_row(folder: str) -> list[str]:
    """Descriptors and threads after ten engines."""

    def once() -> None:
        engine = engine_for("grads nvme", folder)
        train_step(engine, CASES["wide"](), 0)
        engine.destroy()

    once()
    files, threads = open_files(), threading.active_count()
    for _ in range(10):
        once()
    bad = []
    if open_files() != files:
        bad.append(f"{open_files() - files} descriptors stay open: {sorted(descriptors())}")
    if threading.active_count() != threads:
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
    wanted, bad = train(plan, variants(folder)["none"]), []
    for grads in (False, True):
        variant = variants(folder)["both nvme"].__class__(zero, grads=grads)
        found = train(plan, variant)
        bad += [f"grads {grads}: {k}" for k in wanted if not same(wanted[k], found[k])]
    return bad


@pytest.mark.parametrize("optimizer", ["AdamW", "Lamb"])
def test_a_parameter_larger_than_any_buffer(pool2: RankPool, tmp_path: Path, optimizer: str) -> None:
    check(pool2.run(tiny_buffers, str(tmp_path), optimizer))


def pinning_is_refused(folder: str) -> tuple[list[str], list[str]]:
    """Differences where pinning is tried and fails, and what the log says."""
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiers.Tiers, "_pins", lambda _, *, pin: pin)
        patch.setattr("deepspeed.tier.staging.logger.warning", lambda text, *args: said.append(text % args))
        real = torch.empty

        def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
            if kwargs.pop("pin_memory", False):
                raise RuntimeError("no more page-locked memory")
            return real(*args, **kwargs)

        patch.setattr(torch, "empty", empty)
        return compare(Plan(steps=2), folder, ("both nvme",)), said


def test_refused_pinning(pool1: RankPool, tmp_path: Path) -> None:
    ((bad, said),) = pool1.run(pinning_is_refused, str(tmp_path))
    assert not bad
    assert len(said) == 2 and all("page-locked" in line for line in said), said  # one a ring of buffers


def without_native_code(folder: str) -> list[str]:
    """File IO where nothing can be compiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aio, "try_load", lambda _: None)
        patch.delenv("DS_AIO_BACKEND", raising=False)
        engine = engine_for("both nvme", folder)
        assert {d.backend for d in engine._parts.tiers.drives} == {"python"}
        engine.destroy()
        return compare(Plan(steps=3), folder, ("one buffer", "grads nvme"))


def test_no_native_code(pool2: RankPool, tmp_path: Path) -> None:
    check(pool2.run(without_native_code, str(tmp_path)))


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
        for limit, words in (("200KB", "raise the limit or use more ranks"), ("800KB", "It fits with")):
            zero = {"offload_optimizer": {"device": "cpu"}, "prefetch_bucket_size": 0, "sub_group_size": 4096}
            try:
                start(model, make_config(3, zero=zero, memory={"host_limit": limit}))
                bad.append(f"{limit} was accepted")
            except DeepSpeedConfigError as error:
                if (
                    words not in str(error)
                    or "memory.host_limit" not in str(error)
                    or "optimizer state" not in str(error)
                ):
                    bad.append(f"{limit}: {error}")
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


def tight_limits(folder: str) -> list[str]:
    """The limit decides whether gradients rest in memory or on the drive; the bits do not change."""
    case, bad = CASES["wide"](), []
    wanted = train(Plan(steps=3), variants(folder)["none"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zero_build.hostmem, "rss_bytes", lambda: 0)
        zero = variants(folder)["tiles"].zero
        start_engine: Callable[[int], Any] = lambda limit: start(  # noqa: E731
            case.build().train(), make_config(3, zero=zero, **({"memory": {"host_limit": limit}} if limit else {}))
        )
        probe = start_engine(0)
        need = probe.memory_plan().host
        probe.destroy()
        for limit, there in ((need, False), (need - 1, True)):
            said = ""
            try:
                engine = start_engine(limit)
            except DeepSpeedConfigError as error:
                said = str(error)
            if said:
                # with shards this small, buffers of three whole gradients may be more than the gradients
                bad += [] if there and limit == need - 1 else [said]
                continue
            on_drive = any(u.plan.grad.tier.value == "nvme" for u in engine.runtime.units if u.trainable)
            if on_drive != there or engine.memory_plan().host > limit:
                bad.append(f"limit {limit}: gradients on the drive {on_drive}, planned {engine.memory_plan().host}")
            for step in range(3):
                train_step(engine, case, step)
            found = snapshot(engine)
            bad += [k for k, v in found.items() if not same(wanted[k], v)]
            engine.destroy()
    return bad


def test_a_tight_limit_moves_gradients(pool1: RankPool, tmp_path: Path) -> None:
    check(pool1.run(tight_limits, str(tmp_path)))
