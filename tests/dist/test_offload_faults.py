"""What goes wrong on a drive, no room or a transfer that fails, is a clear error: never a wrong number, a hang, or
something left behind.
"""

import contextlib
import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from deepspeed.comm import collectives
from deepspeed.tier import drive
from deepspeed.tier.aio import TransferError
from deepspeed.tools.verify.models import Case
from tests.harness.offload import (
    CASES,
    Plan,
    Variant,
    check,
    differs_from,
    engine_for,
    file_size_limit,
    open_files,
    train,
    variants,
)
from tests.harness.pool import RankPool
from tests.harness.training import here, outcome, train_step

pytestmark = pytest.mark.timeout(120)


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

    with patch.object(drive.Drive, verb, act):
        yield count


def whole_step(engine: Any) -> None:
    """With the part of its update that goes on behind it."""
    engine.step()
    engine.runtime.update.wait()


def fails_in_the_step(folder: str, way: str, verb: str, *, late: bool) -> list[str]:
    """A transfer fails at some tile of the second step: the step raises, and the engine refuses to go on."""
    case, bad, before = CASES["wide"](), [], open_files()
    for at in (0, 1, 4):
        engine = engine_for(way, folder)
        train_step(engine, case, 0)
        engine.backward(case.seeded_loss(engine, here(1))[0])
        engine.runtime.update.forget_ahead()  # what was read beside the backward is read again
        with failing(verb, at=at, late=late, label="offload_optimizer"):
            said = outcome(lambda engine=engine: whole_step(engine))
        if "TransferError" not in said or "injected" not in said:
            bad.append(f"{verb} {at}: it says {said!r}")
        bad += [f"{verb} {at}: {line}" for line in refuses(engine, case)]
        del engine
    return bad if open_files() == before else [*bad, "descriptors stay open"]


@pytest.mark.parametrize(("verb", "late"), [("write", False), ("read", False), ("read", True)])
@pytest.mark.parametrize("way", ["one buffer", "half nvme"])
def test_a_transfer_that_fails_in_the_step(pool1: RankPool, tmp_path: Path, way: str, verb: str, late: bool) -> None:  # noqa: FBT001
    check(pool1.run(fails_in_the_step, str(tmp_path), way, verb, late=late))


def fails_ahead_of_the_step(folder: str, *, late: bool) -> list[str]:
    """A read beside the backward fails: one that has begun fails the step; one that never began is begun again."""
    case, bad, before = CASES["wide"](), [], open_files()
    wanted = train(Plan(steps=2), variants(folder)["half nvme"])
    for at in (0, 1):
        engine = engine_for("half nvme", folder)
        train_step(engine, case, 0)
        with failing("read", at=at, late=late, label="offload_optimizer") as count:
            engine.backward(case.seeded_loss(engine, here(1))[0])
            ahead = count[0]
            said = outcome(lambda engine=engine: whole_step(engine))
        if ahead <= at:
            bad.append(f"only {ahead} reads beside the backward")
        if late:
            bad += [] if "TransferError" in said and "injected" in said else [f"read {at}: it says {said!r}"]
            bad += [f"read {at}: {line}" for line in refuses(engine, case)]
        else:
            bad += [f"read {at}: it says {said!r}"] if said else []
            bad += differs_from(wanted, engine, f"read {at}: other ")
        outcome(engine.destroy)
        del engine
    return bad if open_files() == before else [*bad, "descriptors stay open"]


@pytest.mark.parametrize("late", [False, True])
def test_a_read_that_fails_beside_the_backward(pool1: RankPool, tmp_path: Path, late: bool) -> None:  # noqa: FBT001
    check(pool1.run(fails_ahead_of_the_step, str(tmp_path), late=late))


def failed_write_is_found_later(folder: str, label: str, from_end: int) -> list[str]:
    """A background write of the step fails: from then on no forward gives a loss, however often one tries."""
    case, bad = CASES["wide"](), []
    engine = engine_for("both nvme", folder)
    train_step(engine, case, 0)
    engine.backward(case.seeded_loss(engine, here(1))[0])
    with failing("write", at=-1, late=True, label=label) as count:
        whole_step(engine)
    engine.backward(case.seeded_loss(engine, here(2))[0])
    with failing("write", at=count[0] - from_end, late=True, label=label, writes_data=False):
        told = [outcome(lambda: whole_step(engine))]
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
    wanted = train(Plan(steps=2), Variant())
    engine = engine_for("grads nvme", folder)
    train_step(engine, case, 0)
    for late in (False, True):
        for at in range(3):
            with failing("read", at=at, late=late, label="offload_param"):
                said = outcome(lambda: case.seeded_loss(engine, here(1)))
            if "injected" not in said:
                bad.append(f"read {at} late={late}: {said!r}")
    train_step(engine, case, 1)
    bad += differs_from(wanted, engine)
    bad += [f"{d.label}: buffers are lost" for d in engine._parts.tiers.drives if d.staging._out]
    engine.destroy()
    return bad


def test_a_read_that_fails_in_a_forward(pool1: RankPool, tmp_path: Path) -> None:
    check(pool1.run(read_fails_in_forward, str(tmp_path)))


def gradient_write_fails(folder: str, *, late: bool) -> list[str]:
    """A gradient cannot be written in the backward: backward or step raise, and the window can be repeated."""
    case, bad = CASES["wide"](), []
    wanted = train(Plan(steps=2), Variant())
    engine = engine_for("grads nvme", folder)
    train_step(engine, case, 0)
    with failing("write", at=0, late=late, label="offload_optimizer"):
        said = outcome(lambda: train_step(engine, case, 1))
    if "injected" not in said:
        bad.append(f"it says {said!r}")
    again = outcome(lambda: train_step(engine, case, 1))
    if not again:
        bad += differs_from(wanted, engine)
    elif "half way" not in again and "injected" not in again:
        bad.append(f"then it says {again!r}")
    said = outcome(engine.destroy)
    return [*bad, f"destroy says {said}"] if said else bad


@pytest.mark.parametrize("late", [False, True])
def test_a_gradient_that_cannot_be_written(pool1: RankPool, tmp_path: Path, late: bool) -> None:  # noqa: FBT001
    check(pool1.run(gradient_write_fails, str(tmp_path), late=late))


def objects_of_a_step(folder: str) -> list[str]:
    """Over which groups the ranks tell each other of a step's tiles."""
    engine, groups = engine_for("both nvme", folder), []
    plain = collectives.gather_objects

    def gather(value: object, group: Any) -> list[Any]:
        groups.append("job" if group is engine.mesh.job else group.backend)
        return plain(value, group)

    train_step(engine, CASES["wide"](), 0)
    with patch.object(collectives, "gather_objects", gather):
        train_step(engine, CASES["wide"](), 1)
    engine.destroy()
    return groups


def test_ranks_tell_of_their_tiles_on_the_host(pool2: RankPool, tmp_path: Path) -> None:
    """On the group of the job two collectives of nccl, each waited for, would carry what is a few bytes mostly."""
    assert pool2.run(objects_of_a_step, str(tmp_path)) == [["gloo"]] * 2


def on_a_drive(folder: str) -> list[str]:
    """Of an engine with its states on a drive: everything has its room before the first step, a tile that cannot be
    read gives its buffer back, and the optimizer's own state is not taken for the whole.
    """
    case, bad = CASES["wide"](), []
    engine = engine_for("tiles", folder)
    (states,) = engine._parts.tiers.drives
    allocated = states._allocated
    for step in range(3):
        train_step(engine, case, step)
    bad += [] if states._allocated == allocated else ["the arena grew while training"]
    engine.runtime.update.wait()
    out = states.staging._out
    with patch.object(states, "read", side_effect=OSError(5, "the drive is gone")):
        for _ in range(6):
            with pytest.raises(OSError, match="gone"), engine.runtime.attached(engine._views[0]):
                pass
    bad += [] if states.staging._out == out else ["buffers are lost"]
    raw, state = engine.optimizer.optimizer, engine.optimizer.state_dict()
    for call in (raw.state_dict, lambda: raw.load_state_dict(state["base_optimizer_state"])):
        said = outcome(call)
        bad += [] if "UsageError" in said and "deepspeed.initialize returned" in said else [said]
    slots = [v for entry in state["base_optimizer_state"]["state"].values() for v in entry.values()]
    bad += ["a slot is not a number"] if any(torch.as_tensor(slot).isnan().any() for slot in slots) else []
    engine.optimizer.load_state_dict(state)
    engine.destroy()
    raw.state_dict()  # free again
    return bad


def test_states_on_a_drive_have_their_room_and_are_read_by_the_engine_alone(pool1: RankPool, tmp_path: Path) -> None:
    check(pool1.run(on_a_drive, str(tmp_path)))


def one_rank_fails_in_the_update(folder: str) -> list[str]:
    case, engine = CASES["wide"](), engine_for("tiles", folder)
    train_step(engine, case, 0)
    fails = {"side_effect": OSError(5, "the drive is gone")} if dist.get_rank() == 1 else {}
    (states,), update = engine._parts.tiers.drives, engine.runtime.update
    with patch.object(states, "write", **fails) if fails else contextlib.nullcontext():
        said = [outcome(lambda step=step: (train_step(engine, case, step), update.wait_together())) for step in (1, 2)]
    outcome(engine.destroy)
    return said


def test_an_update_that_fails_on_one_rank_fails_on_all(pool2: RankPool, tmp_path: Path) -> None:
    for first, second in pool2.run(one_rank_fails_in_the_update, str(tmp_path), time_limit=60):
        assert "the drive is gone" in first and "half way" in second, (first, second)
