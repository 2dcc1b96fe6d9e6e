"""Loading: what is refused is refused on every rank and wholly, what is left out is said, and windows keep their
length.
"""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from deepspeed.checkpoint.load.reader import find_and_open, read_manifest
from deepspeed.checkpoint.load.source import whole
from deepspeed.errors import CheckpointError, UsageError
from deepspeed.tools.checkpoint.cli import main
from deepspeed.tools.verify.models import IN_FEATURES, Stack
from tests.dist.test_checkpoint_damage import flip
from tests.harness.lockstep import equal
from tests.harness.logs import logged
from tests.harness.pool import RankPool
from tests.harness.training import make_config, start

SCHEDULE = {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": 0.01}}


def engine_of(stage: int, *, data: Any = None, **changes: Any) -> Any:
    return start(Stack(depth=1).train(), make_config(stage, **changes), training_data=data)


def train(engine: Any, count: int) -> None:
    for _ in range(count):
        seed = engine.micro_steps + 100 * dist.get_rank()
        x = torch.randn(4, IN_FEATURES, generator=torch.Generator().manual_seed(seed))
        engine.backward(engine(x).square().mean())
        engine.step()


def refusals(engine: Any, folder: str) -> tuple[str, str]:
    """What loading says, and what training says afterwards."""
    with pytest.raises(CheckpointError) as first:
        engine.load_checkpoint(folder)
    with pytest.raises(UsageError) as second:
        train(engine, 1)
    return str(first.value), str(second.value)


def damaged_gradient(folder: str, stage: int) -> tuple[str, str]:
    engine = engine_of(stage, gradient_accumulation_steps=4)
    train(engine, 2)
    engine.save_checkpoint(folder, "t")
    if dist.get_rank() == 0:
        entries = read_manifest(Path(folder, "t")).entries
        box = next(box for (state, _), entry in entries.items() if state.startswith("grad") for box in entry.boxes)
        flip(Path(folder, "t", box.file), box.offset)
    dist.barrier()
    return refusals(engine, folder)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_damaged_gradient_of_an_open_window_is_refused_on_every_rank(
    pool2: RankPool, tmp_path: Path, stage: int
) -> None:
    for load, after in pool2.run(damaged_gradient, str(tmp_path), stage):
        assert "grad" in load and "damaged" in load
        assert "failed half way" in after


def other_data(folder: str) -> tuple[str, str, int]:
    def engine_of_samples(count: int, **checkpoint: Any) -> Any:
        return engine_of(1, checkpoint=checkpoint, data=TensorDataset(torch.zeros(count, IN_FEATURES)))

    engine = engine_of_samples(40)
    next(iter(engine.training_dataloader))
    train(engine, 2)
    engine.save_checkpoint(folder)
    load, after = refusals(engine_of_samples(60), folder)
    without = engine_of_samples(60, restore_data=False)
    without.load_checkpoint(folder)
    return load, after, without.global_steps


def test_a_refused_data_position_leaves_no_half_loaded_engine(pool2: RankPool, tmp_path: Path) -> None:
    for load, after, steps in pool2.run(other_data, str(tmp_path)):
        assert "data position" in load and "checkpoint.restore_data" in load
        assert "failed half way" in after
        assert steps == 2


def left_out(folder: str, there: dict[str, Any], here: dict[str, Any]) -> list[str]:
    engine = engine_of(1, **there)
    train(engine, 1)
    engine.save_checkpoint(folder)
    other = engine_of(1, **here)
    with logged(logging.WARNING) as said:
        other.load_checkpoint(folder)
    return [text for text in said if "leaves out" in text]


RATES, DATA = {"scheduler": SCHEDULE}, {"data": TensorDataset(torch.ones(8, IN_FEATURES))}


@pytest.mark.parametrize(
    ("there", "here", "word"),
    [
        (RATES, {}, "has none"),
        ({}, RATES, "schedule; the checkpoint has no state of it"),
        (DATA, {}, "no loader here"),
        ({}, DATA, "data position; the checkpoint has none"),
        (RATES | DATA, RATES | DATA, ""),
    ],
)
def test_what_one_side_only_has_is_said(pool1: RankPool, tmp_path: Path, there: Any, here: Any, word: str) -> None:
    (said,) = pool1.run(left_out, str(tmp_path), there, here)
    assert [word in text for text in said] == ([True] if word else [])


def rates_alone(folder: str, kind: str, options: dict[str, Any]) -> bool:
    engine, other = (engine_of(1, scheduler={"type": kind, "params": options}) for _ in range(2))
    train(engine, 3)
    engine.save_checkpoint(folder)
    other.load_checkpoint(folder, load_optimizer_states=False)
    rates = [[], []]
    for _ in range(3):
        for seen, trained in zip(rates, (engine, other), strict=True):
            seen.append(trained.get_lr())
            train(trained, 1)
    return rates[0] == rates[1]


@pytest.mark.parametrize(
    ("kind", "options"), [("StepLR", {"step_size": 2}), ("WarmupLR", SCHEDULE["params"]), ("LinearLR", {})]
)
def test_a_schedule_goes_on_where_it_was_without_the_optimizers_state(
    pool1: RankPool, tmp_path: Path, kind: str, options: Any
) -> None:
    assert pool1.run(rates_alone, str(tmp_path), kind, options) == [True]


def gradient_after_a_failed_save(folder: str) -> tuple[float, float]:
    engine = engine_of(0)
    engine.backward(engine(torch.ones(4, IN_FEATURES)).square().mean())
    shown = float(engine.module.inp.weight.grad.norm())
    with pytest.raises(CheckpointError):
        engine.save_checkpoint(folder, client_state={"x": object()})
    return shown, float(engine.module.inp.weight.grad.norm())


def test_gradients_are_where_they_were_after_a_save_that_failed(pool1: RankPool, tmp_path: Path) -> None:
    ((before, after),) = pool1.run(gradient_after_a_failed_save, str(tmp_path))
    assert before == after > 0


def first_window(folder: str) -> tuple[int, int]:
    engine = engine_of(1)
    train(engine, 3)
    engine.save_checkpoint(f"{folder}/own")
    assert main(["export", f"{folder}/own", f"{folder}/theirs", "--format", "deepspeed"]) == 0
    other = engine_of(1, gradient_accumulation_steps=4)
    other.load_checkpoint(f"{folder}/theirs")
    train(other, 3)
    early = other.global_steps
    train(other, 1)
    return early, other.global_steps


def test_the_first_window_after_deepspeeds_checkpoint_is_whole(pool1: RankPool, tmp_path: Path) -> None:
    assert pool1.run(first_window, str(tmp_path)) == [(3, 4)]


def frozen_since(folder: str) -> int:
    """The updates at the end of a window in which a layer had trained and is frozen now."""
    engine = engine_of(1, gradient_accumulation_steps=2)
    train(engine, 3)
    engine.save_checkpoint(folder)
    model = Stack(depth=1).train()
    model.inp.requires_grad_(False)
    other = start(model, make_config(1, gradient_accumulation_steps=2))
    other.load_checkpoint(folder, load_module_strict=False)
    train(other, 1)
    return other.global_steps


def test_an_open_window_goes_on_without_a_layer_that_is_frozen_now(pool1: RankPool, tmp_path: Path) -> None:
    assert pool1.run(frozen_since, str(tmp_path)) == [2]


class Scaled(Stack):
    """With a parameter without dimensions, and a frozen one that the optimizer lists too."""

    def __init__(self) -> None:
        super().__init__(depth=1)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.fixed = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().forward(*args, **kwargs) * self.scale + self.fixed.sum()


def held(folder: str) -> tuple[dict[Any, torch.Tensor], Any]:
    """The tensors of a checkpoint, and the numbers beside those of the parameter without dimensions."""
    source = find_and_open(Path(folder))
    try:
        found = {key: whole(source, key) for key in source.entries if key[0] != "plain"}
        return found, source.facts["optimizer"]["scalars"].get("scale")
    finally:
        source.close()


def scaled_round_trip(folder: str, name: str) -> bool:
    def engine_of(stage: int) -> Any:
        torch.manual_seed(1)
        return start(Scaled().train(), make_config(stage, optimizer={"type": name, "params": {"lr": 0.01}}))

    engine = engine_of(3)
    train(engine, 2)
    engine.save_checkpoint(f"{folder}/a", "t")
    other = engine_of(0)
    other.load_checkpoint(f"{folder}/a")
    other.save_checkpoint(f"{folder}/b", "t")
    dist.barrier()
    (a, numbers), (b, again) = held(f"{folder}/a"), held(f"{folder}/b")
    return bool(numbers) and numbers == again and equal(a, b)


@pytest.mark.parametrize("name", ["Lamb", "AdamW"])
def test_state_of_a_parameter_without_dimensions_comes_back(pool2: RankPool, tmp_path: Path, name: str) -> None:
    assert all(pool2.run(scaled_round_trip, str(tmp_path), name))


def listed_frozen(folder: str) -> list[bool]:
    """Whether masters are the same in exports of every stage's layout."""
    model = Scaled().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine = start(model, make_config(2, optimizer=None), optimizer=optimizer)
    train(engine, 2)
    engine.save_checkpoint(f"{folder}/own", "t")
    own, same = held(f"{folder}/own")[0], []
    for stage in (0, 1, 3):
        theirs = f"{folder}/theirs{stage}"
        assert main(["export", f"{folder}/own", theirs, "--format", "deepspeed", "--stage", str(stage)]) == 0
        there = held(theirs)[0]
        same.append(all(torch.equal(value, there[key]) for key, value in own.items() if key[0] == "master"))
    return same


def test_export_of_an_optimizer_that_lists_frozen_parameters(pool1: RankPool, tmp_path: Path) -> None:
    assert pool1.run(listed_frozen, str(tmp_path)) == [[True] * 3]


def another_schedule(folder: str) -> str:
    engine = engine_of(1, scheduler=SCHEDULE)
    train(engine, 2)
    engine.save_checkpoint(folder)
    other = engine_of(1, scheduler={"type": "StepLR", "params": {"step_size": 3}})
    with pytest.raises(CheckpointError) as refused:
        other.load_checkpoint(folder)
    train(other, 1)  # it is as it was
    other.load_checkpoint(folder, load_lr_scheduler_states=False)
    assert other.global_steps == 2
    train(other, 1)
    return str(refused.value)


def test_the_state_of_another_schedule_is_refused(pool2: RankPool, tmp_path: Path) -> None:
    for said in pool2.run(another_schedule, str(tmp_path)):
        assert "WarmupLR" in said and "StepLR" in said and "load_lr_scheduler_states=False" in said
