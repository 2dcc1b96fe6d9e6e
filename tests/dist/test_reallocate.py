"""Weights move from one layout of ranks to another: the target computes what the source computes, every byte travels
once to each rank that lacks it, and a plan is good for every later step.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepspeed.pipe.plain import cut_model
from deepspeed.reallocate import ParameterReallocation
from tests.harness.decoders import Llama, batch, loss_of
from tests.harness.pool import RankPool
from tests.harness.spy import CollectiveSpy
from tests.harness.training import ADAMW, start

pytestmark = pytest.mark.timeout(120)
ZERO = {"param_persistence_threshold": 20, "reduce_bucket_size": 400}
LAYOUTS: dict[str, dict[str, Any]] = {
    "zero0": {"stage": 0},
    "zero1": {"stage": 1},
    "zero3": {"stage": 3},
    "zero3 on the host": {"stage": 3, "zero": dict.fromkeys(("offload_param", "offload_optimizer"), {"device": "cpu"})},
    "zero3 in groups": {"stage": 3, "zero": {"mics_shard_size": 2}},
    "bf16": {"stage": 3, "bf16": {"enabled": True}},
    "tp2": {"stage": 0, "tp": 2},
    "tp2 zero1": {"stage": 1, "tp": 2},
    "tp2 zero3": {"stage": 3, "tp": 2},
    "tp4": {"stage": 0, "tp": 4},
    "tp2 to generate": {"stage": 0, "tp": 2, "optimizer": None},
    "pp2": {"stage": 1, "pp": 2},
}  # fmt: skip


def model(*, other: bool = False) -> nn.Module:
    made = Llama(tied=True, bias=True)
    if other:
        with torch.no_grad():
            for p in made.parameters():
                p.fill_(-3.0)
    return made


def engine_of(layout: str, *, other: bool = False, ranks: tuple[int, ...] | None = None) -> Any:
    """An engine of ``model``; of other weights, so that what is not moved is seen."""
    facts = dict(LAYOUTS[layout])
    stage, zero, tp, pp = facts.pop("stage"), facts.pop("zero", {}), facts.pop("tp", 1), facts.pop("pp", 1)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": ADAMW,
        "zero_optimization": {"stage": stage, **ZERO, **zero},
        "tensor_parallel": {"autotp_size": tp},
        **facts,
    }
    module = model(other=other)
    if pp > 1:
        module = cut_model(module, pp, loss_fn=lambda out, labels: out.square().mean())
        config["gradient_accumulation_steps"] = 2
    how: dict[str, Any] = {}
    if ranks is not None:
        made = dist.new_group(list(ranks))
        how["mpu"] = SimpleNamespace(get_data_parallel_group=lambda: made)
        if dist.get_rank() not in ranks:
            return None
    return start(module, {k: v for k, v in config.items() if v is not None}, **how)


def whole(engine: Any) -> dict[str, Tensor]:
    return {n: t.clone() for bucket in engine.stream_weights() for n, t in bucket}


def logits(engine: Any) -> Tensor:
    with torch.no_grad():
        out: Tensor = engine(batch(3, 0))
    return out.float()


def train(engine: Any, turn: int) -> None:
    engine.backward(loss_of(engine, batch(turn, 0)))
    engine.step()


def equal(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return list(sorted(one)) == list(sorted(two)) and all(torch.equal(one[n], two[n].to(one[n])) for n in one)


def between(first: str, second: str) -> dict[str, Any]:
    """There, after a step again, and back."""
    source, target = engine_of(first), engine_of(second, other=True)
    piped = "pp" in LAYOUTS[first]
    there = ParameterReallocation(source, target, max_bytes=3000)
    with CollectiveSpy() as spy:
        there.run()
    found = {"moved": spy.nbytes("isend"), "plan": there.plan, "equal": equal(whole(source), whole(target))}
    if not piped:
        found["forward"] = float((logits(source) - logits(target)).abs().max())
        train(source, 0)
        there.run()
        found["again"] = equal(whole(source), whole(target))
        found["differs"] = float(logits(target).abs().sum())
    before = whole(target)
    if target.optimizer is not None:
        train(target, 1)
        back = ParameterReallocation(target, source, max_bytes="1MB")
        back.run()
        found["back"] = equal(whole(source), whole(target)) and not equal(before, whole(source))
        if not piped:
            train(source, 2)
            found["goes on"] = not equal(whole(source), whole(target))
    for engine in (source, target):
        engine.destroy()
    return found


PAIRS = [
    ("zero3", "tp2 zero1"), ("tp2 zero3", "zero3"), ("zero3 in groups", "tp2 to generate"), ("pp2", "tp2"),
    ("zero3 on the host", "zero1"), ("tp4", "tp2 zero3"),
]  # fmt: skip


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_any_layout_becomes_any_other_and_back(pool4: RankPool, first: str, second: str) -> None:
    answers = pool4.run(between, first, second)
    plan = answers[0]["plan"]
    assert sum(found["moved"] for found in answers) == plan.bytes_moved == plan.lower_bound > 0
    for found in answers:
        assert found["plan"] == plan, "the same on all ranks"
        assert found["equal"] and found.get("again", True) and found.get("back", True) and found.get("goes on", True)
        assert found.get("forward", 0.0) <= 1e-5
    for rank, found in enumerate(answers):
        assert found["moved"] == plan.sent[rank]
