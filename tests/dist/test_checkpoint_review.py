"""Guarantees of saving that a review asked for: nobody waits for a rank that has failed, and cost does not grow with
the square.
"""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from deepspeed.checkpoint.format import folders
from deepspeed.checkpoint.save import client_files, writer
from deepspeed.checkpoint.save.writer import join_facts
from deepspeed.errors import CheckpointError
from deepspeed.tier import aio
from tests.dist.test_checkpoint_damage import Net, engine_of, train
from tests.harness.pool import RankPool
from tests.harness.training import make_config, outcome, start

pytestmark = pytest.mark.timeout(120)
ROOT = Path(__file__).resolve().parents[2]
BOTH = (0, 1)


# -- an error of one rank is an error of all ---------------------------------------------------------------------


def save_weights(folder: str, name: str) -> str:
    torch.manual_seed(3)
    zero = {"stage3_gather_16bit_weights_on_model_save": True}
    engine = start(Net(), make_config(3, zero=zero))
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


def save_where_the_first_rank_stumbles(folder: str) -> str:
    engine = engine_of()
    train(engine, 1)
    broken = mock.patch.object(folders, "begin", side_effect=OverflowError("something nobody thought of"))
    with broken if dist.get_rank() == 0 else mock.patch.object(folders, "begin", folders.begin):
        return outcome(lambda: engine.save_checkpoint(folder))


def test_any_error_of_the_first_rank_before_a_save_is_told_to_all(pool2: RankPool, tmp_path: Path) -> None:
    said = pool2.run(save_where_the_first_rank_stumbles, str(tmp_path), time_limit=60)
    assert all("CheckpointError" in text and "nobody thought of" in text for text in said), said


class Refuses:
    """An object that can be pickled on no rank, with an error that is not pickle's."""

    def __reduce__(self) -> Any:
        raise ValueError("not me")


def save_what_one_rank_cannot(folder: str) -> str:
    engine = engine_of(allow_pickle=True)
    train(engine, 1)
    state = {"odd": Refuses()} if dist.get_rank() == 0 else {}
    return outcome(lambda: engine.save_checkpoint(folder, client_state=state))


def test_client_state_that_raises_when_it_is_pickled_is_an_error_on_every_rank(pool2: RankPool, tmp_path: Path) -> None:
    said = pool2.run(save_what_one_rank_cannot, str(tmp_path), time_limit=60)
    assert all("not me" in text for text in said), said


# -- lazy conjugates ---------------------------------------------------------------------------------------------


def resume_with_lazy_buffers(folder: str, background: bool) -> list[str]:  # noqa: FBT001
    """Buffers that torch holds with a conjugate or a negative bit; which of them come back as other values."""
    model = Net()
    model.register_buffer("rotation", torch.tensor([1 + 2j, 3 - 1j]).conj())
    model.register_buffer("negative", torch._neg_view(torch.arange(3.0)))
    assert model.rotation.is_conj() and model.negative.is_neg() and model.negative.is_contiguous()
    engine = start(model, make_config(1, checkpoint={"async": background}))
    wanted = {name: buffer.clone() for name, buffer in model.named_buffers()}
    engine.save_checkpoint(folder)
    model.rotation.zero_()
    engine.load_checkpoint(folder)
    found = dict(model.named_buffers())
    engine.destroy()
    return [name for name, value in wanted.items() if not torch.equal(found[name], value)]


@pytest.mark.parametrize("background", [False, True])
def test_buffers_with_a_conjugate_or_negative_bit_come_back(
    pool1: RankPool, tmp_path: Path, *, background: bool
) -> None:
    assert pool1.run(resume_with_lazy_buffers, str(tmp_path), background) == [[]]


# -- at the end of a process -------------------------------------------------------------------------------------

ENDS_AT_ONCE = """
import sys, torch, deepspeed
from deepspeed.tier import aio
aio.try_load = lambda *_: None
engine = deepspeed.initialize(model=torch.nn.Linear(1024, 1024), config={"train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW"}, "checkpoint": {"async": True, "rate_limit": "16MiB"}})[0]
engine.backward(engine(torch.ones(1, 1024)).sum())
engine.step()
engine.save_checkpoint(sys.argv[1], tag="last")
"""


def test_a_process_that_ends_finishes_its_save_without_native_code_too(tmp_path: Path) -> None:
    alone = {
        k: v
        for k, v in os.environ.items()
        if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    }
    ended = subprocess.run(
        [sys.executable, "-c", ENDS_AT_ONCE, str(tmp_path)],
        cwd=ROOT,
        env=alone,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert folders.is_complete(tmp_path / "last"), ended.stderr


def stall_of_a_failure_elsewhere(folder: str) -> float:
    torch.manual_seed(3)
    config = make_config(2, checkpoint={"async": True, "rate_limit": "256KiB"})
    engine = start(torch.nn.Linear(1024, 1024), config)
    engine.backward(engine(torch.ones(2, 1024)).sum())
    engine.step()
    real = writer.RankFile.write

    def write(file: writer.RankFile, parts: Any, *rest: Any) -> None:
        if file.rank == 1 and threading.current_thread() is not threading.main_thread():
            raise OSError(28, "No space left on device")
        real(file, parts, *rest)

    with mock.patch.object(writer.RankFile, "write", write):
        engine.save_checkpoint(folder)
        time.sleep(0.3)
        begun = time.monotonic()
        with pytest.raises(CheckpointError, match="rank 1"):
            engine.wait_for_checkpoint()
    return time.monotonic() - begun


def test_a_failure_elsewhere_is_not_waited_for_at_the_rate_limit(pool2: RankPool, tmp_path: Path) -> None:
    assert (
        max(pool2.run(stall_of_a_failure_elsewhere, str(tmp_path), time_limit=60)) < 12.0
    )  # at the rate limit about 24
    assert not list(tmp_path.iterdir())


# -- cost ----------------------------------------------------------------------------------------------------------


def reserved_and_written(folder: str) -> tuple[int, int]:
    """Bytes that this rank reserves before it writes, and bytes it writes."""
    torch.manual_seed(3)
    engine = start(torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Linear(512, 64)), make_config(0))
    engine.backward(engine(torch.ones(2, 64)).sum())
    engine.step()
    found = []
    real = writer.ChunkWriter.__init__

    def noting(self: Any, path: Any, **options: Any) -> None:
        found.append(options["expect_bytes"])
        real(self, path, **options)

    with mock.patch.object(writer.ChunkWriter, "__init__", noting):
        engine.save_checkpoint(folder, tag="x")
    return found[0], os.path.getsize(Path(folder, "x", f"rank_{dist.get_rank():05d}.bin"))


def test_a_rank_reserves_no_more_of_the_disk_than_it_writes(pool2: RankPool, tmp_path: Path) -> None:
    """Where every rank holds the whole state, a reservation of all of it by each would find the disk full long before
    it is.
    """
    for reserved, written in pool2.run(reserved_and_written, str(tmp_path), time_limit=60):
        assert reserved <= written


@pytest.mark.skipif(sys.platform != "linux", reason="fallocate is of Linux")
def test_a_reservation_never_writes_where_the_filesystem_cannot_reserve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The C library's posix_fallocate writes a byte into every block there."""
    monkeypatch.setattr(aio.os, "posix_fallocate", mock.Mock(side_effect=AssertionError("written instead")))
    with aio.DirectFile(tmp_path / "data", create=True) as file:
        file.allocate(100_000)
        assert file.size == 100_000


def test_numbers_of_many_parameters_are_joined_in_linear_time() -> None:
    rows = {f"layers.{i}.weight": {"step": {"dtype": "float32", "bytes": "AACAPw=="}} for i in range(40_000)}
    begun = time.process_time()
    joined = join_facts([{"common": common, "rank": {"scalars": dict(rows)}} for common in ({"optimizer": {}}, {})])
    assert [len(row["names"]) for row in joined["optimizer"]["scalars"]] == [40_000]
    assert time.process_time() - begun < 3.0


def test_waiting_for_many_ranks_leaves_the_interpreter_to_training(tmp_path: Path) -> None:
    for rank in range(1000):
        (tmp_path / f"rank_{rank:05d}.bin").touch()
    stop = threading.Event()
    timer = threading.Timer(2.0, stop.set)
    timer.start()
    begun = time.thread_time()
    with pytest.raises(CheckpointError):
        writer.wait_for_ranks(tmp_path, 1000, stop)
    timer.join()
    assert time.thread_time() - begun < 0.5


def test_a_process_that_ends_waits_a_minute_at_most_for_a_rank_that_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (writer._PATIENCE_S, writer._LAST_PATIENCE_S) == (600, 60)
    monkeypatch.setattr(writer, "_LAST_PATIENCE_S", 0.2)
    monkeypatch.setattr(threading.main_thread(), "is_alive", lambda: False)
    with pytest.raises(CheckpointError, match="have written nothing"):
        writer.wait_for_ranks(tmp_path, 2, threading.Event())


def test_stand_ins_of_a_thousand_ranks_take_the_room_of_one(tmp_path: Path) -> None:
    facts = {"world": {"size": 1000}, "engine": {}, "shared": {}}
    client_files.write_client_files(
        tmp_path, {}, facts, client_state={"text": "x" * 100_000}, level=3, whole=False, bf16=True
    )
    files = list(tmp_path.iterdir())
    assert len(files) == 2000
    assert len({p.stat().st_ino for p in files}) == 2
    assert (
        torch.load(tmp_path / "zero_pp_rank_999_mp_rank_00_model_states.pt", weights_only=True)["text"] == "x" * 100_000
    )


# -- names ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tag", ["step\n", " step"])
def test_a_tag_that_latest_cannot_give_back_is_refused(tag: str) -> None:
    with pytest.raises(CheckpointError, match="blanks"):
        folders.check_tag(tag)
