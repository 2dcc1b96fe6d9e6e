"""Facts belong to units: parameters with another divisor get units of their own, and every mean and norm is right
beside the others.
"""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepspeed.engine import initialize
from deepspeed.tools.verify.reference import gate_optimizer
from deepspeed.zero.build import build
from deepspeed.zero.partition import UnitFacts
from tests.harness.pool import RankPool
from tests.harness.training import STAGES, make_config, parameter_error, start


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def _train(stage: int) -> tuple[float, float]:
    """The middle layer's gradients are summed over the ranks, those of the others averaged."""
    rank, world = dist.get_rank(), dist.get_world_size()
    config = make_config(stage, gradient_clipping=0.5, zero={"param_persistence_threshold": 0})

    def with_facts(model: nn.Module, plan: object, facts: UnitFacts, **others: object) -> object:
        special = UnitFacts(facts.mesh, divisor=1.0, early=4.0)  # divided early, and made good after the reduction
        others["facts_of"] = lambda name, _: special if name.startswith("2.") else facts
        return build(model, plan, facts, **others)

    with mock.patch.object(initialize, "build", with_facts):
        engine = start(_model(), config)
    plain = _model()
    optimizer, norms = gate_optimizer(plain), 0.0
    for step in range(3):
        batches = [torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + r)) for r in range(world)]
        engine.backward(engine(batches[rank]).square().mean())
        engine.step()
        optimizer.zero_grad()
        for batch in batches:
            plain(batch).square().mean().backward()
        for name, param in plain.named_parameters():
            param.grad /= 1 if name.startswith("2.") else world
        norm = float(nn.utils.clip_grad_norm_(plain.parameters(), 0.5))
        norms = max(norms, abs(engine.get_global_grad_norm() - norm) / norm)
        optimizer.step()
    wrong, _ = parameter_error(engine.module, {name: param.detach() for name, param in plain.named_parameters()})
    mixed = [u.name for u in engine.runtime.units if len({s.name.startswith("2.") for s in u.layout.segments}) > 1]
    assert not mixed
    engine.destroy()
    return wrong, norms


@pytest.mark.parametrize("stage", STAGES)
def test_units_with_another_divisor(pool2: RankPool, stage: int) -> None:
    for wrong, norm in pool2.run(_train, stage):
        assert wrong < 1e-6 and norm < 1e-6
