"""I5: during recomputation forward hooks fetch but never release; the backward owns the release."""

import contextlib
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, set_checkpoint_early_stop

from deepspeed.tools.verify.models import HIDDEN, ResidualBlock, Stack
from deepspeed.zero.hooks import inside_backward
from deepspeed.zero.unit import Unit
from tests.harness.cases import case_named, regression
from tests.harness.lockstep import TOLERANCE, Lockstep, not_at_rest
from tests.harness.pool import RankPool
from tests.harness.training import make_config

pytestmark = pytest.mark.timeout(60)


class NestedCheckpoints(Stack):
    """A checkpoint over two blocks, each of which is a checkpoint of its own, and whose halves are again."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        def inner(layer: ResidualBlock, y: Tensor) -> Tensor:
            half = checkpoint(lambda z: layer.up(layer.norm(z)), y, use_reentrant=self.reentrant)
            return y + layer.down(torch.relu(half))

        def outer(y: Tensor) -> Tensor:
            for layer in self.layers[:2]:
                y = checkpoint(inner, layer, y, use_reentrant=self.reentrant)
            return y

        x = checkpoint(outer, self.inp(x), use_reentrant=self.reentrant)
        return self.head(self.layers[2](x))


class NestedReentrant(NestedCheckpoints):
    reentrant = True


class Sequences(Stack):
    """checkpoint_sequential in segments, one block used inside and outside the checkpoint."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        x = checkpoint_sequential([*self.layers], 2, x, use_reentrant=False)
        return self.head(self.layers[0](x))


class WholeModel(nn.Module):
    """The model itself runs under one checkpoint, the embedding-like input projection too."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Stack()
        self.scale = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda y: self.body(y) * self.scale.sum(), x, use_reentrant=False)


MODELS = {"nested": NestedCheckpoints, "nested_reentrant": NestedReentrant, "sequences": Sequences, "whole": WholeModel}


@contextlib.contextmanager
def releases_in_recomputation(found: list[str]) -> Iterator[None]:
    """Note every release that happens while some module's forward is being recomputed."""
    open_forwards = [0]
    release = Unit.release
    call = nn.Module.__call__

    def watched_release(self: Unit) -> None:
        if open_forwards[0] and self.movable:
            found.append(self.name)
        release(self)

    def watched_call(self: nn.Module, *args: object, **kwargs: object) -> object:
        recomputing = inside_backward()
        open_forwards[0] += recomputing
        try:
            return call(self, *args, **kwargs)
        finally:
            open_forwards[0] -= recomputing

    with mock.patch.object(Unit, "release", watched_release), mock.patch.object(nn.Module, "__call__", watched_call):
        yield


def train(name: str, stage: int, early_stop: bool, zero: dict[str, int]) -> tuple[float, str, list[str]]:
    """The largest error and its place, and what was released while a forward was recomputed."""
    case = regression(MODELS[name]) if name in MODELS else case_named(name)
    pair = Lockstep(case, make_config(stage, zero={"param_persistence_threshold": 0, **zero}))
    released: list[str] = []
    with set_checkpoint_early_stop(early_stop), releases_in_recomputation(released):
        for step in range(3):
            pair.step(step)
    assert not_at_rest(pair.engine) == []
    return *pair.finish(), released


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize(
    "name", ["checkpoint_reentrant", "checkpoint_nonreentrant", "dropout_checkpointed", "frozen_checkpointed", *MODELS]
)
def test_invariant_i5_recomputation_never_releases(pool2: RankPool, name: str, early_stop: bool) -> None:
    for error, worst, released in pool2.run(train, name, 3, early_stop, {}):
        assert error <= TOLERANCE, worst
        assert released == []


PLANS: dict[str, tuple[int, dict[str, int]]] = {
    **{f"stage {stage}": (stage, {}) for stage in (0, 1, 2)},
    "nothing ahead": (3, {"prefetch_bucket_size": 0, "overlap_comm": False}),
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", ["nested", "nested_reentrant", "sequences"])
def test_invariant_i5_under_other_plans(pool2: RankPool, name: str, plan: str) -> None:
    stage, zero = PLANS[plan]
    for error, worst, _ in pool2.run(train, name, stage, True, zero):
        assert error <= TOLERANCE, worst
