"""Faults that a review of the tiers found, each by the guarantee that it broke."""

import copy
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.errors import UsageError
from deepspeed.monitor import hostmem
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.optim import host
from deepspeed.tier.drive import Drive
from deepspeed.tools.verify.models import case_named
from deepspeed.zero.update.partial import Turns
from tests.harness.logs import logged
from tests.harness.pool import RankPool
from tests.harness.training import make_config, start, train_step

pytestmark = pytest.mark.timeout(120)


def _drive(folder: str, **changes: Any) -> dict[str, Any]:
    return make_config(
        3, zero={"offload_optimizer": {"device": "nvme", "nvme_path": folder}, "sub_group_size": 4096}, **changes
    )


@pytest.mark.parametrize("cls", [FusedAdam, DeepSpeedCPUAdam])
def test_a_native_step_is_seen_by_autograd(cls: type[torch.optim.Optimizer]) -> None:
    weight = nn.Parameter(torch.ones(8))
    optimizer = cls([weight], lr=0.1)
    loss = (weight * weight).sum()
    weight.grad = torch.ones(8)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_one_pool_of_threads_serves_all_sizes() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        for pieces in (2, 3, 4):
            values = [torch.rand(pieces * host._GRAIN) for _ in range(4)]
            host.adam_step(*values, step=1, lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0)
        names = {t.name.rsplit("_", 1)[0] for t in threading.enumerate() if t.name.startswith("deepspeed-4-threads")}
        assert len(names) == 1
    finally:
        torch.set_num_threads(before)


class Counting(torch.optim.Optimizer):
    """Plain descent whose rate falls with a count of steps that it keeps in a dict, in a list, or under a key of its
    own in the state.
    """

    elementwise = True

    def __init__(self, params: Any, place: str) -> None:
        super().__init__(params, {"lr": 0.1})
        self.place, self.counts, self.short = place, {"steps": 0}, [0]

    def _count(self) -> int:
        if self.place == "dict":
            self.counts["steps"] += 1
            return self.counts["steps"]
        if self.place == "list":
            self.short[0] += 1
            return self.short[0]
        if "everything" not in self.state:
            self.state["everything"] = {"steps": 0}
        self.state["everything"]["steps"] += 1
        return int(self.state["everything"]["steps"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        count = self._count()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(param.grad, alpha=-group["lr"] / count)


def _counted(place: str) -> list[str]:
    case, outcomes = case_named("plain"), []
    with tempfile.TemporaryDirectory() as folder:
        for config in (make_config(3, optimizer=None), _drive(folder, optimizer=None)):
            engine = start(case.build(), config, optimizer=lambda params: Counting(params, place))
            outcomes.append([train_step(engine, case, step) for step in range(4)])
            engine.destroy()
    return [] if outcomes[0] == outcomes[1] else [f"{outcomes}"]


@pytest.mark.parametrize("place", ["dict", "list", "state"])
def test_a_count_goes_up_once_a_step_wherever_it_is_kept(place: str, pool1: RankPool) -> None:
    assert pool1.run(_counted, place) == [[]]


@pytest.mark.parametrize(
    "first, second",
    [
        (lambda: torch.tensor([float("nan"), 1.0]), lambda: torch.tensor([float("nan"), 1.0])),
        (lambda: 1, lambda: 1.0),
        (lambda: torch.ones(1, requires_grad=True) * 2, lambda: torch.ones(1, requires_grad=True) * 2),
    ],
    ids=["not a number", "a count that becomes a float", "with a graph"],
)
def test_what_is_equal_after_every_turn_is_no_fault(first: Any, second: Any) -> None:
    optimizer: Any = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    optimizer.kept = 0
    turns, values = Turns(optimizer), iter([first, second])
    optimizer.step = lambda: setattr(optimizer, "kept", next(values)())
    turns.take([])
    turns.take([])


@pytest.mark.parametrize("second", [torch.zeros(3), torch.ones(2), 0.0], ids=["shape", "values", "no tensor"])
def test_what_differs_between_turns_is_said(second: Any) -> None:
    optimizer: Any = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    optimizer.kept = 0
    turns, values = Turns(optimizer), iter([torch.zeros(2), second])
    optimizer.step = lambda: setattr(optimizer, "kept", next(values))
    turns.take([])
    with pytest.raises(UsageError, match="keeps kept of the optimizer"):
        turns.take([])


class Watched(dict[Any, Any]):
    """Counts the keys that anybody walks over."""

    walked = 0

    def __iter__(self) -> Iterator[Any]:
        return self._counted(super().__iter__())

    def __reversed__(self) -> Iterator[Any]:
        return self._counted(super().__reversed__())

    def items(self) -> Any:
        return [(key, self[key]) for key in self]

    def _counted(self, keys: Iterator[Any]) -> Iterator[Any]:
        for key in keys:
            self.walked += 1
            yield key


def test_a_step_in_turns_walks_over_the_state_of_all_tiles_once() -> None:
    """It was three times for every tile: seconds a step with thousands of them."""
    tiles = [nn.Parameter(torch.ones(1)) for _ in range(100)]
    optimizer: Any = torch.optim.SGD(tiles, lr=0.1)
    optimizer.state = state = Watched()
    turns = Turns(optimizer)
    for tile in tiles:
        optimizer.step = lambda tile=tile: state.__setitem__(tile, {})
        turns.take([])
    assert len(state) == 100 and state.walked <= 100


def test_a_count_in_the_state_that_the_first_turn_makes_is_made_by_every_turn() -> None:
    optimizer: Any = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    turns = Turns(optimizer)
    optimizer.step = lambda: optimizer.state.update(count=optimizer.state.get("count", 0) + 1)
    turns.take([])
    turns.take([])
    assert optimizer.state["count"] == 1


def test_a_count_in_the_state_that_only_a_later_turn_makes_is_said() -> None:
    optimizer: Any = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    turns, steps = Turns(optimizer), iter([lambda: None, lambda: optimizer.state.update(count=1)])
    optimizer.step = lambda: next(steps)()
    turns.take([])
    with pytest.raises(UsageError, match="keeps count of its state"):
        turns.take([])


class Configured(torch.optim.SGD):
    """Reads settings two dicts deep in every step."""

    elementwise = True

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.cfg = {"a": {"x": 1}}

    def step(self, closure: Any = None) -> Any:
        assert self.cfg["a"]["x"] == 1
        return super().step(closure)


def _settings_stay(muon: bool) -> list[str]:
    case = case_named("plain")
    with tempfile.TemporaryDirectory() as folder:
        if muon:
            config = _drive(folder, optimizer={"type": "Muon", "params": {"lr": 0.01}})
            config["zero_optimization"]["stage"] = 2
            engine = start(case.build(), config)
        else:
            engine = start(case.build(), _drive(folder, optimizer=None), optimizer=Configured)
        inner = engine.optimizer.optimizer
        before = copy.deepcopy(inner._group_keys if muon else inner.cfg)
        for step in range(2):
            train_step(engine, case, step)
        after = inner._group_keys if muon else inner.cfg
        engine.destroy()
    return [] if before == after and before else [f"{before}, then {after}"]


@pytest.mark.parametrize("muon", [False, True], ids=["nested", "muon"])
def test_settings_of_an_optimizer_on_a_drive_stay(pool1: RankPool, muon: bool) -> None:
    assert pool1.run(_settings_stay, muon) == [[]]


def _raw_state() -> list[str]:
    problems, case = [], case_named("plain")
    with tempfile.TemporaryDirectory() as folder:
        engine = start(case.build(), _drive(folder))
        train_step(engine, case, 0)
        raw = engine.optimizer.optimizer
        for call in (
            raw.state_dict,
            lambda: raw.load_state_dict(engine.optimizer.state_dict()["base_optimizer_state"]),
        ):
            try:
                call()
                problems.append("the optimizer's own state is taken for the whole")
            except UsageError as error:
                problems += [] if "deepspeed.initialize returned" in str(error) else [str(error)]
        state = engine.optimizer.state_dict()
        slots = [
            v
            for entry in state["base_optimizer_state"]["state"].values()
            for v in entry.values()
            if isinstance(v, torch.Tensor)
        ]
        problems += ["a slot is not a number"] if any(s.isnan().any() for s in slots) else []
        engine.optimizer.load_state_dict(state)
        engine.destroy()
        raw.state_dict()  # free again
    return problems


def test_an_optimizer_on_a_drive_does_not_hand_out_empty_state(pool1: RankPool) -> None:
    assert pool1.run(_raw_state) == [[]]


def _reads_fail() -> list[str]:
    """A tile that cannot be read gives its buffer back."""
    case = case_named("plain")
    with tempfile.TemporaryDirectory() as folder:
        engine = start(case.build(), _drive(folder))
        train_step(engine, case, 0)
        (drive,) = engine._parts.tiers.drives
        out, read = drive.staging._out, drive.read
        for _ in range(6):
            drive.read = lambda *_: (_ for _ in ()).throw(OSError(5, "the drive is gone"))
            for view in engine._views[:1]:
                try:
                    with engine.runtime.attached(view):
                        return ["a read that failed went unnoticed"]
                except OSError:
                    pass
        drive.read = read
        left = drive.staging._out - out
        engine.destroy()
    return [f"{left} buffers are lost"] if left else []


def test_a_tile_that_cannot_be_read_loses_no_buffer(pool1: RankPool) -> None:
    assert pool1.run(_reads_fail) == [[]]


def _space_after_birth() -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        drive = Drive(folder, label="x", staging=1)
        regions = [drive.reserve(1 << 20) for _ in range(3)]
        full = os.fstat(drive._file._plain).st_blocks
        for region in regions:
            drive.free(region)
        empty = os.fstat(drive._file._plain).st_blocks
        again = drive.reserve(4096)
        drive.close()
    return [] if full and not empty and again.offset == 0 else [f"{full} blocks, then {empty}, next at {again.offset}"]


def test_a_drive_that_holds_nothing_takes_no_space(pool1: RankPool) -> None:
    assert pool1.run(_space_after_birth) == [[]]


def _lamb() -> list[float]:
    case = case_named("plain")
    with tempfile.TemporaryDirectory() as folder:
        engine = start(case.build(), _drive(folder, optimizer={"type": "Lamb", "params": {"lr": 0.01}}))
        train_step(engine, case, 0)
        count = len(engine.optimizer.optimizer.get_lamb_coeffs())
        expected = sum(1 for v in engine._views)
        engine.destroy()
    return [count, expected]


def test_trust_ratios_of_all_parameters_are_known(pool1: RankPool) -> None:
    ((count, expected),) = pool1.run(_lamb)
    assert count == expected > 1


def _room() -> list[str]:
    """Everything the run will ever need is allocated before the first step, gradients and slots included."""
    problems, case = [], case_named("plain")
    with tempfile.TemporaryDirectory() as folder:
        limit = hostmem.rss_bytes() + (1 << 30)
        engine = start(case.build(), _drive(folder, memory={"host_limit": limit}))
        (drive,) = engine._parts.tiers.drives
        before = drive._allocated
        for step in range(3):
            train_step(engine, case, step)
        if drive._allocated != before:
            problems.append(f"the arena grew from {before} to {drive._allocated} bytes while training")
        engine.destroy()
    return problems


def test_a_drive_has_room_for_everything_before_the_first_step(pool1: RankPool) -> None:
    assert pool1.run(_room) == [[]]


def _one_rank_has_no_drive() -> str:
    import torch.distributed as dist

    with tempfile.TemporaryDirectory() as folder:
        place = folder if dist.get_rank() == 0 else "/no/such/drive"
        try:
            start(case_named("plain").build(), _drive(place))
        except UsageError as error:
            return str(error)
    return "no error"


def test_a_drive_missing_on_one_rank_is_said_on_all(pool2: RankPool) -> None:
    said = pool2.run(_one_rank_has_no_drive, time_limit=30)
    assert "rank 1" in said[0] and all("/no/such/drive" in text for text in said), said


def _one_rank_fails_in_the_update() -> list[str]:
    import torch.distributed as dist

    case = case_named("plain")
    with tempfile.TemporaryDirectory() as folder:
        engine = start(case.build(), _drive(folder))
        train_step(engine, case, 0)
        if dist.get_rank() == 1:
            (drive,) = engine._parts.tiers.drives

            def fail(*_: Any) -> Any:
                raise OSError(5, "the drive is gone")

            drive.write = fail
        said = []
        for step in (1, 2):
            try:
                train_step(engine, case, step)
                said.append("no error")
            except (OSError, UsageError) as error:
                said.append(str(error))
    return said


def test_an_update_that_fails_on_one_rank_fails_on_all(pool2: RankPool) -> None:
    for first, second in pool2.run(_one_rank_fails_in_the_update, time_limit=60):
        assert "the drive is gone" in first and "half way" in second, (first, second)


def test_a_path_that_cannot_be_one_is_told_apart(tmp_path: Path, pool1: RankPool) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for place, words in ((str(file), "is a file"), ("~/drive", "write the whole path")):
        assert words in pool1.run(_fault_of, place)[0]


def _fault_of(place: str) -> str:
    try:
        start(case_named("plain").build(), _drive(place))
    except UsageError as error:
        return str(error)
    return "no error"


def _over_the_limit() -> list[str]:
    case, real = case_named("plain"), hostmem.rss_bytes
    engine = start(case.build(), make_config(3, memory={"host_limit": real() + (1 << 30)}))
    try:
        with logged() as said:
            train_step(engine, case, 0)
            quiet = [text for text in said if "more than memory.host_limit" in text]
            hostmem.rss_bytes = lambda: real() + (2 << 30)
            for step in (1, 2):
                train_step(engine, case, step)
    finally:
        hostmem.rss_bytes = real
        engine.destroy()
    told = [text for text in said if "more than memory.host_limit" in text]
    return [] if not quiet and len(told) == 1 else [f"before: {quiet}; after: {told}"]


def test_memory_beyond_the_limit_is_said_once(pool1: RankPool) -> None:
    assert pool1.run(_over_the_limit) == [[]]
