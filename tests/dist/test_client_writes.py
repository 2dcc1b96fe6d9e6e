"""What clients write into parameters counts as in plain PyTorch, under every stage: in a context that says whose values
count, wherever in a window that is, and inside a forward.
"""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepspeed.tools.verify.grads import full_parameters, scaled_error
from deepspeed.tools.verify.reference import gate_optimizer
from deepspeed.zero.module import tree
from tests.harness.lockstep import TOLERANCE, not_at_rest
from tests.harness.pool import RankPool
from tests.harness.training import make_config, outcome, start

pytestmark = pytest.mark.timeout(60)
ELSEWHERE = {
    "device": {},
    "all on the host": {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}},
}


class Beside:
    """A model under an engine, and the same one plain, with windows of ``accumulation`` micro-batches."""

    def __init__(self, build: Any, stage: int, *, accumulation: int = 1, zero: Any = None) -> None:
        torch.manual_seed(3)
        self.plain, self.accumulation = build(), accumulation
        model = build()
        model.load_state_dict(self.plain.state_dict())
        zero = {"param_persistence_threshold": 0, **(zero or {})}
        config = make_config(stage, gradient_accumulation_steps=accumulation, zero=zero)
        self.engine = start(model, config)
        self.optimizer = gate_optimizer(self.plain)
        self.micro, self.error, self.worst = 0, 0.0, ""

    def batch(self, rank: int) -> Tensor:
        return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * self.micro + rank))

    def step(self) -> None:
        """One micro-batch and its step of both."""
        world = dist.get_world_size()
        self.engine.backward(self.engine(self.batch(dist.get_rank())))
        together = torch.cat([self.batch(rank) for rank in range(world)])  # one forward, as it may write
        (self.plain(together) / self.accumulation).backward()
        self.micro += 1
        self.engine.step()
        if self.micro % self.accumulation == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def window(self) -> None:
        for _ in range(self.accumulation):
            self.step()

    def compare(self, where: str) -> None:
        expected = dict(self.plain.named_parameters())
        for name, value in full_parameters(self.engine.module).items():
            if (error := scaled_error(value, expected[name].detach())) > self.error:
                self.error, self.worst = error, f"{name} {where}, micro-batch {self.micro}"

    def finish(self) -> tuple[float, str, list[str]]:
        self.compare("at the end")
        restless = not_at_rest(self.engine)
        self.engine.destroy()
        return self.error, self.worst, restless


class Three(nn.Module):
    """Six parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


class Forward(nn.Module):
    """Writes into its parameters as it runs: those of a copy that follows (frozen), of a table (as ``max_norm`` does)
    and of a layer that trains.
    """

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(2)])
        self.followers = nn.ModuleList([nn.Linear(6, 6).requires_grad_(requires_grad=False) for _ in range(2)])
        self.table = nn.Embedding(8, 6, max_norm=0.5 if how == "max_norm" else None)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for ours, theirs in zip(self.followers.parameters(), self.layers.parameters(), strict=True):
                if self.how == "in place":
                    ours.mul_(0.9).add_(theirs, alpha=0.1)
                elif self.how == "data":
                    ours.data.mul_(0.9).add_(theirs.data, alpha=0.1)
                elif self.how == "assigned":
                    ours.data = ours.data * 0.9 + theirs.data * 0.1
            if self.how == "clamped":
                self.layers[0].weight.clamp_(-0.2, 0.2)
            if self.how == "clamped data":
                self.layers[0].weight.data.clamp_(-0.2, 0.2)
        seen = self.table(torch.arange(8)).sum(0)  # all rows, as every rank is to write the same
        followed = x
        for layer, follower in zip(self.layers, self.followers, strict=True):
            x, followed = torch.tanh(layer(x)), torch.tanh(follower(followed))
        return (x - followed + seen).square().mean()


def written_in_forward(how: str, stage: int, accumulation: int, elsewhere: str) -> tuple[float, str, list[str]]:
    pair = Beside(lambda: Forward(how), stage, accumulation=accumulation, zero=ELSEWHERE[elsewhere])
    for number in range(4):
        pair.window()
        pair.compare(f"after update {number}")
        with torch.no_grad():
            pair.engine(pair.batch(0))
            pair.plain(pair.batch(0))
    return pair.finish()


@pytest.mark.in_make_test(
    "1-2-device-in place",
    "3-1-device-data",
    "3-3-device-assigned",
    "3-3-device-clamped",
    "3-3-device-max_norm",
    "3-2-all on the host-clamped data",
)
@pytest.mark.parametrize("how", ["in place", "data", "assigned", "clamped", "clamped data", "max_norm"])
@pytest.mark.parametrize(
    ("stage", "accumulation", "elsewhere"),
    [(1, 2, "device"), (3, 1, "device"), (3, 3, "device"), (3, 2, "all on the host")],
)
def test_what_a_forward_writes_into_parameters_counts(
    pool2: RankPool, how: str, stage: int, accumulation: int, elsewhere: str
) -> None:
    for error, worst, restless in pool2.run(written_in_forward, how, stage, accumulation, elsewhere):
        assert error <= TOLERANCE, worst
        assert restless == []


def gathered_by_hand(updated: bool) -> tuple[float, str, list[str]]:  # noqa: FBT001
    """Two parameters, gathered and partitioned by their own methods amid windows of three micro-batches."""
    pair = Beside(Three, 3, accumulation=3)
    first: Any = pair.engine.module.layers[0].weight
    second: Any = pair.engine.module.layers[2].bias
    plain = pair.plain.layers[0].weight, pair.plain.layers[2].bias
    for _ in range(4):
        pair.window()
        pair.step()
        first.all_gather(param_list=[first, second])
        for ours, theirs in zip((first, second), plain, strict=True):
            pair.error = max(pair.error, scaled_error(ours.detach(), theirs.detach()))
            ours.data.mul_(2.0)
            theirs.data.mul_(2.0 if updated else 1.0)
        first.partition(param_list=[first, second], has_been_updated=updated)
        pair.compare("after the parameters were partitioned")
        pair.step()
        pair.step()
    return pair.finish()


@pytest.mark.parametrize("updated", [False, True])
def test_a_parameter_gathers_and_partitions_itself(pool2: RankPool, updated: bool) -> None:  # noqa: FBT001
    for error, worst, restless in pool2.run(gathered_by_hand, updated):
        assert error <= TOLERANCE, worst
        assert restless == []


def late_through_data() -> str:
    pair = Beside(lambda: Forward("nothing"), 3)
    for _ in range(3):
        pair.step()
    pair.engine.module.how = "data"
    with mock.patch.object(tree, "_DATA_EVERY", 4):
        said = outcome(lambda: [pair.engine(pair.batch(0)).backward() or pair.engine.step() for _ in range(4)])
    pair.engine.destroy()
    return said


def test_writes_through_data_that_begin_late_are_refused_by_name(pool2: RankPool) -> None:
    for said in pool2.run(late_through_data):
        assert "UsageError" in said and "'followers." in said and "torch.no_grad()" in said
