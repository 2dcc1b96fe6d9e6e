"""A background save of what rests on a drive copies nothing first: updates wait until it has read what they would
overwrite.
"""

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepspeed.checkpoint.format import folders
from deepspeed.checkpoint.format.files import ChunkWriter
from deepspeed.checkpoint.load.reader import find_and_open, read_manifest
from deepspeed.checkpoint.load.source import whole
from deepspeed.checkpoint.save.content import Content, Copies
from deepspeed.checkpoint.save.writer import RankFile, SaveOrder, Saver
from deepspeed.tier.aio import TransferError
from deepspeed.tier.drive import Held
from deepspeed.zero.regions import Span
from tests.dist.test_checkpoint_damage import IN_FEATURES, train
from tests.harness.offload import gradients_on_drive
from tests.harness.pool import RankPool
from tests.harness.training import make_config, outcome, start

HIDDEN = 24


class Net(nn.Module):
    """Repeated blocks, a frozen one among them, sizes that divide by nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(IN_FEATURES, HIDDEN)
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.frozen = nn.Linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, 5, bias=False)
        self.frozen.requires_grad_(requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(self.frozen(x))


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None] = {
    "AdamW": None,
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
}


def engine_of(drive: str, *, optimizer: str = "AdamW", steps: int = 1, **checkpoint: Any) -> Any:
    torch.manual_seed(7)
    away = {"device": "nvme", "nvme_path": drive}
    zero = {"offload_optimizer": away, "offload_param": {**away, "max_in_cpu": 0}, "sub_group_size": 300}
    build = OPTIMIZERS[optimizer]
    model = Net().train()
    client = {} if build is None else {"optimizer": build([p for p in model.parameters() if p.requires_grad])}
    changes = {"optimizer": None} if client else {}
    config = make_config(3, zero=zero, gradient_accumulation_steps=steps, checkpoint=checkpoint, **changes)
    return start(model, config, **client)


@contextlib.contextmanager
def slow_reader(during: Callable[[], None] = lambda: None) -> Iterator[threading.Event]:
    """Reads of held states wait for the event; ``during`` is called when a writer has to wait."""
    gate, read, wait = threading.Event(), Held.read, Held.wait

    def late_read(self: Held, start: int, out: Tensor) -> None:
        assert gate.wait(60)
        read(self, start, out)

    def noted_wait(self: Held, seconds: float) -> bool:
        if not self._released.is_set():
            during()
        return wait(self, seconds)

    with mock.patch.object(Held, "read", late_read), mock.patch.object(Held, "wait", noted_wait):
        try:
            yield gate
        finally:
            gate.set()


def checkpoints(folder: str, drive: str, optimizer: str, *, steps: int = 1) -> list[str]:
    """One state saved in the foreground and in the background, where training overtakes the reader."""
    engine, bad = engine_of(drive, optimizer=optimizer, steps=steps, **{"async": False}), []
    before, after = (range(3), range(3, 7)) if steps == 1 else (range(steps + 3), range(steps + 3, 2 * steps + 5))
    for seed in before:
        train(engine, seed)
    engine.save_checkpoint(folder, tag="front")
    engine.destroy()
    engine = engine_of(drive, optimizer=optimizer, steps=steps, **{"async": True})
    for seed in before:
        train(engine, seed)
    waited: list[bool] = []

    def told() -> None:
        waited.append(Path(folder, "behind").exists())
        threading.Timer(0.2, gate.set).start()

    with slow_reader(told) as gate:
        engine.save_checkpoint(folder, tag="behind", save_latest=False)
        if engine._checkpoints.saver._copies._slab.numel() > 24 << 10:  # random generators take about 18 KiB
            bad.append("states of the drive were copied into memory")
        for seed in after:
            train(engine, seed)
    if not waited or any(waited):
        bad.append(f"no update came while the save was reading: {waited}")
    engine.wait_for_checkpoint()
    engine.destroy()
    return bad


@pytest.mark.in_make_test("AdamW")
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_an_update_waits_until_what_it_overwrites_is_saved(pool2: RankPool, tmp_path: Path, optimizer: str) -> None:
    assert pool2.run(checkpoints, str(tmp_path / "ck"), str(tmp_path), optimizer) == [[], []]
    same_tensors(tmp_path / "ck")


def same_tensors(folder: Path, first: str = "front", second: str = "behind") -> None:
    front, behind = find_and_open(folder, first), find_and_open(folder, second)
    states = {key[0] for key in front.entries}
    assert {"master", "param"} < states and any(s.startswith("optim.") for s in states)
    assert front.entries.keys() == behind.entries.keys()
    for key in front.entries:
        assert torch.equal(whole(front, key), whole(behind, key)), key


def windows(folder: str, drive: str) -> list[str]:
    with gradients_on_drive(forced=True):
        return checkpoints(folder, drive, "AdamW", steps=4)


def test_gradients_of_an_open_window_that_rest_on_a_drive_are_saved_as_they_were(
    pool2: RankPool, tmp_path: Path
) -> None:
    assert pool2.run(windows, str(tmp_path / "ck"), str(tmp_path)) == [[], []]
    same_tensors(tmp_path / "ck")
    assert any(state == "grad" for state, _ in find_and_open(tmp_path / "ck", "behind").entries)


def dropped(folder: str, drive: str) -> None:
    """The window is given up right after the call."""
    with gradients_on_drive(forced=True):
        engine = engine_of(drive, steps=4, **{"async": True})
    for seed in range(6):
        train(engine, seed)
    with slow_reader() as gate:
        engine.save_checkpoint(folder, tag="a")
        engine.optimizer.zero_grad()
        gate.set()
        engine.destroy()


def test_gradients_that_are_dropped_after_the_call_are_saved_and_before_what_updates_write(
    pool2: RankPool, tmp_path: Path
) -> None:
    pool2.run(dropped, str(tmp_path / "ck"), str(tmp_path))
    entries = read_manifest(tmp_path / "ck" / "a").entries
    assert {n for s, n in entries if s == "grad"} == {n for s, n in entries if s == "master"}
    places = [(box.file, box.offset, state) for (state, _), entry in entries.items() for box in entry.boxes]
    for rank in {file for file, _, _ in places}:
        last = max(offset for file, offset, state in places if (file, state) == (rank, "grad"))
        assert last < min(offset for file, offset, state in places if (file, state) == (rank, "master"))


def rates(folder: str, drive: str) -> tuple[list[int], bool]:
    engine, found = engine_of(drive, rate_limit=1 << 20, **{"async": True}), list[int]()
    train(engine, 0)
    set_limit = RankFile.limit

    def limit(self: RankFile, rate_bytes: int) -> None:
        found.append(rate_bytes)
        set_limit(self, rate_bytes)

    with (
        mock.patch.object(RankFile, "limit", limit),
        slow_reader(lambda: threading.Timer(0.1, gate.set).start()) as gate,
    ):
        engine.save_checkpoint(folder, tag="a")
        begun = list(found)
        train(engine, 1)
        hurried = found[len(begun) :]
    engine.destroy()
    return begun, bool(hurried) and not any(hurried)


def test_a_rate_limit_ends_when_an_update_waits_for_it(pool2: RankPool, tmp_path: Path) -> None:
    assert pool2.run(rates, str(tmp_path / "ck"), str(tmp_path)) == [([1 << 20], True)] * 2


def failing_read(folder: str, drive: str) -> list[str]:
    engine, bad = engine_of(drive, **{"async": True}), []
    train(engine, 0)
    engine.save_checkpoint(folder, tag="a")
    engine.wait_for_checkpoint()

    def broken(self: Held, start: int, out: Tensor) -> None:
        raise TransferError(5, "reading: Input/output error")

    with mock.patch.object(Held, "read", broken) if dist.get_rank() == 1 else contextlib.nullcontext():
        engine.save_checkpoint(folder, tag="b")
        told = ""
        for seed in range(1500):
            if told := outcome(lambda seed=seed: train(engine, seed)):  # never waits for a reader that has failed
                break
            time.sleep(0.02)
    if not all(word in told for word in ("CheckpointError", "checkpoint b failed", "rank 1", "Input/output error")):
        bad.append(f"said: {told!r}")
    train(engine, 5)
    engine.save_checkpoint(folder, tag="c")
    engine.wait_for_checkpoint()
    engine.destroy()
    return bad


def test_a_state_that_cannot_be_read_fails_the_save_on_every_rank_and_training_goes_on(
    pool2: RankPool, tmp_path: Path
) -> None:
    assert pool2.run(failing_read, str(tmp_path / "ck"), str(tmp_path)) == [[], []]
    assert sorted(p.name for p in folders.complete_tags(tmp_path / "ck")) == ["a", "c"]


def full_disk(folder: str, drive: str, background: bool) -> list[str]:  # noqa: FBT001
    engine = engine_of(drive, **{"async": background})
    train(engine, 0)
    append, calls = ChunkWriter.append, itertools.count()

    def full(self: ChunkWriter, values: Tensor, span: Span) -> None:
        if next(calls) == 3:
            raise OSError(28, "No space left on device")
        append(self, values, span)

    with mock.patch.object(ChunkWriter, "append", full) if dist.get_rank() == 1 else contextlib.nullcontext():
        told = outcome(lambda: (engine.save_checkpoint(folder, tag="a"), engine.wait_for_checkpoint()))
    for seed in (1, 2):
        train(engine, seed)  # would wait for ever for a reader that stands still
    engine.destroy()
    return [] if "CheckpointError" in told and "No space left" in told else [f"said {told!r}"]


@pytest.mark.in_make_test("True")
@pytest.mark.parametrize("background", [False, True])
def test_training_goes_on_after_a_save_that_failed_half_way_through_a_drive(
    pool2: RankPool, tmp_path: Path, *, background: bool
) -> None:
    assert pool2.run(full_disk, str(tmp_path / "ck"), str(tmp_path), background) == [[], []]


def stopped(folder: str, drive: str) -> list[str]:
    """A save that one rank refuses, and one that is interrupted on both."""
    engine, bad = engine_of(drive, **{"async": True}), []
    train(engine, 0)

    def interrupt(*_: object) -> None:
        dist.barrier()  # each has opened its files: the first rank that cleans up takes the folder away
        raise KeyboardInterrupt

    refuses = mock.patch.object(Copies, "take", side_effect=MemoryError("no memory"))
    with refuses if dist.get_rank() == 1 else contextlib.nullcontext():
        told = outcome(lambda: engine.save_checkpoint(folder, tag="a"))
        bad += [] if "no memory" in told else [f"said {told!r}"]
    dist.barrier()
    bad += [f"left by the refusal: {p}" for p in Path(folder).iterdir()]
    train(engine, 1)  # would wait for ever if something were still held
    with mock.patch.object(Copies, "take", side_effect=interrupt), pytest.raises(KeyboardInterrupt):
        engine.save_checkpoint(folder, tag="a")
    dist.barrier()
    bad += [f"left: {p}" for p in Path(folder).iterdir()]
    train(engine, 2)
    engine.save_checkpoint(folder, tag="b")
    engine.destroy()
    return bad


def test_a_save_that_is_refused_or_interrupted_holds_nothing(pool2: RankPool, tmp_path: Path) -> None:
    assert pool2.run(stopped, str(tmp_path / "ck"), str(tmp_path)) == [[], []]
    assert [p.name for p in folders.complete_tags(tmp_path / "ck")] == ["b"]


def without_thread(folder: str, drive: str) -> None:
    engine = engine_of(drive, **{"async": False})
    train(engine, 0)
    engine.save_checkpoint(folder, tag="front")
    engine.destroy()
    engine = engine_of(drive, **{"async": True})
    train(engine, 0)
    refused = mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread"))
    with refused if dist.get_rank() == 1 else contextlib.nullcontext():
        engine.save_checkpoint(folder, tag="behind")
    train(engine, 1)
    engine.wait_for_checkpoint()
    engine.destroy()


def test_a_rank_that_can_start_no_thread_saves_at_once(pool2: RankPool, tmp_path: Path) -> None:
    pool2.run(without_thread, str(tmp_path / "ck"), str(tmp_path))
    same_tensors(tmp_path / "ck")


def read_too_late(folder: str, drive: str) -> list[str]:
    """What is held is let go of while it is still being read, as an interrupt might do."""
    engine = engine_of(drive, **{"async": True})
    train(engine, 0)
    content: list[Content] = []
    save = Saver.save

    def noted(self: Saver, order: SaveOrder, what: Content, **options: Any) -> None:
        content.append(what)
        save(self, order, what, **options)

    with mock.patch.object(Saver, "save", noted), slow_reader() as gate:
        engine.save_checkpoint(folder, tag="a")
        content[0].release()
        train(engine, 1)
        gate.set()
    told = outcome(engine.wait_for_checkpoint)
    engine.destroy()
    return [] if "CheckpointError" in told and "let go of it" in told else [f"said {told!r}"]


def test_values_of_another_moment_are_never_saved(pool2: RankPool, tmp_path: Path) -> None:
    assert pool2.run(read_too_late, str(tmp_path / "ck"), str(tmp_path)) == [[], []]
    assert not folders.complete_tags(tmp_path / "ck")


def back_to_the_start(folder: str, drive: str, optimizer: str, background: bool) -> None:  # noqa: FBT001
    engine = engine_of(drive, optimizer=optimizer, **{"async": background})
    engine.save_checkpoint(folder, tag="start")
    for tag in ("front", "behind"):
        for seed in range(3):
            train(engine, seed)
        engine.save_checkpoint(folder, tag=tag)
        engine.load_checkpoint(folder, tag="start")
        engine.save_checkpoint(folder, tag=f"start after {tag}")
    engine.basic_optimizer.state.clear()  # as users begin anew with other data
    for seed in range(3):
        train(engine, seed)
    engine.save_checkpoint(folder, tag="cleared")
    engine.destroy()


@pytest.mark.in_make_test("AdamW-False", "Adafactor-False")
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_state_on_a_drive_goes_with_a_checkpoint_that_has_none(
    pool2: RankPool, tmp_path: Path, optimizer: str, *, background: bool
) -> None:
    pool2.run(back_to_the_start, str(tmp_path / "ck"), str(tmp_path), optimizer, background)
    same_tensors(tmp_path / "ck")
    same_tensors(tmp_path / "ck", "front", "cleared")
    for tag in ("start after front", "start after behind"):
        assert not any(state.startswith("optim.") for state, _ in find_and_open(tmp_path / "ck", tag).entries)
