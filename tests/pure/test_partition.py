"""Which parameters form a unit: repeated blocks, packed leftovers, buckets where nothing is gathered."""

from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.client.zero.leaf import set_z3_leaf_modules
from deepspeed.config import load_config
from deepspeed.tools.verify.models import Stack, Tied
from deepspeed.zero.partition import Partition, find_blocks, partition, square_sum
from deepspeed.zero.plan import make_plan
from tests.harness.cases import all_cases


def _parts(model: nn.Module, stage: int = 3, **zero: Any) -> Partition:
    settings = {"stage": stage, "param_persistence_threshold": 0, **zero}
    config = load_config({"train_micro_batch_size_per_gpu": 1, "zero_optimization": settings}, world_size=2)
    return partition(model, make_plan(config, 2), trainable=[p for p in model.parameters() if p.requires_grad])


THRESHOLDS, BUCKETS = (0, 20, 10**9), (1, 200, 10**9)


@pytest.mark.parametrize(  # every pair of two of them
    ("stage", "threshold", "bucket"),
    [(stage, THRESHOLDS[i], BUCKETS[(stage + i) % 3]) for stage in range(4) for i in range(3)],
)
def test_every_parameter_of_every_case_has_exactly_one_unit(stage: int, threshold: int, bucket: int) -> None:
    for case in all_cases().values():
        model = case.build()
        parts = _parts(model, stage, param_persistence_threshold=threshold, reduce_bucket_size=bucket)
        names = [name for unit in parts.units for name in unit.names]
        assert sorted(names) == sorted(name for name, _ in model.named_parameters())
        for unit in parts.units:
            assert unit.numel == sum(p.numel() for p in unit.params)
            assert {p.dtype for p in unit.params} == {unit.dtype}
            assert {p.requires_grad for p in unit.params} == {unit.trainable}
        index_of = {p: i for i, unit in enumerate(parts.units) for p in unit.params}
        for module in model.modules():
            needed = {index_of[p] for p in module.parameters(recurse=False)}
            assert needed <= set(parts.touches.get(module, [])), f"{type(module).__name__} lacks a unit it touches"


def test_blocks_are_what_the_model_repeats() -> None:
    assert [name for name, _ in find_blocks(Stack())] == ["layers.0", "layers.1", "layers.2"]
    assert [name for name, _ in find_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.LayerNorm(2)))] == []
    assert [name for name, _ in find_blocks(nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}))] == ["a", "b"]
    nested = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2)])
    assert [name for name, _ in find_blocks(nested)] == ["0", "1"], "the outermost repetition counts"


def test_a_leaf_mark_makes_a_block() -> None:
    model = nn.Sequential(Stack(), nn.LayerNorm(5))
    set_z3_leaf_modules(model, [Stack])
    assert [name for name, _ in find_blocks(model)] == ["0"]
    whole = Stack()
    set_z3_leaf_modules(whole, [Stack])
    assert find_blocks(whole) == [("", whole)]
    assert len(_parts(model).units) == 2


def test_tied_parameters_have_one_unit_and_both_modules_touch_it() -> None:
    model = Tied()
    parts = _parts(model)
    (index,) = [i for i, unit in enumerate(parts.units) if "embed.weight" in unit.names]
    assert index in parts.touches[model.embed] and index in parts.touches[model.head]


def test_replicated_parameters_are_bucketed_by_size() -> None:
    parts = _parts(Stack(), 2, reduce_bucket_size=100)
    assert all(unit.numel <= 100 or len(unit.params) == 1 for unit in parts.units)
    assert len(_parts(Stack(), 2, reduce_bucket_size=10**6).units) == 1


def test_small_parameters_persist_up_to_the_model_threshold() -> None:
    parts = _parts(Stack(), param_persistence_threshold=8)
    small = [unit for unit in parts.units if unit.persistent]
    assert {p.numel() for unit in small for p in unit.params} <= set(range(9))
    assert all(p.numel() > 8 for unit in parts.units if not unit.persistent for p in unit.params)
    capped = _parts(Stack(), param_persistence_threshold=8, model_persistence_threshold=20)
    assert 0 < sum(unit.numel for unit in capped.units if unit.persistent) <= 20


def test_large_leftovers_are_units_of_their_own() -> None:
    with torch.device("meta"):
        model = nn.ModuleDict(
            {"embed": nn.Embedding(2_000_000, 1), "norm": nn.LayerNorm(8), "head": nn.Linear(1_500_000, 1)}
        )
    names = [unit.names for unit in _parts(model).units]
    assert ["embed.weight"] in names
    assert ["head.weight", "head.bias"] in names, "weight and bias of one module are needed at the same time"


def test_units_do_not_depend_on_the_rank_or_the_call() -> None:
    first, second = (_parts(all_cases()["frozen"].build()) for _ in range(2))
    assert [(u.name, u.names) for u in first.units] == [(u.name, u.names) for u in second.units]


def test_what_is_only_reduced_is_cut_so_that_reductions_overlap_with_the_backward() -> None:
    """A bucket of 5e8 elements (the key's default) would be one reduction at the end of the backward of most models."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(3000, 3000) for _ in range(12)), nn.Embedding(20_000, 3000))
    for stage in (0, 1, 2):
        units = _parts(model, stage).units
        assert max(u.numel for u in units if len(u.params) > 1) <= 1 << 25
        assert len(units) == 5, "whole buckets, and the large embedding alone"
        assert (
            max(u.numel for u in _parts(model, stage, reduce_bucket_size=10_000_000).units if len(u.params) > 1)
            <= 10_000_000
        )


def test_the_square_of_many_elements_is_right_to_fp32() -> None:
    """torch's norm of them at once is wrong by 1e-4 on the CPU, as it adds up in a few lanes."""
    values = torch.rand(1 << 23, generator=torch.Generator().manual_seed(0)) + 0.5
    exact = sum(float(piece.double().square().sum()) for piece in values.split(1 << 16))
    assert abs(float(square_sum(values)) / exact - 1.0) < 1e-6
    assert float(square_sum(values[:0])) == 0.0
