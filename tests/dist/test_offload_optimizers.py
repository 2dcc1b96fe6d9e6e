"""Whatever the optimizer, where its states rest changes no bit; one that needs more than a tile at once is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.lion import DeepSpeedCPULion
from deepspeed.tools.verify.reference import trainable
from tests.harness.offload import (
    FEW,
    Plan,
    check,
    compare,
)
from tests.harness.plain_optim import PlainOptimizer, UserElementwise, UserWholeTensor
from tests.harness.pool import RankPool

pytestmark = pytest.mark.timeout(120)


class Counting(UserElementwise):
    """Keeps the number of its steps in the group, as some Adam implementations do."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        super().step(closure)

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        super().update(p, g / group["count"], state, group)


class GrowingState(PlainOptimizer):
    """Has no slots at first, one after its second step, and puts a new tensor there every time."""

    elementwise = True
    defaults_of = {"lr": 1e-2, "weight_decay": 0.0}

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["turn"] = state.get("turn", 0) + 1
        if state["turn"] > 1:
            state["mean"] = 0.9 * state.get("mean", torch.zeros_like(p)) + g
            state["half"] = state["mean"].bfloat16()
        p.sub_(group["lr"] * state.get("mean", g))


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices in a group of their own, everything else without decay and with another rate."""
    params = list(trainable(model).values())
    rest = {"params": [p for p in params if p.ndim < 2], "lr": 3e-3, "weight_decay": 0.0}
    return [{"params": [p for p in params if p.ndim >= 2]}, rest]


CLIENTS: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "amsgrad": (torch.optim.Adam, {"lr": 1e-2, "amsgrad": True}),
    "fused": (torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
    "cpu_adam": (DeepSpeedCPUAdam, {"lr": 1e-2, "weight_decay": 0.1}),
    "cpu_adagrad": (DeepSpeedCPUAdagrad, {"lr": 1e-2, "weight_decay": 0.1}),
    "cpu_lion": (DeepSpeedCPULion, {"lr": 1e-3, "weight_decay": 0.1}),
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}),
    "plain_sgd": (torch.optim.SGD, {"lr": 0.05, "weight_decay": 0.1}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-2, "weight_decay": 0.1}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-2, "weight_decay": 0.1}),
    "adafactor": (torch.optim.Adafactor, {"lr": 1e-2, "weight_decay": 0.1}),
    "user_elementwise": (UserElementwise, {"lr": 1e-2, "weight_decay": 0.1}),
    "user_whole": (UserWholeTensor, {"lr": 1e-2, "weight_decay": 0.1}),
    "counting": (Counting, {"lr": 1e-2, "weight_decay": 0.1}),
    "growing": (GrowingState, {}),
}
NAMED: dict[str, dict[str, Any]] = {
    "Adam": {"lr": 1e-2, "weight_decay": 0.1},
    "adam_l2": {"lr": 1e-2, "weight_decay": 0.1, "adam_w_mode": False},
    "torch_adam": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True},
    "Adagrad": {"lr": 1e-2},
    "Lion": {"lr": 1e-3, "weight_decay": 0.1},
    "Lamb": {"lr": 1e-2, "weight_decay": 0.1},
    "Muon": {"lr": 1e-2, "weight_decay": 0.1},
    "SGD": {"lr": 0.05, "momentum": 0.9},
}


def with_client(name: str, stage: int, folder: str, names: tuple[str, ...]) -> list[str]:
    """Differences under a client's optimizer with two groups."""
    factory, settings = CLIENTS[name]
    plan = Plan("unused" if name in ("adafactor", "user_whole") else "wide", stage=stage, steps=4)
    plan.optimizer = lambda model: factory(groups_of(model), **settings)
    return compare(plan, folder, names)


def with_config(name: str, stage: int, folder: str, names: tuple[str, ...]) -> list[str]:
    """Differences under an optimizer of the configuration with two groups."""
    kind = {"adam_l2": "Adam", "torch_adam": "Adam"}.get(name, name)
    plan = Plan(stage=stage, steps=4, config={"optimizer": {"type": kind, "params": NAMED[name]}})
    plan.groups = None if name == "Muon" else groups_of
    return compare(plan, folder, names)


WHOLE_TENSORS = ("adafactor", "user_whole", "Lamb", "Muon")  # parameters are dealt to ranks


@pytest.mark.in_make_test("fused", "cpu_adagrad", "adafactor", "user_whole", "counting", "growing", "Muon")
@pytest.mark.parametrize("name", [*CLIENTS, *NAMED])
def test_optimizers(pool1: RankPool, tmp_path: Path, name: str) -> None:
    check(
        pool1.run(with_client if name in CLIENTS else with_config, name, 3, str(tmp_path), ("one buffer", "grads half"))
    )


@pytest.mark.in_make_test("user_whole", "Muon", "adamw")
@pytest.mark.parametrize("name", [*WHOLE_TENSORS, "adamw", "Adagrad"])
def test_optimizers_on_two_ranks(pool2: RankPool, tmp_path: Path, name: str) -> None:
    check(pool2.run(with_client if name in CLIENTS else with_config, name, 3, str(tmp_path), FEW))


class Accumulating(UserElementwise):
    """Keeps a running value over all parameters of its group."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        group["seen"] = group.get("seen", 0.0) + float(g.abs().sum())
        super().update(p, g / (1 + group["seen"]), state, group)


class AccumulatingTensor(UserElementwise):
    """The same in a tensor of the group."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        seen = group.setdefault("seen", torch.zeros(()))
        seen += g.abs().sum()
        super().update(p, g / (1 + seen), state, group)


class AccumulatingElsewhere(UserElementwise):
    """The same in an attribute of the optimizer."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        self.seen = getattr(self, "seen", 0.0) + float(g.abs().sum())
        super().update(p, g / (1 + self.seen), state, group)


class CountingTensor(UserElementwise):
    """Counts its steps in a tensor of the group, as capturable optimizers do."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group.setdefault("count", torch.zeros((), dtype=torch.int32)).add_(1)
        super().step(closure)

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        super().update(p, g / group["count"], state, group)


class CountingItself(UserElementwise):
    """Counts its steps in an attribute."""

    def step(self, closure: Any = None) -> None:
        self.count = getattr(self, "count", 0) + 1
        super().step(closure)

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        super().update(p, g / self.count, state, group)


def refused_or_equal(factory: type[PlainOptimizer], folder: str, way: str) -> str:
    """ "equal", the refusal, or what differs."""
    plan = Plan(steps=3)
    plan.optimizer = lambda model: factory(groups_of(model))
    try:
        return "\n".join(compare(plan, folder, (way,))) or "equal"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("factory", [Accumulating, AccumulatingTensor, AccumulatingElsewhere])
def test_an_optimizer_with_a_global_value_is_refused_on_a_drive(
    pool1: RankPool, tmp_path: Path, factory: type[PlainOptimizer]
) -> None:
    (told,) = pool1.run(refused_or_equal, factory, str(tmp_path), "tiles")
    assert told.startswith("UsageError") and factory.__name__ in told and "cpu" in told, told
    assert pool1.run(refused_or_equal, factory, str(tmp_path), "optim cpu") == ["equal"]


@pytest.mark.parametrize("factory", [Counting, CountingTensor, CountingItself])
def test_a_count_of_steps_goes_up_once_a_step(pool1: RankPool, tmp_path: Path, factory: type[PlainOptimizer]) -> None:
    """In the group as a number it works; kept elsewhere it works or is refused, and never counts the tiles."""
    (told,) = pool1.run(refused_or_equal, factory, str(tmp_path), "tiles")
    if factory is Counting:
        assert told == "equal", told
    assert told == "equal" or told.startswith("UsageError"), told
