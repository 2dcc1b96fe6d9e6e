"""A rank that raised, or went elsewhere, holds nobody in destroy(); what cannot be gathered without it stays for
later.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import deepspeed
from deepspeed.comm.mesh import groups
from deepspeed.errors import ReleasedParameterError
from deepspeed.tools.verify.grads import full_parameters
from tests.harness.cases import case_named
from tests.harness.lockstep import equal
from tests.harness.pool import RankPool
from tests.harness.training import make_config, start, train_step

pytestmark = pytest.mark.timeout(60)
SHARDED = {"param_persistence_threshold": 0}
CASE = "plain"


@contextmanager
def _impatient() -> Iterator[None]:
    with mock.patch.object(groups.meet_at_end, "__defaults__", (1.0,)):
        yield


def _gathered_later(zero: dict[str, Any]) -> dict[str, bool]:
    """The last rank comes to destroy() when the others have left it."""
    case = case_named(CASE)
    model = case.build()
    engine = start(model, make_config(3, zero={**SHARDED, **zero}))
    train_step(engine, case, 0)
    expected = full_parameters(model)
    store = dist.PrefixStore(f"left {engine.mesh.name}", c10d._get_default_store())
    last = dist.get_rank() == dist.get_world_size() - 1
    if last:
        store.wait(["0"])
    with _impatient():
        engine.destroy()
    store.set(str(dist.get_rank()), "")
    found = {}
    try:
        next(p for p in model.parameters() if p.dim() > 1).sum()
    except ReleasedParameterError:
        found["marked"] = True
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        found["gathered"] = equal(expected, {n: p.detach().clone() for n, p in model.named_parameters()})
    again = start(model, make_config(3, zero={**SHARDED, **zero}))
    found["taken over"] = equal(expected, full_parameters(model))
    train_step(again, case, 1)
    again.destroy()
    return found


@pytest.mark.parametrize(("ranks", "zero"), [(2, {}), (4, {"mics_shard_size": 2})], ids=["2", "4 in groups"])
def test_a_model_that_could_not_be_made_whole_is_marked_and_can_be_gathered_later(
    request: pytest.FixtureRequest, ranks: int, zero: dict[str, Any]
) -> None:
    pool: RankPool = request.getfixturevalue(f"pool{ranks}")
    assert pool.run(_gathered_later, zero) == [{"marked": True, "gathered": True, "taken over": True}] * ranks


def _one_raises() -> str:
    """Rank 1 raises where its batch is made, so rank 0 waits for it inside the forward."""
    case = case_named(CASE)
    engine = start(case.build(), make_config(3, zero=SHARDED))
    try:
        with _impatient():
            try:
                train_step(engine, case, 0)
                if dist.get_rank() == 1:
                    raise ValueError("a bad sample")
                train_step(engine, case, 1)
            finally:
                engine.destroy()
    except Exception as error:
        return type(error).__name__
    return ""


def test_an_exception_on_one_rank_ends_the_others_wait_in_a_forward(pool2: RankPool) -> None:
    first, second = pool2.run(_one_raises)
    assert second == "ValueError" and first
    pool2.close(at_once=True)  # whoever was left alone has closed the groups that it waited in
