"""The harness itself: results in rank order, every traceback shown, hangs and crashes end fast, the pool recovers."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.harness.faults import Faults, InjectedFault
from tests.harness.patience import slowdown, too_long
from tests.harness.pool import RankFailure, RankPool
from tests.harness.spy import CollectiveSpy


def _sum_of_ranks(offset: int) -> tuple[int, float]:
    value = torch.tensor(float(dist.get_rank() + offset))
    dist.all_reduce(value)
    return dist.get_rank(), float(value)


def _raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"rank {rank} says no")


def _hang_on(rank: int) -> None:
    if dist.get_rank() != rank:
        dist.barrier()


def _die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_results_come_in_rank_order(pool2: RankPool) -> None:
    assert pool2.run(_sum_of_ranks, 1) == [(0, 3.0), (1, 3.0)]


def test_a_traceback_names_its_rank_and_the_pool_recovers(pool2: RankPool) -> None:
    with pytest.raises(RankFailure) as failure:
        pool2.run(_raise_on, 1)
    assert failure.value.types == {1: "ValueError"}
    assert "rank 1 says no" in str(failure.value)
    assert pool2.run(_sum_of_ranks, 0) == [(0, 1.0), (1, 1.0)]


def test_a_hang_ends_within_its_limit_and_shows_the_stack() -> None:
    started = time.monotonic()
    with RankPool(2) as pool, pytest.raises(RankFailure) as failure:
        pool.run(_sum_of_ranks, 0)
        pool.run(_hang_on, 1, time_limit=slowdown())  # enough for the rank that answers
    assert failure.value.types == {0: "hung"}
    assert "_hang_on" in str(failure.value)
    assert not too_long(started, 30)


def test_a_killed_rank_is_reported() -> None:
    with RankPool(2) as pool:
        with pytest.raises(RankFailure) as failure:
            pool.run(_die_on, 0)
        assert failure.value.types[0] == "died"
        assert "exit code -9" in str(failure.value)
        assert pool.run(_sum_of_ranks, 0)[0] == (0, 1.0)


def _spied() -> list[tuple[str, int, str, int]]:
    with CollectiveSpy() as spy:
        out = torch.empty(8)
        dist.all_gather_into_tensor(out, torch.ones(4))
        dist.reduce_scatter_tensor(torch.empty(4, dtype=torch.float64), torch.ones(8, dtype=torch.float64))
        dist.all_reduce(torch.ones(3), async_op=True).wait()
        dist.broadcast(torch.ones(2), src=0)
    dist.all_reduce(torch.ones(3))
    return [(call.name, call.nbytes, str(call.dtype), call.group_size) for call in spy.calls]


def test_spy_records_name_bytes_dtype_and_group(pool2: RankPool) -> None:
    assert pool2.run(_spied)[0] == [
        ("all_gather_into_tensor", 32, "torch.float32", 2),
        ("reduce_scatter_tensor", 64, "torch.float64", 2),
        ("all_reduce", 12, "torch.float32", 2),
        ("broadcast", 8, "torch.float32", 2),
    ]


def test_faults_fire_where_and_when_they_are_told() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    faults = Faults(model, rank=0)
    with faults:
        faults.raise_in("1", phase="forward", step=1, rank=0)
        faults.raise_in("0", phase="backward", step=2, rank=0)
        faults.nan_gradient("0.weight", step=3, rank=0)
        faults.raise_in("0", phase="forward", step=4, rank=1)
        model(torch.ones(1, 2)).sum().backward()
        faults.step = 1
        with pytest.raises(InjectedFault, match="forward of '1'"):
            model(torch.ones(1, 2))
        faults.step = 2
        with pytest.raises(InjectedFault, match="backward of '0'"):
            model(torch.ones(1, 2)).sum().backward()
        faults.step = 3
        model.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        assert model[0].weight.grad.isnan().all() and not model[1].weight.grad.isnan().any()
        faults.step = 4
        model(torch.ones(1, 2))
    faults.step = 1
    model(torch.ones(1, 2))
