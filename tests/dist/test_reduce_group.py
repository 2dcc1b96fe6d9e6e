"""Gradients are reduced over a communicator of their own where that is asked for: the same values, other connections,
and nothing of it is left when the engine ends.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed.tools.verify.grads import full_parameters
from deepspeed.tools.verify.models import IN_FEATURES, case_named
from tests.harness.pool import RankPool
from tests.harness.training import make_config, start

pytestmark = pytest.mark.timeout(120)

_STEPS = 3


def _train(zero: dict[str, Any]) -> dict[str, Any]:
    """Losses, weights, and which operations went over the axis and over the group of the sums."""
    case = case_named("plain")
    torch.manual_seed(3)
    before = set(dist.distributed_c10d._world.pg_map)
    engine = start(case.build(), make_config(3, zero=zero))
    axis, apart = engine.mesh.groups[0], engine.mesh.reducing
    sent: dict[str, set[str]] = {"axis": set(), "apart": set()}
    for name, group in (("axis", axis), ("apart", apart)):
        if group is not None:
            group.ledger.append(lambda op, *_, name=name: sent[name].add(op))
    losses = []
    for step in range(_STEPS):
        loss = _loss(engine, step)
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    weights: dict[str, Tensor] = full_parameters(engine.module)
    engine.destroy()
    left = len(set(dist.distributed_c10d._world.pg_map) - before)
    return {"losses": losses, "weights": weights, "sent": sent, "left": left, "apart": apart is not None}


def _loss(engine: Any, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    loss: Tensor = engine(torch.randn(4, IN_FEATURES, generator=generator)).square().mean()
    return loss


def _both(zero: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    return _train(zero), _train({**zero, "separate_reduce_group": True})


def _check(runs: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    for shared, apart in runs:
        assert not shared["apart"] and apart["apart"]
        assert shared["losses"] == apart["losses"]
        assert all(torch.equal(value, apart["weights"][name]) for name, value in shared["weights"].items())
        assert {"all_gather", "reduce_scatter"} <= shared["sent"]["axis"]
        assert "all_gather" in apart["sent"]["axis"] and "reduce_scatter" not in apart["sent"]["axis"]
        assert apart["sent"]["apart"] == {"reduce_scatter"}
        assert shared["left"] == apart["left"] == 0


def test_sums_over_their_own_communicator_are_equal_bit_for_bit(pool2: RankPool) -> None:
    _check(pool2.run(_both, {"param_persistence_threshold": 0}))


def test_of_two_axes_the_inner_one_has_it(pool4: RankPool) -> None:
    _check(pool4.run(_both, {"param_persistence_threshold": 0, "mics_shard_size": 2}))


def _without_shards() -> bool:
    engine = start(case_named("plain").build(), make_config(2, zero={"separate_reduce_group": True}))
    none = engine.mesh.reducing is None
    engine.destroy()
    return none


def test_where_nothing_is_gathered_in_the_backward_there_is_none(pool2: RankPool) -> None:
    assert pool2.run(_without_shards) == [True, True]
