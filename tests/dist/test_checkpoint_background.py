"""A background save holds the state of its call, whatever training does meanwhile, and ends whole or not at all."""

import os
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from deepspeed.accelerator.device import Accelerator
from deepspeed.checkpoint.format import files, folders
from deepspeed.checkpoint.load.reader import find_and_open, open_checkpoint
from deepspeed.checkpoint.load.source import whole
from deepspeed.checkpoint.save import writer
from deepspeed.checkpoint.save.content import Content
from deepspeed.checkpoint.save.writer import Background, RankFile, SaveOrder, Saver
from deepspeed.comm.init import free_port
from deepspeed.errors import CheckpointError
from deepspeed.tools.verify.ranks import enter_world, rank_context
from deepspeed.zero.regions import Span
from tests.dist.test_checkpoint_damage import Net, same, state, train
from tests.dist.test_checkpoint_full_disk import held
from tests.harness.plain_optim import PlainOptimizer
from tests.harness.pool import RankPool
from tests.harness.training import make_config, start
from tests.harness.warm import Warm

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20


def engine_of(stage: int, *, seed: int = 3, **checkpoint: Any) -> Any:
    torch.manual_seed(seed)
    return start(Net().train(), make_config(stage, checkpoint={"async": True, **checkpoint}))


# -- the state of the call ---------------------------------------------------------------------------------------


def change_everything(engine: Any, client_state: dict[str, Any]) -> None:
    """What training, and a careless user, may do right after the call."""
    with torch.no_grad():
        for buffer in engine.module.buffers():
            buffer.add_(1)
        for view in (p for group in engine.basic_optimizer.param_groups for p in group["params"]):
            view.add_(1)
            for value in engine.basic_optimizer.state.get(view, {}).values():
                if isinstance(value, torch.Tensor):
                    value.add_(1)
    engine.basic_optimizer.param_groups[0]["lr"] = 123.0
    client_state["tensor"].add_(1)
    client_state["list"].append(4)
    client_state["new"] = 1
    torch.rand(3)


def save_and_change(folder: str, stage: int) -> list[str]:
    engine, bad = engine_of(stage), []
    train(engine, 1)
    saved = state(engine)
    client_state = {"tensor": torch.arange(5), "list": [1, 2, 3]}
    with held() as gate:
        engine.save_checkpoint(folder, tag="now", client_state=client_state)
        change_everything(engine, client_state)
        for seed in (2, 3):
            train(engine, seed)  # nothing waits for the writer
        if Path(folder, "now").exists():
            bad.append("it did not happen in the background")
        gate.set()
        engine.wait_for_checkpoint()
    engine.destroy()
    other = engine_of(stage, seed=4)
    _, told = other.load_checkpoint(folder)
    if not same(saved, state(other)):
        bad.append("it is not the state of the call")
    stub = torch.load(next(Path(folder, "now").glob("*_model_states.pt")), weights_only=True)
    for where, client in (("checkpoint", told), ("files for other programs", stub)):
        if client["list"] != [1, 2, 3] or not torch.equal(client["tensor"], torch.arange(5)) or "new" in client:
            bad.append(f"the client state in the {where} is not that of the call: {client}")
    if other.global_steps != 1 or other.basic_optimizer.param_groups[0]["lr"] == 123.0:
        bad.append("the numbers are not those of the call")
    other.destroy()
    return bad


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_the_saved_state_is_that_of_the_call(pool2: RankPool, tmp_path: Path, stage: int) -> None:
    """States that rest on a drive: test_checkpoint_held.py."""
    assert pool2.run(save_and_change, str(tmp_path), stage) == [[], []]


class Turned(PlainOptimizer):
    """State with gaps: as factorizations return it, column by column."""

    defaults_of = {"lr": 1e-2}

    def update(self, p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["turned"] = g.reshape(g.shape[0], -1).t().clone(memory_format=torch.preserve_format).t()[:, ::2]
        p.sub_(group["lr"] * g)


def save_with_gaps(folder: str, behind: bool) -> list[str]:
    torch.manual_seed(3)
    model = Net().train()
    config = make_config(1, optimizer=None, zero_allow_untested_optimizer=True, checkpoint={"async": behind})
    engine, bad = start(model, config, optimizer=Turned(model.parameters())), []
    train(engine, 1)
    kept, content, save = list[int](), list[Content](), Saver.save

    def noted(self: Saver, order: SaveOrder, what: Content, **options: Any) -> None:
        content.append(what)
        kept.extend(p.values.untyped_storage().data_ptr() for p in what.parts if p.state == "optim.turned")
        save(self, order, what, **options)

    with mock.patch.object(Saver, "save", noted), held() as gate:
        gate.set() if not behind else None
        engine.save_checkpoint(folder, tag="t")
        if behind and content[0].parts:
            bad.append("what was copied is kept in memory until the save ends")
        gate.set()
        engine.wait_for_checkpoint()
    slots = {v.name: engine.basic_optimizer.state[v.param]["turned"] for v in engine._views if v.param.numel()}
    if not kept or not {*kept} <= {slot.untyped_storage().data_ptr() for slot in slots.values()}:
        bad.append("slots were copied before their turn")
    source = find_and_open(Path(folder))
    if not all(torch.equal(whole(source, ("optim.turned", name)), slot) for name, slot in slots.items()):
        bad.append("other values were saved")
    engine.destroy()
    return bad


@pytest.mark.parametrize("behind", [False, True])
def test_slots_with_gaps_are_saved_one_by_one_and_nothing_copied_is_kept(
    pool2: RankPool, tmp_path: Path, behind: bool
) -> None:
    assert pool2.run(save_with_gaps, str(tmp_path), behind) == [[], []]


# -- one after the other -----------------------------------------------------------------------------------------


def two_saves(folder: str) -> list[str]:
    """What happened, in order, on this rank."""
    events: list[str] = []
    engine = engine_of(2)

    begin, finish, close = Saver._begin, Saver._finish, RankFile.close

    def begins(self: Saver, order: SaveOrder, content: Content) -> Any:
        events.append(f"{order.tag} begins")
        return begin(self, order, content)

    def finishes(self: Saver, folder: Path, order: SaveOrder, *rest: Any) -> None:
        finish(self, folder, order, *rest)
        events.append(f"{order.tag} ends")

    def closes(file: RankFile) -> None:
        time.sleep(0.3)
        close(file)

    with mock.patch.multiple(Saver, _begin=begins, _finish=finishes), mock.patch.object(RankFile, "close", closes):
        for tag in ("a", "b"):
            engine.save_checkpoint(folder, tag=tag)
        engine.wait_for_checkpoint()
    engine.destroy()
    return events


def test_a_second_save_begins_when_the_first_has_ended(pool2: RankPool, tmp_path: Path) -> None:
    wanted = [f"{tag} {what}" for tag in ("a", "b") for what in ("begins", "ends")]
    assert pool2.run(two_saves, str(tmp_path)) == [wanted, wanted]
    assert (tmp_path / "latest").read_text() == "b"
    assert sorted(p.name for p in folders.complete_tags(tmp_path)) == ["a", "b"]


# -- a bounded rate ----------------------------------------------------------------------------------------------


def test_the_rate_is_kept(tmp_path: Path) -> None:
    """On a clock that only sleeping moves: 24 MiB at 4 MiB a second, the first stage at once."""
    clock, naps = [0.0], list[float]()

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        clock[0] += seconds

    fake = SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep)
    with mock.patch.object(files, "time", fake), files.ChunkWriter(tmp_path / "x", rate_bytes=4 * MIB) as writer:
        for _ in range(6):
            writer.append(torch.zeros(4 * MIB, dtype=torch.uint8), Span(0, 4 * MIB))
    assert 4.5 <= clock[0] <= 6.5 and len(naps) >= 40 and max(naps) <= 0.11


def limits_of_a_save(folder: str, background: bool) -> list[int]:  # noqa: FBT001
    found: list[int] = []
    with mock.patch.object(RankFile, "limit", lambda self, rate: found.append(rate)):
        engine = engine_of(1, rate_limit=MIB, **{"async": background})
        engine.save_checkpoint(folder)
        engine.destroy()
    return found


def test_the_configured_rate_holds_in_the_background_only(pool2: RankPool, tmp_path: Path) -> None:
    for first, *later in pool2.run(limits_of_a_save, str(tmp_path), True):
        assert first == MIB and not any(later)  # lifted when somebody waits
    assert pool2.run(limits_of_a_save, str(tmp_path), False) == [[], []]


def test_the_thread_of_a_save_works_on_the_device_of_its_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A new thread stands on the first device, and would lock memory and wait there."""
    chosen: list[tuple[int, str]] = []
    monkeypatch.setattr(Accelerator, "current_device", lambda _: 3)
    monkeypatch.setattr(
        Accelerator, "set_device", lambda _, index: chosen.append((index, threading.current_thread().name))
    )
    save = Background("t", tmp_path, [lambda _: chosen.append((-1, ""))], lambda: None)
    save.wait()
    assert chosen == [(3, "checkpoint-t"), (-1, "")] and save.error is None


# -- the end of the process --------------------------------------------------------------------------------------


def save_both(folder: str) -> None:
    """What ``save_twice`` saves, in the foreground and undisturbed."""
    engine = engine_of(1, **{"async": False})
    for seed, tag in enumerate(("a", "b")):
        train(engine, seed)
        engine.save_checkpoint(folder, tag=tag)
    engine.destroy()


def differing(path: Path, wanted: Path) -> list[str]:
    """Tensors that two checkpoints do not both hold with the same values; what is of the process, as its time, is left
    out.
    """
    ours, theirs = (open_checkpoint(folder) for folder in (path, wanted))
    keys = [key for key in {**ours.entries, **theirs.entries} if key[0] != "plain"]
    assert len(keys) > 20
    both = [key for key in keys if key in ours.entries and key in theirs.entries]
    return [f"{key}" for key in keys if key not in both or not torch.equal(whole(ours, key), whole(theirs, key))]


def save_twice(folder: str, *, seconds: float) -> None:
    """One whole checkpoint, then a second that takes a while, in this process of one rank."""
    engine = engine_of(1)
    train(engine, 0)
    engine.save_checkpoint(folder, tag="a")
    engine.wait_for_checkpoint()
    close = RankFile.close

    def closes(file: RankFile) -> None:
        time.sleep(seconds)
        close(file)

    RankFile.close = closes  # type: ignore[method-assign]
    train(engine, 1)
    engine.save_checkpoint(folder, tag="b")


_ENDS = """
import os, sys
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[2])
from deepspeed.tier import aio
from tests.dist.test_checkpoint_background import save_twice
if sys.argv[3:]:
    aio.try_load = lambda *_: None
save_twice(sys.argv[1], seconds=1.0)
raise SystemExit(3)
"""


@pytest.fixture(scope="module")
def wanted(pool1: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wanted")
    pool1.run(save_both, str(folder))
    return folder


@pytest.mark.parametrize("without", [[], ["native code"]], ids=["native", "python"])
def test_a_process_that_ends_right_after_the_call_still_finishes_its_save(
    tmp_path: Path, wanted: Path, warm: Warm, without: list[str]
) -> None:
    command = [warm.python, "-c", _ENDS, str(tmp_path), str(free_port()), *without]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=100, cwd=ROOT
    )
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr and (tmp_path / "latest").read_text() == "b"
    assert differing(find_and_open(tmp_path).path, wanted / "b") == []
    assert differing(tmp_path / "a", wanted / "a") == []


def wait_for_the_signal(folder: str, seconds: float) -> None:
    """A rank of its own, in the middle of a background save."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # ranks of a pool do not hear interrupts
    with tempfile.TemporaryDirectory() as meeting:
        enter_world(0, 1, meeting, free_port())
        save_twice(folder, seconds=seconds)
        Path(folder, "ready").touch()
        time.sleep(60)


@pytest.mark.parametrize(
    ("number", "takes", "latest"),
    [(signal.SIGTERM, 30.0, "a"), (signal.SIGINT, 1.0, "b")],
    ids=["terminated", "interrupted"],
)
def test_a_signal_during_a_background_save_leaves_a_whole_checkpoint(
    tmp_path: Path, wanted: Path, number: signal.Signals, takes: float, latest: str
) -> None:
    """An interrupt ends Python in order, so the save is finished; the other ends it at once, as a kill does, and the
    checkpoint before stays the newest.
    """
    context: Any = rank_context()
    process = context.Process(target=wait_for_the_signal, args=(str(tmp_path), takes), daemon=True)
    process.start()
    try:
        end = time.monotonic() + 80
        while not (tmp_path / "ready").exists() and time.monotonic() < end:
            time.sleep(0.02)
        os.kill(process.pid, number)
        process.join(40)
        assert process.exitcode is not None and process.exitcode != 0
    finally:
        process.kill()
        process.join()
    assert differing(find_and_open(tmp_path).path, wanted / latest) == []
    if latest == "a":
        left = folders.left_behind(tmp_path)
        folders.begin(tmp_path, "c")
        assert len(left) == 1 and not left[0].exists()


def fails_elsewhere(folder: str) -> None:
    torch.manual_seed(3)
    config = make_config(2, checkpoint={"async": True, "rate_limit": "16KiB"})
    engine = start(torch.nn.Linear(1024, 1024), config)
    engine.backward(engine(torch.ones(2, 1024)).sum())
    engine.step()
    real = RankFile.write

    def write(file: RankFile, parts: Any, *rest: Any) -> None:
        if file.rank == 1 and threading.current_thread() is not threading.main_thread():
            raise OSError(28, "No space left on device")
        real(file, parts, *rest)

    with mock.patch.object(RankFile, "write", write):
        engine.save_checkpoint(folder)
        time.sleep(0.3)
        with pytest.raises(CheckpointError, match="rank 1"):
            engine.wait_for_checkpoint()


def test_a_failure_elsewhere_is_not_waited_for_at_the_rate_limit(pool2: RankPool, tmp_path: Path) -> None:
    pool2.run(fails_elsewhere, str(tmp_path), time_limit=60)  # at the rate limit a save takes more than six minutes
    assert not list(tmp_path.iterdir())


def save_and_move_away(folder: str) -> list[str]:
    """A relative save_dir means the working directory of the call."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        engine = engine_of(1)
        with held() as gate:
            engine.save_checkpoint("ck", tag="a")
            os.chdir("/")
            gate.set()
            engine.destroy()
        return sorted(os.listdir(folder))
    finally:
        os.chdir(before)


def test_a_background_save_does_not_follow_the_process_into_another_folder(pool2: RankPool, tmp_path: Path) -> None:
    assert pool2.run(save_and_move_away, str(tmp_path)) == [["ck"], ["ck"]]
    assert (tmp_path / "ck" / "latest").read_text() == "a"


_FAILS_UNHEARD = """
import atexit, sys, deepspeed, torch
from unittest import mock
from deepspeed.checkpoint.format import folders
atexit.register(print, "other handlers run")
adamw = {"type": "AdamW", "params": {"lr": 0.1}}
config = {"train_batch_size": 2, "optimizer": adamw, "checkpoint": {"async": True}}
engine, *_ = deepspeed.initialize(model=torch.nn.Linear(2, 2), config=config)
with mock.patch.object(folders, "publish", side_effect=OSError(28, "No space left on device")):
    engine.save_checkpoint(sys.argv[1])
    engine._checkpoints.saver._running.wait(None)
"""


def test_a_process_that_never_heard_of_a_failed_save_does_not_end_with_status_zero(tmp_path: Path, warm: Warm) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # one rank, without a launcher
    env = {**{k: v for k, v in os.environ.items() if k not in names}, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}
    command = [warm.python, "-c", _FAILS_UNHEARD, str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert done.returncode == 1, done.stderr[-2000:]
    assert "other handlers run" in done.stdout and "was not saved" in done.stdout + done.stderr


def reserved_and_written(folder: str) -> tuple[int, int]:
    """Bytes that this rank reserves before it writes, and bytes it writes."""
    torch.manual_seed(3)
    engine = start(torch.nn.Linear(64, 512), make_config(0))
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
