"""What is frozen after initialize stands still and counts its own updates, as in plain PyTorch: a count of updates sets
Adam's bias correction, so that a parameter that joins late takes the steps of a first update.
"""

import copy
import itertools
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepspeed.tools.verify.grads import full_parameters
from deepspeed.zero.update import apply
from tests.harness.pool import RankPool
from tests.harness.training import make_config, outcome, parameter_error, start

pytestmark = pytest.mark.timeout(90)
ADAM = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}}
CPU = {"device": "cpu"}
# by update: what does not train in it, by the ends of names
STILL: dict[int, tuple[str, ...]] = {
    0: ("1.bias", "3.weight"),
    1: ("3.weight",),
    2: ("0.bias", "1.weight", "1.bias"),
    3: ("0.bias", "0.weight", "1.weight", "1.bias", "3.weight", "3.bias"),
    5: ("1.weight",),
}
STEPS = 8
PLACES: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2 host": {"stage": 2, "offload_optimizer": CPU},
    "stage 3": {"stage": 3},
    "stage 3 host": {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU},
    "stage 2 drive": {"stage": 2, "offload_optimizer": {"device": "nvme", "buffer_count": 2}},
    "stage 3 ahead": {"stage": 3, "offload_optimizer": {**CPU, "super_offload": True}},
}


class Anchored(torch.optim.SGD):
    """Pulls each weight to its value at its own first update."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """As SGD, after the pull."""
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            anchor = self.state[p].setdefault("anchor", p.detach().clone())
            p.add_(anchor - p, alpha=0.5)
        return super().step(closure)


def class_of(kind: str) -> Any:
    return Anchored if kind == "Anchored" else getattr(torch.optim, kind)


def build() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 9), nn.LayerNorm(9), nn.GELU(), nn.Linear(9, 7), nn.Linear(7, 3))


def loss_of(model: Any, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x, y = torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator)
    return (model(x) - y).square().mean()


def freeze(model: nn.Module, step: int) -> None:
    for name, param in model.named_parameters():
        param.requires_grad_(not name.endswith(STILL.get(step, ())) or not STILL.get(step))


def plain(kind: str) -> dict[str, Tensor]:
    model, world = build(), dist.get_world_size()
    optimizer = class_of(kind)(model.parameters(), **ADAM["params"])
    for step in range(STEPS):
        freeze(model, step)
        for rank in range(world):
            (loss_of(model, step, rank) / world).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters()}


def error_at_end(engine: Any, kind: str = "AdamW") -> float:
    """The largest error after all updates. Ends the engine."""
    error, _ = parameter_error(engine.module, plain(kind))
    engine.destroy()
    return error


def update(engine: Any, number: int) -> None:
    freeze(engine.module, number)
    engine.backward(loss_of(engine, number, dist.get_rank()))
    engine.step()


def train(zero: dict[str, Any], folder: str, kind: str, then: dict[str, Any] | None, half: int = STEPS // 2) -> float:
    """The largest error after all updates; ``then``: from update ``half`` on they are another engine's, from a
    checkpoint.
    """
    for place in (zero, then or {}):
        if place.get("offload_optimizer", {}).get("device") == "nvme":
            place["offload_optimizer"] |= {"nvme_path": folder}
    client = None if kind == "AdamW" else class_of(kind)
    changes: dict[str, Any] = {"optimizer": None} if client else {"optimizer": ADAM}

    def engine_of(place: dict[str, Any]) -> Any:
        model = build()
        given = {"optimizer": client(model.parameters(), **ADAM["params"])} if client else {}
        return start(model, make_config(place["stage"], zero=place, **changes), **given)

    engine = engine_of(zero)
    for step in range(STEPS):
        if step == half and then is not None:
            engine.save_checkpoint(folder, tag="half")
            engine.destroy()
            engine = engine_of(then)
            engine.load_checkpoint(folder, tag="half")
        update(engine, step)
    return error_at_end(engine, kind)


@pytest.mark.parametrize("place", PLACES)
def test_each_parameter_counts_its_own_updates(pool2: RankPool, place: str, tmp_path: Path) -> None:
    assert max(pool2.run(train, PLACES[place], str(tmp_path), "AdamW", None)) < 2e-6


@pytest.mark.parametrize(
    ("place", "kind"), [("stage 0", "RAdam"), ("stage 3", "Adagrad"), ("stage 3", "Adamax"), ("stage 2 drive", "RAdam")]
)
def test_so_do_clients_optimizers(pool2: RankPool, place: str, kind: str, tmp_path: Path) -> None:
    assert max(pool2.run(train, PLACES[place], str(tmp_path), kind, None)) < 2e-6


@pytest.mark.parametrize("place", ["stage 1", "stage 3", "stage 2 drive"])
def test_what_is_made_of_a_weight_is_made_at_its_own_first_update(pool2: RankPool, place: str, tmp_path: Path) -> None:
    """Also where another engine goes on before it, from a checkpoint without."""
    for then in (None, PLACES["stage 3"], PLACES["stage 1"]):
        assert max(pool2.run(train, PLACES[place], str(tmp_path), "Anchored", then, 1)) < 2e-6


def rewound(zero: dict[str, Any]) -> tuple[float, str]:
    """The error of an engine that was given the optimizer's state of another one half way, as a dict; and what is said
    of steps behind ``state.clear()``.
    """
    first, second = (start(build(), make_config(zero["stage"], zero=zero, optimizer=ADAM)) for _ in range(2))
    for number in range(4):
        update(first, number)
    second.load_module_state_dict(full_parameters(first.module))
    update(second, 1)  # whatever it has counted itself is replaced
    second.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
    for number in range(4, STEPS):
        update(second, number)
    first.optimizer.state.clear()
    said = outcome(lambda: [update(first, number) for number in range(4, 7)])
    first.destroy()
    return error_at_end(second), said


@pytest.mark.parametrize("place", ["stage 1", "stage 3"])
def test_the_optimizer_s_own_dict_has_the_counts_and_may_be_cleared(pool2: RankPool, place: str) -> None:
    for error, said in pool2.run(rewound, PLACES[place]):
        assert error < 2e-6 and not said


@pytest.mark.parametrize(
    ("first", "then"), [("stage 1", "stage 3"), ("stage 3 host", "stage 0"), ("stage 0", "stage 2 drive")]
)
def test_a_checkpoint_keeps_the_counts(pool2: RankPool, first: str, then: str, tmp_path: Path) -> None:
    assert max(pool2.run(train, PLACES[first], str(tmp_path), "AdamW", PLACES[then])) < 2e-6


def failed_in_show(zero: dict[str, Any]) -> tuple[str, bool]:
    """What is said where the second view cannot be shown at the first update, and whether all masters are as before."""
    engine = start(build(), make_config(zero["stage"], zero=zero, optimizer=ADAM))
    before = [view.param.detach().clone() for view in engine._views]
    for param in engine.module.parameters():
        param.requires_grad_(param.dim() == 1)
    real, calls = apply._Cut.show, itertools.count(1)

    def show(cut: Any) -> Any:
        shown = real(cut)
        if next(calls) == 2:
            raise MemoryError("no room for a piece")
        return shown

    engine.backward(loss_of(engine, 0, dist.get_rank()))
    with mock.patch.object(apply._Cut, "show", show):
        said = outcome(engine.step)
    same = all(torch.equal(view.param, values) for view, values in zip(engine._views, before, strict=True))
    engine.destroy()
    return said, same


def test_an_error_while_pieces_are_shown_leaves_the_weights(pool2: RankPool) -> None:
    """Those that stand still are zeros for the time of the optimizer's call."""
    for said, same in pool2.run(failed_in_show, {"stage": 3, "param_persistence_threshold": 0}):
        assert "no room for a piece" in said and same
