"""Which units the device updates where the host updates the rest: every so many-th, and never more than its share."""

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from deepspeed.config import load_config
from deepspeed.zero.memory.fit import UnitSize, Widths, memory_plan
from deepspeed.zero.plan import AT_ONCE, Tier, every_so_many, make_plan
from deepspeed.zero.update.delayed import DelayedSettings
from deepspeed.zero.update.registry import settings_of
from deepspeed.zero.update.staged import Rates, StagedSettings, slowest


@pytest.mark.parametrize("every", [2, 3, 5, 7])
def test_a_share_of_one_in_k_is_every_kth_of_equal_units(every: int) -> None:
    assert every_so_many([64] * 70, 1 - (1 - 1 / every)) == [i % every == every - 1 for i in range(70)]


@given(st.lists(st.integers(0, 10**9), max_size=40), st.floats(0, 1))
def test_it_is_never_more_than_the_share_of_the_units_so_far(numels: list[int], share: float) -> None:
    chosen = every_so_many(numels, share)
    for stop in range(1, len(numels) + 1):
        taken = sum(n for n, there in zip(numels[:stop], chosen, strict=False) if there)
        if chosen[stop - 1]:
            assert taken <= share * sum(numels[:stop]) * (1 + 1e-8)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.floats(0, 1))
def test_what_is_missing_to_the_share_is_less_than_the_largest_unit(numels: list[int], share: float) -> None:
    chosen = every_so_many(numels, share)
    taken = sum(n for n, there in zip(numels, chosen, strict=True) if there)
    assert share * sum(numels) - taken < max(numels) + 1e-6


def test_nothing_and_everything() -> None:
    assert every_so_many([3, 4], 0.0) == [False, False] and every_so_many([3, 4], 1.0) == [True, True]
    assert every_so_many([], 0.5) == []


def test_host_and_bus_end_together_with_the_share_of_their_rates() -> None:
    rates = Rates(host=3.0, up=1.0, down=0.5)
    share = rates.device_share()
    assert share * max(rates.up, rates.down) == pytest.approx((1 - share) * rates.host) and share == 0.75


def test_the_slowest_rank_decides_in_each_respect() -> None:
    assert slowest([Rates(1, 5, 3), Rates(2, 4, 6)]) == Rates(2, 5, 6)


def test_the_row_of_a_unit_that_visits_keeps_its_gradient_on_the_device_and_two_are_planned_there() -> None:
    offload = {"device": "cpu", "ratio": 0.5, "device_states": "travel"}
    config = {"train_batch_size": 2, "zero_optimization": {"stage": 2, "offload_optimizer": offload}}
    loaded = load_config(config, world_size=2)
    plan = make_plan(loaded, 2, settings_of(loaded))
    row = plan.row(trainable=True, persistent=False)
    there = row.updated_on_device(loads=plan.offload.update.loads_states)
    assert there.loads_states and not row.loads_states and plan.offload.device_share == 0.5
    assert there.grad is not None and there.optim is not None
    assert (there.grad.tier, there.optim.tier) == (Tier.DEVICE, Tier.HOST)
    sizes = [UnitSize(8192, 2, there), UnitSize(8192, 2, row)]
    memory = memory_plan(sizes, [2], plan.offload, Widths(), prefetch=0, shared=False)
    lines = {line.what: line for line in memory.lines}
    assert lines["optimizer state on a visit"].device == 2 * 4096 * 12
    assert lines["optimizer state"].host == 2 * 4096 * 12 and lines["gradients"].device == 4096 * 4


def test_without_a_ratio_the_share_of_states_that_travel_is_measured() -> None:
    zero = {"stage": 1, "offload_optimizer": {"device": "cpu", "device_states": "travel"}}
    config = load_config({"train_batch_size": 1, "zero_optimization": zero}, world_size=1)
    assert settings_of(config) == StagedSettings(measured=True)


def test_a_delayed_update_has_its_gradients_while_new_ones_come_and_a_master_of_its_own() -> None:
    offload = {"device": "cpu", "delayed_update": True, "delayed_update_warm_up": 3}
    zero = {"stage": 1, "offload_optimizer": offload}
    config = load_config({"train_batch_size": 1, "zero_optimization": zero}, world_size=1)
    plan = make_plan(config, 1, settings_of(config))
    assert plan.offload.update == DelayedSettings(first=4)
    at_once = replace(plan.offload, update=AT_ONCE)
    sizes = [UnitSize(4096, 4, plan.row(trainable=True, persistent=False))]
    late, now = (
        {line.what: line for line in memory_plan(sizes, [1], o, Widths(), prefetch=0, shared=True).lines}
        for o in (plan.offload, at_once)
    )
    assert late["gradients"].host == 2 * now["gradients"].host == 2 * 4096 * 4
    assert late["optimizer state"].host - now["optimizer state"].host == 4096 * 4
