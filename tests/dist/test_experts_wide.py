"""Experts over up to eight ranks: every layout equals one process, and sums in 16 bits are as good as on one rank."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepspeed.tools.verify.grads import scaled_error
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from tests.dist.test_experts import DROPLESS, config_of, model_of, parity, pipeline
from tests.harness.experts import Stacked, tokens_of
from tests.harness.pool import RankPool
from tests.harness.training import start

pytestmark = pytest.mark.timeout(600)
ROUTINGS: dict[str, dict[str, Any]] = {
    "top-1": {"experts": 8, "k": 1},
    "top-2": {"experts": 8, "k": 2},
    "top-8": {"experts": 16, "k": 8},
}
LIMITED = {**DROPLESS, "drop_tokens": True, "min_capacity": 2}


@pytest.mark.exhaustive
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("etp", [1, 2])
@pytest.mark.parametrize("ep", [1, 2, 4])
def test_every_layout_of_four_ranks_equals_one_process(pool4: RankPool, ep: int, etp: int, tp: int) -> None:
    """Layouts with more ranks an expert group than there are do not exist."""
    kind = "stacked" if tp == 1 else "llama"
    changes = {"etp": etp, **({"tensor_parallel": {"autotp_size": tp}} if tp > 1 else {})}
    for stage, routing in itertools.product(range(4), ROUTINGS) if ep * etp <= 4 else ():
        for errors in pool4.run(parity, kind, ep, stage, ROUTINGS[routing], dict(changes), ""):
            assert max(errors.values()) <= 2e-6, (stage, routing, errors)
    for stage in range(4) if tp == etp == 1 else ():
        for errors in pool4.run(parity, "layered", ep, stage, LIMITED, {}, ""):
            assert max(errors.values()) <= 2e-6, (stage, "capacity", errors)


EIGHT: dict[str, tuple[Any, ...]] = {
    "each rank its own": ("stacked", 8, 3, {"experts": 16, "k": 8}, {}, ""),
    "two ranks an expert, of which each has tokens of others": ("stacked", 4, 1, {}, {}, "skewed"),
    "two ranks share each of four": ("stacked", 4, 3, {}, {"etp": 2}, ""),
    "folded over tensor-parallel ranks": ("llama", 4, 3, {}, {"tensor_parallel": {"autotp_size": 2}}, ""),
    "folded, all ranks": ("llama", 4, 2, {}, {"tensor_parallel": {"autotp_size": 2}, "etp": 2}, ""),
    "shard groups": ("stacked", 2, 3, {}, {"zero": {"mics_shard_size": 4}}, ""),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("cell", EIGHT)
def test_eight_ranks_equal_one_process(pool8: RankPool, cell: str) -> None:
    for errors in pool8.run(parity, *EIGHT[cell], time_limit=240):
        assert max(errors.values()) <= 2e-6, errors


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", [1, 3])
def test_eight_ranks_in_two_stages_equal_one_process(pool8: RankPool, stage: int) -> None:
    for apart in pool8.run(pipeline, stage, time_limit=240):
        assert max(apart) < 1e-6


def _rounded(ep: int) -> tuple[float, float]:
    """Errors of bf16 training: gradients of the first step, parameters after three, relative to fp32 on one process."""
    rank, world = dist.get_rank(), dist.get_world_size()
    plain = model_of("stacked", 1)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.1)
    config = config_of("stacked", ep, 3, bf16={"enabled": True})
    engine = start(Stacked(), {**config, "gradient_clipping": 0.0})
    wanted, grads = dict(plain.named_parameters()), []
    for step in range(3):
        optimizer.zero_grad()
        (sum(plain(tokens_of(step, r)) for r in range(world)) / world).backward()  # type: ignore[union-attr]
        engine.backward(engine(tokens_of(step, rank)))
        grads += [
            scaled_error(safe_get_full_grad(param), wanted[name].grad)  # type: ignore[arg-type]
            for name, param in (engine.module.named_parameters() if step == 0 else ())
        ]
        optimizer.step()
        engine.step()
    values = engine.module.named_parameters()
    params = [scaled_error(safe_get_full_fp32_param(param), wanted[name].detach()) for name, param in values]
    engine.destroy()
    return sum(grads) / len(grads), sum(params) / len(params)


def test_sixteen_bits_lose_no_more_over_ranks_than_on_one(pool2: RankPool) -> None:
    """Routing is decided by scores in 16 bits: a token near a border may go elsewhere, alike in both."""
    alone, divided = pool2.run(_rounded, 1)[0], pool2.run(_rounded, 2)[0]
    assert divided[0] <= 1.25 * alone[0] and divided[1] <= 1.25 * alone[1], (alone, divided)
