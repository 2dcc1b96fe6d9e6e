"""I2, users are counted: a unit is freed only when no active module uses it; pins are a second count."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import deepspeed
from deepspeed.tools.verify.models import HIDDEN, Case, MicroBatch, ResidualBlock, Stack
from deepspeed.zero.unit import UnitState
from tests.harness.cases import case_named, regression
from tests.harness.lockstep import TOLERANCE, Lockstep, lockstep, not_at_rest
from tests.harness.pool import RankPool
from tests.harness.training import STAGES, here, make_config, start

pytestmark = pytest.mark.timeout(60)
SHARD_ALL = {"param_persistence_threshold": 0}


class Recursive(nn.Module):
    """A block that calls itself, a shared leaf, and a child's weight through a function, all while its own forward is
    open.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inner = ResidualBlock()
        self.mix = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        if depth:
            x = self(x, depth - 1)
        x = self.inner(x)
        x = self.mix(x) + F.linear(x, self.mix.weight)
        return x + self.inner.norm(x)


class Nested(Stack):
    """Users within users: blocks that call themselves, one block twice, and a leaf of a block from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Recursive(), Recursive()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        x = self.layers[1](self.layers[0](x), 1)
        return self.head(self.layers[0](x, 0) + self.layers[1].mix(x))


class PinsInside(nn.Linear):
    """Opens the gathering context on its own weight while a view of it waits to be used."""

    def forward(self, x: Tensor) -> Tensor:
        turned = self.weight.t()
        with deepspeed.zero.GatheredParameters([self.weight]):
            scale = self.weight.detach().abs().mean()
        return x @ turned / (1 + scale)


class Recomputed(PinsInside):
    """Does so again while a backward runs."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Borrowing(Stack):
    """Computes with weights of other modules inside the gathering context: with a leaf's and, again in the backward,
    with those of a block that runs later.
    """

    def borrow(self, x: Tensor) -> Tensor:
        norm, up = self.layers[1].norm.weight, self.layers[1].up.weight
        with deepspeed.zero.GatheredParameters([norm, up], fwd_module=self):
            return F.linear(x * norm, up).tanh()[..., :HIDDEN]

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        with deepspeed.zero.GatheredParameters([self.head.bias], fwd_module=self):
            x = x * self.head.bias.mean()
        x = x + self.borrow(x) + checkpoint(self.borrow, x, use_reentrant=False)
        return self.head(self.trunk(x))


class ListsItsOwnWay(nn.Linear):
    """Overrides what lists its parameters, with fewer arguments than torch's."""

    def named_parameters(self, prefix: str = "", recurse: bool = True) -> Any:  # type: ignore[override]
        return super().named_parameters(prefix, recurse)


def _with_middle(kind: type[nn.Linear]) -> Stack:
    model = Stack()
    model.layers[1] = kind(HIDDEN, HIDDEN)
    return model


class Pair(nn.Module):
    """Two matrices that are used directly."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(HIDDEN, HIDDEN) * 0.3)
        self.v = nn.Parameter(torch.randn(HIDDEN, HIDDEN) * 0.3)


class Slot:
    """An output object without ``__dict__``."""

    __slots__ = ("h",)

    def __init__(self, h: Any) -> None:
        self.h = h


class Slotted(Pair):
    """The output hides in an object with slots, beside a visible one that no loss uses."""

    def forward(self, x: Tensor) -> Any:
        """A slot object and a tensor."""
        return Slot(F.linear(torch.tanh(F.linear(x, self.w)), self.v)), x.sum() * self.w.sum()


class Hidden(Pair):
    """The output hides in a closure, where nobody can find it."""

    def forward(self, x: Tensor) -> Any:
        """A function that returns the output."""
        y = F.linear(torch.tanh(F.linear(x, self.w)), self.v)
        return lambda: y


class Stashing(Pair):
    """An auxiliary loss stays on the module."""

    def forward(self, x: Tensor) -> Tensor:
        """The output; ``self.extra`` is the auxiliary loss."""
        y = torch.tanh(F.linear(x, self.w))
        self.extra = F.linear(torch.tanh(F.linear(y, self.v)), self.v).pow(2).mean()
        return y


class Detaching(Pair):
    """A first use of the weight that does not differentiate it: its backward is the last to run."""

    def forward(self, x: Tensor) -> Tensor:
        """The output."""
        return F.linear(torch.tanh(F.linear(F.linear(x, self.w.detach()), self.v)), self.w)


class Chain(Stack):
    """Blocks whose outputs hide from the runtime, or whose losses and weights are used apart from their outputs."""

    def __init__(self, block: type[nn.Module], unwrap: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([block(), block()])
        self.unwrap = unwrap

    def trunk(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.unwrap(layer(x))
        return x


def _loss_of_chain(model: nn.Module, batch: tuple[Tensor, Tensor], place: MicroBatch) -> list[Tensor]:
    """With what the blocks have stashed; behind it an evaluation."""
    x, y = batch
    loss = F.mse_loss(model(x), y) + sum(getattr(layer, "extra", 0) for layer in getattr(model, "module", model).layers)
    with torch.no_grad():
        model(x)
    return [loss]


CHAINS: dict[str, tuple[type[nn.Module], Callable[[Any], Tensor]]] = {
    "slots": (Slotted, lambda out: out[0].h),
    "closure": (Hidden, lambda out: out()),
    "stash": (Stashing, lambda out: out),
    "detach": (Detaching, lambda out: out),
}


def _loss_outside(model: nn.Module, batch: tuple[Tensor, Tensor], place: MicroBatch) -> list[Tensor]:
    """The model's forward, then its submodules called one by one from outside it, in another order."""
    x, y = batch
    inner = getattr(model, "module", model)
    hidden = inner.layers[2](inner.inp(x))
    aside = inner.layers[0](hidden) + inner.layers[2](hidden)
    return [F.mse_loss(model(x), y) + F.mse_loss(inner.head(aside), y)]


def _loss_regularised(model: nn.Module, batch: tuple[Tensor, Tensor], place: MicroBatch, *, view: bool) -> list[Tensor]:
    """With a regulariser that is built while parameters are gathered."""
    x, y = batch
    params = list(model.parameters())
    loss = F.mse_loss(model(x), y)
    with deepspeed.zero.GatheredParameters(params):
        penalty = sum((p.t() if view and p.dim() > 1 else p).square().sum() for p in params)
    return [loss + 0.1 * penalty]


CASES: dict[str, Case] = {
    "nested": regression(Nested),
    "pinning": regression(partial(_with_middle, PinsInside)),
    "pinning_recomputed": regression(partial(_with_middle, Recomputed)),
    "borrowing": regression(Borrowing),
    "lists_its_own_way": regression(partial(_with_middle, ListsItsOwnWay)),
    "outside": regression(Stack, loss=_loss_outside),
    "regulariser": regression(Stack, loss=partial(_loss_regularised, view=False)),
    "regulariser_of_views": regression(Stack, loss=partial(_loss_regularised, view=True)),
    **{name: regression(partial(Chain, *of), loss=_loss_of_chain) for name, of in CHAINS.items()},
}


def run_case(name: str, stage: int) -> tuple[float, str]:
    return lockstep(CASES[name], make_config(stage, zero=SHARD_ALL))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", ["nested", "outside", "lists_its_own_way"])
def test_invariant_i2_every_use_is_counted(pool2: RankPool, name: str, stage: int) -> None:
    """A block that is used twice, and a leaf of it: test_parity_matrix.py."""
    for error, worst in pool2.run(run_case, name, stage):
        assert error <= TOLERANCE, worst


@pytest.mark.parametrize("name", CHAINS)
def test_a_backward_never_reads_released_weights(pool2: RankPool, name: str) -> None:
    """Outputs nobody sees, stashed losses and detached uses find their weights (these raised, or crashed the
    process).
    """
    for error, worst in pool2.run(run_case, name, 3):
        assert error <= TOLERANCE, worst


@pytest.mark.parametrize("name", ["regulariser", "regulariser_of_views"])
def test_a_regulariser_built_in_gathered_parameters_has_its_gradient(pool2: RankPool, name: str) -> None:
    """What autograd saves inside GatheredParameters is read after it (was: NaN gradients, or a crash of the
    process).
    """
    for error, worst in pool2.run(run_case, name, 3):
        assert error <= TOLERANCE, worst


def states_inside_a_forward() -> list[str]:
    """While an outer module is open its unit stays, even when an inner use of the same unit ends."""
    engine = start(case_named("tied").build(), make_config(3, zero=SHARD_ALL, optimizer=None))
    unit = engine.module.embed.weight._ds_unit
    seen: list[str] = []
    handle = engine.module.layers[0].register_forward_pre_hook(lambda *_: seen.append(unit.state.value))
    unit.pin()
    with torch.no_grad():
        engine(torch.zeros(2, 3, dtype=torch.long))
    held = [unit.state.value, str(unit.pins)]
    unit.unpin()
    handle.remove()
    assert unit.state is UnitState.ABSENT
    with torch.no_grad():
        engine(torch.zeros(2, 3, dtype=torch.long))
    assert not_at_rest(engine) == []
    engine.destroy()
    return seen + held


def test_invariant_i2_pins_hold_across_modules(pool2: RankPool) -> None:
    assert pool2.run(states_inside_a_forward) == [["ready", "ready", "1"]] * 2


def gathered_around_a_step() -> tuple[float, str]:
    """Parameters gathered by the user stay gathered through forward, backward and step, and show the new values."""
    pair = Lockstep(case_named("plain"), make_config(3, zero=SHARD_ALL))
    pair.step(0)
    params = list(pair.engine.module.parameters())
    with deepspeed.zero.GatheredParameters(params[:5]):
        pair.step(1)
        expected = dict(pair.plain.named_parameters())
        for name, param in list(pair.engine.module.named_parameters())[:5]:
            pair.note(
                float((param.detach() - expected[name].detach()).abs().max()),
                f"{name} inside the context after the step",
            )
        with deepspeed.zero.GatheredParameters(params):
            pair.engine(pair.case.batch(here(1))[0])
        pair.engine.runtime.reset()
        assert all(p._ds_unit.state is UnitState.READY for p in params[:5])
    pair.step(2)
    assert not_at_rest(pair.engine) == []
    return pair.finish()


def test_invariant_i2_gathered_parameters_around_a_whole_iteration(pool2: RankPool) -> None:
    for error, worst in pool2.run(gathered_around_a_step):
        assert error <= TOLERANCE, worst


@pytest.mark.in_make_test("3")  # where weights come and go
@pytest.mark.parametrize("stage", STAGES)
def test_invariant_i2_a_pin_closed_inside_a_forward_leaves_its_users_alone(pool2: RankPool, stage: int) -> None:
    for error, worst in pool2.run(run_case, "pinning", stage):
        assert error <= TOLERANCE, worst


@pytest.mark.parametrize("name", ["borrowing", "pinning_recomputed"])
def test_invariant_i2_a_backward_has_what_was_read_in_a_context_inside_a_module(pool2: RankPool, name: str) -> None:
    """Gradients were NaN, or the backward failed."""
    for error, worst in pool2.run(run_case, name, 3):
        assert error <= TOLERANCE, worst
