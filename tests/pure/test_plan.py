"""The table: where each state of each kind of unit rests, for every configuration. Read it as the specification."""

from typing import Any

import pytest

from deepspeed.config import load_config
from deepspeed.zero.plan import Spread, StatePlan, Tier, UnitPlan, ZeroPlan, make_plan
from tests.harness.rows import for_each

S, R = Spread.SHARDED, Spread.REPLICATED
RANKS = 8
# configuration -> (PARAM, GRAD, OPTIM) by axis, inner first; PARAM of small parameters; reduced at every backward?
TABLE: dict[str, tuple[dict[str, Any], str, str, str, str, bool]] = {
    "0": ({"stage": 0}, "R", "R", "R", "R", False),
    "1": ({"stage": 1}, "R", "S", "S", "R", False),
    "2": ({"stage": 2}, "R", "S", "S", "R", True),
    "3": ({"stage": 3}, "S", "S", "S", "R", True),
    "3 mics 2": ({"stage": 3, "mics_shard_size": 2}, "SR", "SR", "SR", "RR", True),
    "3 mics 8": ({"stage": 3, "mics_shard_size": 8}, "S", "S", "S", "R", True),
    "3 hpz 4": ({"stage": 3, "zero_hpz_partition_size": 4}, "SR", "SS", "SS", "RR", True),
    "3 hpz 1": ({"stage": 3, "zero_hpz_partition_size": 1}, "S", "S", "S", "R", True),
    "3 hpz 8": ({"stage": 3, "zero_hpz_partition_size": 8}, "S", "S", "S", "R", True),
}


def _plan(zero: dict[str, Any], ranks: int = RANKS) -> ZeroPlan:
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    return make_plan(load_config(config, world_size=ranks), ranks)


def _say(state: StatePlan | None) -> str:
    return "-" if state is None else "".join(way.value for way in state.spread)


@for_each("name", TABLE)
def test_the_table(name: str) -> None:
    zero, param, grad, optim, small, each_backward = TABLE[name]
    plan = _plan(zero)
    assert [_say(s) for s in (plan.regular.param, plan.regular.grad, plan.regular.optim)] == [param, grad, optim]
    assert [_say(s) for s in (plan.persistent.param, plan.persistent.grad, plan.persistent.optim)] == [
        small,
        grad,
        optim,
    ]
    assert plan.regular.reduce_each_backward is plan.persistent.reduce_each_backward is each_backward
    for persistent in (False, True):
        frozen = plan.row(trainable=False, persistent=persistent)
        assert (_say(frozen.param), frozen.grad, frozen.optim) == (small if persistent else param, None, None)
        assert plan.row(trainable=True, persistent=persistent) is (plan.persistent if persistent else plan.regular)
    everything = [plan.regular.param, plan.regular.grad, plan.regular.optim]
    assert all(state is not None and state.tier is Tier.DEVICE for state in everything)


def test_shard_groups_only_where_parameters_are_sharded() -> None:
    assert _plan({"stage": 2, "mics_shard_size": 2}).inner_size is None
    assert _plan({"stage": 3, "mics_shard_size": 2}).inner_size == 2
    assert _plan({"stage": 3, "zero_hpz_partition_size": 4}).inner_size == 4
    assert _plan({"stage": 3}).inner_size is None


def test_sizes_come_from_the_configuration() -> None:
    plan = _plan(
        {
            "stage": 3,
            "reduce_bucket_size": 11,
            "prefetch_bucket_size": 12,
            "param_persistence_threshold": 13,
            "max_live_parameters": 14,
        }
    )
    assert (plan.pack_numel, plan.prefetch_numel, plan.persistence_numel, plan.live_numel) == (11, 12, 13, 14)
    assert _plan({"stage": 3, "max_reuse_distance": 15}).reuse_numel == 15
    assert _plan({"stage": 3}).reuse_numel == 0, "the default must not keep whole small models gathered"
    assert _plan({"stage": 2, "param_persistence_threshold": 13}).persistence_numel == 0
    assert _plan({"stage": 3, "overlap_comm": False}).overlap is False
    assert _plan({"stage": 3}).overlap is True
    assert _plan({"stage": 3, "divergence": "error"}).divergence == "error"


def test_a_row_refuses_the_impossible() -> None:
    sharded, whole = StatePlan((S,)), StatePlan((R,))
    with pytest.raises(AssertionError, match="come and go together"):
        UnitPlan(whole, whole, None)
    with pytest.raises(AssertionError, match="sharded optimizer state"):
        UnitPlan(sharded, sharded, whole)
    assert UnitPlan(whole, sharded, sharded).frozen() == UnitPlan(whole, None, None)
    assert sharded.sharded and not whole.sharded
