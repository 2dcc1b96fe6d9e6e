"""When a checkpoint cannot be written every rank says why and what to do, the one before it stays whole, and training
goes on.
"""

import contextlib
import errno
import functools
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from deepspeed.checkpoint.format import folders
from deepspeed.checkpoint.save.writer import RankFile
from deepspeed.tools.verify.models import case_named
from deepspeed.tools.verify.ranks import RankPool as OwnPool
from tests.dist.test_checkpoint_damage import engine_of, same, state, train
from tests.harness.offload import file_size_limit
from tests.harness.pool import RankPool
from tests.harness.training import make_config, outcome, start

ROOT = Path(__file__).resolve().parents[2]
TINY = 8192  # bytes; far below what a rank writes
BOTH = (0, 1)


def names(folder: str) -> list[str]:
    return sorted(p.name for p in Path(folder).iterdir() if p.name != "zero_to_fp32.py")


@contextlib.contextmanager
def no_space(pattern: str) -> Iterator[None]:
    """No small file whose name ends so can be written by this rank: the disk is full by then."""
    real = folders.write_atomically

    def write(path: Path, content: bytes, **options: Any) -> None:
        if path.name.endswith(pattern):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(path, content, **options)

    with mock.patch.object(folders, "write_atomically", write):
        yield


LIMITS: dict[str, Callable[[], Any]] = {
    "data": functools.partial(file_size_limit, TINY),
    "list": functools.partial(no_space, ".list"),
    "manifest": functools.partial(no_space, "manifest.json"),
}


def fails_then_goes_on(folder: str, where: str, ranks: tuple[int, ...]) -> list[str]:
    bad, engine = [], engine_of()
    train(engine, 1)
    engine.save_checkpoint(folder, tag="a")
    saved = state(engine)
    train(engine, 2)
    before = state(engine)
    with LIMITS[where]() if dist.get_rank() in ranks else contextlib.nullcontext():
        said = outcome(lambda: engine.save_checkpoint(folder, tag="b"))
    advice = any(words in said for words in ("free space", "raise the limit"))
    if not advice or "CheckpointError" not in said or folder not in said:
        bad.append(f"it says {said!r}")
    dist.barrier()
    if names(folder) != ["a", "latest"]:
        bad.append(f"it leaves {names(folder)}")
    if not same(before, state(engine)):
        bad.append("the failed save changed the engine")
    train(engine, 3)
    engine.save_checkpoint(folder, tag="b")
    dist.barrier()
    if names(folder) != ["a", "b", "latest"]:
        bad.append(f"then there is {names(folder)}")
    engine.load_checkpoint(folder, tag="a")
    if not same(saved, state(engine)):
        bad.append("the checkpoint before it was touched")
    engine.destroy()
    return bad


@pytest.mark.parametrize(
    ("where", "ranks"),
    [("data", (0,)), ("data", (1,)), ("data", BOTH), ("list", (1,)), ("list", (0,)), ("manifest", (0,))],
)
def test_a_save_that_finds_no_space_fails_on_every_rank_and_leaves_nothing(
    pool2: RankPool, tmp_path: Path, where: str, ranks: tuple[int, ...]
) -> None:
    assert pool2.run(fails_then_goes_on, str(tmp_path), where, ranks) == [[], []]


# -- an error of one rank is an error of all ----------------------------------------------------------------------


def save_weights(folder: str, name: str) -> str:
    zero = {"stage3_gather_16bit_weights_on_model_save": True}
    engine = start(case_named("plain").build(), make_config(3, zero=zero))
    return outcome(lambda: engine.save_16bit_model(folder, name))


@pytest.mark.parametrize("blocked", ["the name", "the temporary name"])
def test_a_16bit_model_that_cannot_be_written_is_an_error_on_every_rank(
    pool2: RankPool, tmp_path: Path, blocked: str
) -> None:
    """The first is found when the file gets its name, the second when it is made: its temporary name is too long."""
    name = "weights.bin" if blocked == "the name" else "weights.bin".rjust(250, "w")
    if blocked == "the name":
        (tmp_path / name).mkdir()
    said = pool2.run(save_weights, str(tmp_path), name, time_limit=60)
    assert all("CheckpointError" in text and "weights.bin" in text for text in said), said
    assert [p.name for p in tmp_path.iterdir()] == ([name] if blocked == "the name" else [])


class Refuses:
    """An object that can be pickled on no rank, with an error that is not pickle's."""

    def __reduce__(self) -> Any:
        raise ValueError("not me")


def save_where_the_first_rank_stumbles(folder: str) -> list[str]:
    """What a save says when the first rank cannot begin it, and when it alone cannot pickle its client state."""
    engine, first = engine_of(allow_pickle=True), dist.get_rank() == 0
    train(engine, 1)
    broken = mock.patch.object(folders, "begin", side_effect=OverflowError("something nobody thought of"))
    with broken if first else contextlib.nullcontext():
        said = [outcome(lambda: engine.save_checkpoint(folder))]
    state = {"odd": Refuses()} if first else {}
    said.append(outcome(lambda: engine.save_checkpoint(folder, client_state=state)))
    engine.destroy()
    return said


def test_any_error_of_the_first_rank_in_a_save_is_told_to_all(pool2: RankPool, tmp_path: Path) -> None:
    for begin, pickled in pool2.run(save_where_the_first_rank_stumbles, str(tmp_path), time_limit=60):
        assert "CheckpointError" in begin and "nobody thought of" in begin
        assert "not me" in pickled


# -- in the background -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def held() -> Iterator[threading.Event]:
    """Background saves bring little ones to the disk when the event is set."""
    gate, real = threading.Event(), RankFile.close

    def close(file: RankFile) -> None:
        gate.wait(60)
        real(file)

    with mock.patch.object(RankFile, "close", close):
        yield gate


def steps_until_it_is_told(engine: Any) -> str:
    """What the first step says that raises."""
    for count in range(3000):
        if said := outcome(lambda count=count: train(engine, count)):
            return said
        time.sleep(0.01)
    return "nothing"


def background_failure(folder: str, where: str, ranks: tuple[int, ...], told: str) -> list[Any]:
    bad, engine = [], engine_of(**{"async": True})
    engine.save_checkpoint(folder, tag="a")
    engine.wait_for_checkpoint()
    with contextlib.ExitStack() as stack:
        gate = stack.enter_context(held())
        if said := outcome(lambda: engine.save_checkpoint(folder, tag="b")):
            bad.append(f"the call itself fails: {said}")
        limit = stack.enter_context(contextlib.ExitStack())
        if dist.get_rank() in ranks:
            limit.enter_context(LIMITS[where]())
        gate.set()
        if told == "destroy" and dist.get_rank() in ranks:
            # The ranks' meeting place, to which destroy() writes, is a file in these tests: the limit is for the save
            # alone.
            deadline = time.monotonic() + 30
            while not engine._checkpoints.saver._running.finished and time.monotonic() < deadline:
                time.sleep(0.01)
            limit.close()
        calls: dict[str, Callable[[], Any]] = {
            "wait": engine.wait_for_checkpoint,
            "save": lambda: engine.save_checkpoint(folder, tag="c"),
            "destroy": engine.destroy,
            "load": lambda: engine.load_checkpoint(folder, tag="a"),
        }
        said = steps_until_it_is_told(engine) if told == "step" else outcome(calls[told])
    if not all(w in said for w in ("CheckpointError", folder, "background save of checkpoint b", f"rank {ranks[0]}")):
        bad.append(f"{told} says {said!r}")
    dist.barrier()
    if names(folder) != ["a", "latest"]:
        bad.append(f"it leaves {names(folder)}")
    if told == "destroy":
        return bad
    if said := outcome(engine.wait_for_checkpoint):
        bad.append(f"it is told twice: {said!r}")
    engine.save_checkpoint(folder, tag="d")
    engine.destroy()
    dist.barrier()
    return bad if names(folder) == ["a", "d", "latest"] else [*bad, f"then there is {names(folder)}"]


@pytest.mark.parametrize(
    ("where", "ranks", "told"),
    [
        ("data", (1,), "step"),
        ("data", BOTH, "wait"),
        ("list", (1,), "destroy"),
        ("data", (0,), "destroy"),
        ("manifest", (0,), "save"),
        ("list", (0,), "load"),
    ],
)
def test_a_background_save_that_fails_is_told_by_the_next_call_on_every_rank(
    pool2: RankPool, tmp_path: Path, where: str, ranks: tuple[int, ...], told: str
) -> None:
    assert pool2.run(background_failure, str(tmp_path), where, ranks, told) == [[], []]


def weights_after_a_failure(folder: str, fails: bool) -> list[torch.Tensor]:  # noqa: FBT001
    """Weights after ten steps; with a failure that the loop catches where it is raised."""
    engine = engine_of(**{"async": True})
    with no_space(".list") if fails else contextlib.nullcontext():
        engine.save_checkpoint(folder, tag="a")
        for step in range(10):
            outcome(lambda step=step: train(engine, step))
            time.sleep(0.03)
        outcome(engine.destroy)
    return [p.detach().clone() for p in engine.module.parameters()]


def test_training_goes_on_where_it_was_after_a_failure_was_caught(pool2: RankPool, tmp_path: Path) -> None:
    with_failure = pool2.run(weights_after_a_failure, str(tmp_path / "full"), True)
    without = pool2.run(weights_after_a_failure, str(tmp_path / "good"), False)
    assert all(same(a, b) for a, b in zip(with_failure, without, strict=True))
    assert not (tmp_path / "full" / "latest").exists() and (tmp_path / "good" / "latest").exists()


# -- places where nothing can be saved ---------------------------------------------------------------------------


def refused_at_once(places: list[tuple[str, str]]) -> list[str]:
    """What saves into the first rank's and the second rank's folder say, one after the other."""
    engine = engine_of()
    said = [outcome(lambda place=place: engine.save_checkpoint(place[dist.get_rank()])) for place in places]
    train(engine, 1)
    engine.destroy()
    return said


def test_a_save_dir_where_nothing_can_be_saved_is_refused_and_left_clean(pool2: RankPool, tmp_path: Path) -> None:
    file, own = tmp_path / "file", [tmp_path / "a", tmp_path / "b"]
    file.write_text("mine")
    rows = [
        ([file, file], [str(file)]),
        ([file / "below"] * 2, [str(file / "below")]),
        ([Path("/proc/nowhere/x")] * 2, ["/proc/nowhere", "cannot be written"]),
        (own, ["not shared"]),
    ]
    for told in pool2.run(refused_at_once, [tuple(map(str, place)) for place, _ in rows]):
        for (_, words), said in zip(rows, told, strict=True):
            assert all(word in said for word in ("CheckpointError", *words)), said
    assert file.read_text() == "mine"
    assert [list(p.iterdir()) if p.exists() else [] for p in own] == [[], []]


# -- the real thing ------------------------------------------------------------------------------------------------


def fills_the_disk(folder: str) -> list[str]:
    """Fill the filesystem but for what one checkpoint takes; the next save must fail and the one after it work."""
    bad, engine = [], engine_of()
    engine.save_checkpoint(folder, tag="a")
    if dist.get_rank() == 0:
        with contextlib.suppress(OSError), open(f"{folder}/ballast", "wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
    dist.barrier()
    said = outcome(lambda: engine.save_checkpoint(folder, tag="b"))
    if not all(w in said for w in ("CheckpointError", folder, "No space left", "free space")):
        bad.append(f"it says {said!r}")
    dist.barrier()
    if names(folder) != ["a", "ballast", "latest"]:
        bad.append(f"it leaves {names(folder)}")
    dist.barrier()
    if dist.get_rank() == 0:
        os.unlink(f"{folder}/ballast")
    dist.barrier()
    train(engine, 1)
    engine.load_checkpoint(folder)
    engine.save_checkpoint(folder, tag="b")
    engine.destroy()
    return bad if names(folder) == ["a", "b", "latest"] else [*bad, f"then there is {names(folder)}"]


def remounted_read_only(folder: str) -> list[str]:
    engine = engine_of()
    said = outcome(lambda: engine.save_checkpoint(folder, tag="c"))
    engine.load_checkpoint(folder)
    engine.destroy()
    fine = all(w in said for w in ("CheckpointError", folder, "Read-only", "save to another"))
    return [] if fine and names(folder) == ["a", "b", "latest"] else [f"it says {said!r} and leaves {names(folder)}"]


def on_a_small_disk(folder: str) -> None:
    """In a process that has a small filesystem at ``folder``."""
    with OwnPool(2) as pool:
        bad = pool.run(fills_the_disk, folder)
        subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
        bad += pool.run(remounted_read_only, folder)
    sys.stdout.write(repr([b for b in bad if b]))


@pytest.mark.exhaustive
def test_a_full_and_then_a_read_only_filesystem(tmp_path: Path) -> None:
    script = f"from tests.dist.test_checkpoint_full_disk import on_a_small_disk; on_a_small_disk({str(tmp_path)!r})"
    command = f'mount -t tmpfs -o size=1m small "{tmp_path}" && exec "{sys.executable}" -c "$SCRIPT"'
    environment = {**os.environ, "SCRIPT": script, "PYTHONPATH": str(ROOT), "DS_LOG_LEVEL": "ERROR"}
    if not shutil.which("unshare") or subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("this user may not mount")
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", command], env=environment, capture_output=True, text=True, timeout=100, cwd=ROOT
    )
    if done.returncode in (1, 32) and "mount" in done.stderr:
        pytest.skip("this user may not mount")
    assert done.stdout == "[]", done.stdout + done.stderr
