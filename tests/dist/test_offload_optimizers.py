"""Whatever the optimizer, where its states rest changes no bit; one that needs more than a tile at once is refused."""

import copy
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed.errors import UsageError
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.lion import DeepSpeedCPULion
from deepspeed.tools.verify.models import case_named
from deepspeed.tools.verify.reference import trainable
from deepspeed.zero.update.partial import Turns
from tests.harness.offload import FEW, Plan, check, compare
from tests.harness.plain_optim import PlainOptimizer, UserElementwise, UserWholeTensor
from tests.harness.pool import RankPool
from tests.harness.rows import for_each
from tests.harness.training import make_config, start, train_step

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
    """Keeps a running value over all parameters: a number or a tensor of their group, or an attribute."""

    def __init__(self, *args: Any, place: str, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.place = place

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        seen = g.abs().sum()
        if self.place == "tensor":
            seen = group.setdefault("seen", torch.zeros(())).add_(seen)
        elif self.place == "number":
            seen = group["seen"] = group.get("seen", 0.0) + float(seen)
        else:
            seen = self.seen = getattr(self, "seen", 0.0) + float(seen)
        super().update(p, g / (1 + seen), state, group)


class CountingElsewhere(UserElementwise):
    """Counts its steps not as a number of the group: in a tensor of it, as capturable optimizers do, in an attribute,
    or inside of one.
    """

    def __init__(self, *args: Any, place: str, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.place = place
        self.counts: Any = {0: 0} if place == "dict" else [0]

    def step(self, closure: Any = None) -> None:
        if self.place == "tensor":
            for group in self.param_groups:
                group.setdefault("count", torch.zeros((), dtype=torch.int32)).add_(1)
        elif self.place == "attribute":
            self.count = getattr(self, "count", 0) + 1
        else:
            self.counts[0] += 1
        super().step(closure)

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        of_attributes = self.count if self.place == "attribute" else self.counts[0]
        super().update(p, g / (group["count"] if self.place == "tensor" else of_attributes), state, group)


def refused_or_equal(factory: Callable[..., PlainOptimizer], folder: str, way: str) -> str:
    """ "equal", the refusal, or what differs."""
    plan = Plan(steps=3)
    plan.optimizer = lambda model: factory(groups_of(model))
    try:
        return "\n".join(compare(plan, folder, (way,))) or "equal"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("place", ["number", "tensor", "attribute"])
def test_an_optimizer_with_a_global_value_is_refused_on_a_drive(pool1: RankPool, tmp_path: Path, place: str) -> None:
    factory = partial(Accumulating, place=place)
    (told,) = pool1.run(refused_or_equal, factory, str(tmp_path), "tiles")
    assert told.startswith("UsageError") and "Accumulating" in told and "cpu" in told, told
    assert pool1.run(refused_or_equal, factory, str(tmp_path), "optim cpu") == ["equal"]


@pytest.mark.parametrize("place", ["group", "tensor", "attribute", "dict", "list"])
def test_a_count_of_steps_goes_up_once_a_step(pool1: RankPool, tmp_path: Path, place: str) -> None:
    """In the group as a number, and inside of attributes, it works; kept elsewhere it works or is refused, and never
    counts the tiles.
    """
    factory = Counting if place == "group" else partial(CountingElsewhere, place=place)
    (told,) = pool1.run(refused_or_equal, factory, str(tmp_path), "tiles")
    assert told == "equal" or (place in ("tensor", "attribute") and told.startswith("UsageError")), told


def _drive(folder: str, **changes: Any) -> dict[str, Any]:
    place = {"device": "nvme", "nvme_path": folder}
    return make_config(3, zero={"offload_optimizer": place, "sub_group_size": 4096}, **changes)


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


# -- one step in several turns ---------------------------------------------------------------------------------------


def turns_that_keep(*values: Callable[[], Any]) -> Turns:
    """One step in as many turns, each of which leaves a value in the optimizer."""
    optimizer: Any = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    optimizer.kept, left = 0, iter(values)
    turns = Turns(optimizer)
    optimizer.step = lambda: setattr(optimizer, "kept", next(left)())
    return turns


NOT_A_NUMBER = partial(torch.tensor, [float("nan"), 1.0])
WITH_A_GRAPH: Callable[[], Tensor] = lambda: torch.ones(1, requires_grad=True) * 2  # noqa: E731


@for_each(("first", "second"), [(NOT_A_NUMBER, NOT_A_NUMBER), (lambda: 1, lambda: 1.0), (WITH_A_GRAPH, WITH_A_GRAPH)])
def test_what_is_equal_after_every_turn_is_no_fault(first: Any, second: Any) -> None:
    """Nor is a count that becomes a float."""
    turns = turns_that_keep(first, second)
    turns.take([])
    turns.take([])


@for_each("second", [torch.zeros(3), torch.ones(2), 0.0])
def test_what_differs_between_turns_is_said(second: Any) -> None:
    """Its shape, its values, or that it is no tensor any more."""
    turns = turns_that_keep(lambda: torch.zeros(2), lambda: second)
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
