"""What weights do not move into, or out of, is refused on all ranks by a sentence, and what came before goes on."""

import gc
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import deepspeed
from deepspeed.reallocate import ParameterReallocation
from deepspeed.reallocate.resting import RestingWeights
from tests.dist.test_reallocate import engine_of, equal, model, whole
from tests.harness.decoders import batch, loss_of
from tests.harness.pool import RankPool
from tests.harness.training import make_config, outcome, start

pytestmark = pytest.mark.timeout(120)


class Other(nn.Module):
    """The names of a model and one more, or another shape."""

    def __init__(self, **sizes: int) -> None:
        super().__init__()
        for name, size in sizes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(size)))


def refused() -> dict[str, str]:
    """What both ranks are told, by case."""
    rank, made = dist.get_rank(), ParameterReallocation
    engine, target = engine_of("zero3"), engine_of("zero1", other=True)
    small, texts = start(Other(a=5, b=6), make_config(3)), dict[str, str]()
    alone = dist.new_group([0])
    cases: dict[str, Any] = {
        "missing": lambda: made(small, Other(a=5, b=6, c=2)),
        "extra": lambda: made(small, Other(a=5)),
        "shape": lambda: made(small, Other(a=5, b=7)),
        "options": lambda: made(small, Other(a=5, b=6), strict=bool(rank)),
        "alone": lambda: made(small if rank == 0 else None, Other(a=5, b=6)),
        "nobody": lambda: made(None, Other(a=5)),
        "module": lambda: made(small.module, Other(a=5, b=6)),
        "kind": lambda: made(small, "a model" if rank else Other(a=5, b=6)),
        "bytes": lambda: made(small, Other(a=5, b=6), max_bytes="much"),
        "shared": lambda: made(engine, engine),
        "group": lambda: made(small, Other(a=5, b=6), group=alone),
    }
    for case, call in cases.items():
        texts[case] = outcome(call)
    loose = Other(a=5)
    made(small, loose, strict=False).run()
    there, back = made(engine, target), made(target, engine)
    with engine.unsharded():
        texts["gathered"] = outcome(back.run)
    if rank == 1:
        engine.runtime.depth = 1
    texts["inside"] = outcome(there.run)
    engine.runtime.depth = 0
    region, count = RestingWeights.region, [0]

    def fails(self: RestingWeights, *args: Any) -> Tensor:
        count[0] += 1
        if count[0] == 5 and rank == 1:
            raise OSError("the drive is gone")
        return region(self, *args)

    with patch.object(RestingWeights, "region", fails):
        texts["midway"] = outcome(there.run)
    there.run()
    texts["then"] = "" if equal(whole(engine), whole(target)) else "not moved"
    target.destroy()
    texts["destroyed"] = outcome(there.run)
    del target
    gc.collect()
    engine.destroy()
    small.destroy()
    return texts


def test_what_does_not_fit_is_refused_on_all_ranks(pool2: RankPool) -> None:
    expected = {
        "missing": "c: in the target and not in the source",
        "extra": "b: in the source and not in the target",
        "shape": "b is [6] in the source and [7] in the target",
        "options": "rank 1 passes other options than rank 0",
        "alone": "rank 1 takes part in the source of rank 0",
        "nobody": "no rank has a source",
        "module": "the source is the module of an engine; pass the engine",
        "kind": "the target is str; pass an engine, a module, or None",
        "bytes": "max_bytes",
        "shared": "is one object in source and target",
        "gathered": "are gathered, in unsharded()",
        "inside": "called inside a forward or backward",
        "midway": "the drive is gone",
        "destroyed": "this engine was destroyed",
    }
    answers = pool2.run(refused)
    for rank, texts in enumerate(answers):
        assert texts["then"] == ""
        for case, text in expected.items():
            assert text in texts[case], (rank, case, texts[case])
    assert "rank 1 takes part in the source of rank 0, on ranks [0, 1]" in answers[0]["group"]
    assert "this rank is not in the group" in answers[1]["group"]
    assert "rank 1: the target is str" in answers[0]["kind"], "the others hear of it"
    assert "the target may hold parts of two steps" in answers[0]["midway"]


def half_brought() -> dict[str, str]:
    """What both ranks are told of modules that are not what they seem, by case."""
    rank, made, full = dist.get_rank(), ParameterReallocation, Other(a=5, b=6)
    line, square = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (1, 2))
    nowhere = Other(a=5, b=6).to("meta")
    with deepspeed.zero.Init(config_dict_or_path={"train_batch_size": 2, "zero_optimization": {"stage": 3}}):
        born = Other(a=5, b=6)

    def of_parts(values: Any) -> Other:
        module = Other(b=6)
        module.a = nn.Parameter(values)
        return module

    parts = of_parts(distribute_tensor(torch.zeros(5), line, [Shard(0)]))
    cases: dict[str, Any] = {
        "meta target": lambda: made(full, nowhere),
        "meta source": lambda: made(nowhere, full),
        "born": lambda: made(full, born if rank == 0 else None),
        "parts": lambda: made(full, parts if rank == 0 else None),
        "sums": lambda: made(of_parts(DTensor.from_local(torch.ones(5), line, [Partial()])), full),
        "square": lambda: made(full, of_parts(distribute_tensor(torch.zeros(5), square, [Replicate(), Shard(0)]))),
    }
    return {case: outcome(call) for case, call in cases.items()}


def test_modules_in_parts_are_brought_by_all_their_ranks(pool2: RankPool) -> None:
    expected = {
        "meta target": "a of the target is on meta, without memory",
        "meta source": "a of the source is on meta, without memory",
        "born": "rank 1 takes part in the target of rank 0, on ranks [0, 1], but does not bring it",
        "parts": "rank 1 takes part in the target of rank 0, on ranks [0, 1], but does not bring it",
        "sums": "a is a DTensor (Partial(sum),) over a mesh of (2,) ranks",
        "square": "a is a DTensor (Replicate(), Shard(dim=0)) over a mesh of (1, 2) ranks",
    }
    for texts in pool2.run(half_brought):
        for case, text in expected.items():
            assert "UsageError" in texts[case] and text in texts[case], (case, texts[case])


def moved_between_passes(layout: str) -> dict[str, Any]:
    """What ``run`` says while forwards of the target wait for their backwards, on one rank or on both."""
    source, target = engine_of("bf16 zero1" if "bf16" in layout else "zero1"), engine_of(layout, other=True)
    there, first = ParameterReallocation(source, target), dist.get_rank() == 0
    before, texts = whole(target), {}

    def forward() -> Tensor:
        return loss_of(target, batch(0, 0))

    losses = [forward(), forward()]
    texts["two"] = outcome(there.run)
    target.backward(losses.pop())
    texts["one"] = outcome(there.run)
    unmoved = equal(before, whole(target))
    target.backward(losses.pop())
    texts["none"] = outcome(there.run)
    moved = equal(whole(source), whole(target))
    target.step()
    loss: Any = forward()
    loss = loss if first else None
    texts["one rank"] = outcome(there.run)
    loss = None
    texts["dropped"] = outcome(there.run)
    with torch.no_grad():
        loss = forward()
    texts["evaluated"] = outcome(there.run)
    moved = moved and equal(whole(source), whole(target))
    for engine in (source, target):
        engine.destroy()
    return {"texts": texts, "unmoved": unmoved, "moved": moved}


@pytest.mark.parametrize("layout", ["zero0", "bf16 zero1", "zero3"])
def test_weights_do_not_move_between_a_forward_and_its_backward(pool2: RankPool, layout: str) -> None:
    for found in pool2.run(moved_between_passes, layout):
        texts = found["texts"]
        for when in ("two", "one", "one rank"):
            assert "a forward of the target has had no backward yet" in texts[when], (when, texts[when])
            assert "UsageError" in texts[when], (when, texts[when])
        assert not texts["none"] and not texts["dropped"] and not texts["evaluated"], texts
        assert found["unmoved"] and found["moved"]


def moved_under_a_plain_graph() -> str:
    source, target = engine_of("zero1"), model(other=True)
    there = ParameterReallocation(source, target)
    loss = loss_of(target, batch(0, 0))
    there.run()
    said = outcome(loss.backward)
    source.destroy()
    return said


def test_a_plain_target_s_graph_is_refused_by_torch(pool2: RankPool) -> None:
    for said in pool2.run(moved_under_a_plain_graph):
        assert "modified by an inplace operation" in said
