"""I3: a unit belongs to the parameters a module touches directly; ownership walks stop at nested unit modules."""

import pytest
import torch
from torch import Tensor, nn

from deepspeed.config import load_config
from deepspeed.tools.verify.models import IN_FEATURES, OUT_FEATURES, Stack
from deepspeed.zero.partition import partition
from deepspeed.zero.plan import make_plan
from deepspeed.zero.unit import UnitState
from tests.harness.cases import regression
from tests.harness.lockstep import TOLERANCE, lockstep
from tests.harness.pool import RankPool
from tests.harness.training import make_config, start

pytestmark = pytest.mark.timeout(60)
SHARD_ALL = {"param_persistence_threshold": 0}


class Wrapped(nn.Module):
    """A root with parameters of its own around two towers of repeated blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(IN_FEATURES))
        self.first = Stack(depth=2)
        self.bridge = nn.Linear(OUT_FEATURES, IN_FEATURES)
        self.second = Stack(depth=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.bridge(self.first(x * self.scale)))


CASE = regression(Wrapped)


def test_invariant_i3_modules_own_what_they_touch_directly() -> None:
    model = CASE.build()
    plan = make_plan(load_config(make_config(3, zero=SHARD_ALL), world_size=2), 2)
    parts = partition(model, plan, trainable=list(model.parameters()))
    owned = [name for unit in parts.units for name in unit.names]
    assert sorted(owned) == sorted(name for name, _ in model.named_parameters()), "every parameter has exactly one unit"
    blocks = {f"{tower}.layers.{i}" for tower in ("first", "second") for i in range(2)}
    assert blocks <= {unit.name for unit in parts.units}
    for unit in parts.units:
        homes = {name.rsplit(".", 2)[0] if ".layers." in name else "" for name in unit.names}
        assert len(homes) == 1, f"{unit.name} mixes blocks with other parameters: {unit.names}"
    names = {model: "", **{module: name for name, module in model.named_modules()}}
    for module, indices in parts.touches.items():
        direct = {id(p) for p in module.parameters(recurse=False)}
        for index in indices:
            within = {id(p) for p in parts.units[index].params}
            assert module in parts.roots or direct & within, f"{names[module]} is listed for {parts.units[index].name}"
    root_units = {parts.units[i].name for i in parts.touches[model]}
    assert not root_units & blocks, "the walk from the root did not stop at the blocks"


def gathered_when_blocks_run() -> list[list[str]]:
    """For every block: the names of the block units that are gathered while it runs (prefetch off)."""
    config = make_config(3, zero={**SHARD_ALL, "overlap_comm": False, "prefetch_bucket_size": 0})
    engine = start(CASE.build(), config)
    seen: list[list[str]] = []

    def look(*_: object) -> None:
        seen.append([u.name for u in engine.runtime.units if ".layers." in u.name and u.state is not UnitState.ABSENT])

    for tower in (engine.module.first, engine.module.second):
        for layer in tower.layers:
            layer.norm.register_forward_pre_hook(look)
    engine(torch.ones(2, IN_FEATURES))
    engine.destroy()
    return seen


def test_invariant_i3_one_block_at_a_time(pool2: RankPool) -> None:
    expected = [[f"{tower}.layers.{i}"] for tower in ("first", "second") for i in range(2)]
    assert pool2.run(gathered_when_blocks_run) == [expected, expected]


def parity() -> tuple[float, str]:
    return lockstep(CASE, make_config(3, zero=SHARD_ALL))


def test_invariant_i3_nested_towers_match_plain_training(pool2: RankPool) -> None:
    for error, worst in pool2.run(parity):
        assert error <= TOLERANCE, worst
