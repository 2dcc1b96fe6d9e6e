"""Which parameters form a unit: repeated blocks, packed leftovers, buckets where nothing is gathered."""

import itertools
import random
from math import prod
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.client.zero.leaf import set_z3_leaf_modules
from deepspeed.config import load_config
from deepspeed.tools.verify.models import Stack, Tied
from deepspeed.zero.layout import ALIGNMENT_NUMEL, FlatLayout, Granularity, Segment, build_layout
from deepspeed.zero.partition import Partition, find_blocks, partition, square_sum
from deepspeed.zero.plan import Spread, StatePlan, Tier, UnitPlan, ZeroPlan, make_plan
from deepspeed.zero.update.selective.columns import Band, bands_of, chosen_of, width_of
from tests.harness.cases import all_cases, case_named
from tests.harness.rows import for_each


def _parts(model: nn.Module, stage: int = 3, **zero: Any) -> Partition:
    settings = {"stage": stage, "param_persistence_threshold": 0, **zero}
    config = load_config({"train_micro_batch_size_per_gpu": 1, "zero_optimization": settings}, world_size=2)
    return partition(model, make_plan(config, 2), trainable=[p for p in model.parameters() if p.requires_grad])


THRESHOLDS, BUCKETS = (0, 20, 10**9), (1, 200, 10**9)


SETTINGS = [(stage, THRESHOLDS[i], BUCKETS[(stage + i) % 3]) for stage in range(4) for i in range(3)]  # every pair


@for_each("name", all_cases())
def test_every_parameter_of_every_case_has_exactly_one_unit(name: str) -> None:
    model = case_named(name).build()
    for stage, threshold, bucket in SETTINGS:
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
        parts = {"embed": nn.Embedding(2_000_000, 1), "norm": nn.LayerNorm(8), "head": nn.Linear(1_500_000, 1)}
        model = nn.ModuleDict(parts)
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
        smaller = _parts(model, stage, reduce_bucket_size=10_000_000).units
        assert max(u.numel for u in smaller if len(u.params) > 1) <= 10_000_000


def test_the_square_of_many_elements_is_right_to_fp32() -> None:
    """torch's norm of them at once is wrong by 1e-4 on the CPU, as it adds up in a few lanes."""
    values = torch.rand(1 << 23, generator=torch.Generator().manual_seed(0)) + 0.5
    exact = sum(float(piece.double().square().sum()) for piece in values.split(1 << 16))
    assert abs(float(square_sum(values)) / exact - 1.0) < 1e-6
    assert float(square_sum(values[:0])) == 0.0


# -- layout ---------------------------------------------------------------------------------------------------------
Items = list[tuple[str, tuple[int, ...], int]]


def _random_items(seed: int, count: int) -> Items:
    draw = random.Random(seed)
    shapes = [(), (0,), (1,), (0, 4), (3,), (7, 5), (32,), (33,), (64, 2), (5, 1, 3)]
    return [(f"p{i}", draw.choice(shapes), draw.randrange(3)) for i in range(count)]


@for_each(("count", "shards", "granularity"), itertools.product([0, 1, 2, 17], [1, 2, 3, 8], Granularity))
def test_every_parameter_has_one_aligned_place(count: int, shards: int, granularity: Granularity) -> None:
    for seed in range(8):
        items = _random_items(seed, count)
        layout = build_layout(items, shards, granularity)
        assert sorted(s.name for s in layout.segments) == sorted(name for name, _, _ in items)
        shapes = {name: (shape, group) for name, shape, group in items}
        assert all((s.shape, s.group) == shapes[s.name] and s.numel == prod(s.shape) for s in layout.segments)
        assert layout.numel == layout.shard_numel * shards and layout.numel > 0
        assert layout.shard_numel % ALIGNMENT_NUMEL == 0
        assert all(s.offset % ALIGNMENT_NUMEL == 0 for s in layout.segments if s.numel)
        covered = sum(s.numel for s in layout.segments) + sum(stop - start for start, stop in layout.gaps)
        assert covered == layout.numel


@for_each("granularity", Granularity)
def test_owned_ranges_tile_every_segment(granularity: Granularity) -> None:
    layout = build_layout(_random_items(3, 20), 4, granularity)
    for segment in layout.segments:
        parts = [layout.overlap(segment, r * layout.shard_numel, (r + 1) * layout.shard_numel) for r in range(4)]
        pieces = [(lo, hi) for lo, hi in parts if lo < hi]
        assert sum(hi - lo for lo, hi in pieces) == segment.numel
        if granularity is Granularity.PARAMETER:
            assert len(pieces) <= 1, "a whole-tensor owner holds only a part"


def test_groups_are_contiguous_in_element_layouts() -> None:
    layout = build_layout(_random_items(5, 30), 2, Granularity.ELEMENT)
    groups = [s.group for s in layout.segments]
    assert groups == sorted(groups)


def test_element_padding_is_small() -> None:
    items: Items = [(f"p{i}", (1000,), 0) for i in range(10)]
    layout = build_layout(items, 8, Granularity.ELEMENT)
    assert layout.numel <= 10 * 1024 + 8 * ALIGNMENT_NUMEL


def test_whole_tensors_are_balanced() -> None:
    layout = build_layout([(f"p{i}", (100 * (i + 1),), 0) for i in range(9)], 3, Granularity.PARAMETER)
    fill = [0, 0, 0]
    for segment in layout.segments:
        fill[segment.offset // layout.shard_numel] += segment.numel
    assert max(fill) <= 1.2 * min(fill)


@for_each(
    ("segments", "numel", "shards", "granularity"),
    [
        ((Segment("a", (4,), 0), Segment("b", (4,), 2)), 32, 1, Granularity.ELEMENT),  # overlap
        ((Segment("a", (40,), 0),), 32, 1, Granularity.ELEMENT),  # too long
        ((Segment("a", (4,), 0),), 33, 2, Granularity.ELEMENT),  # uneven shards
        ((Segment("a", (4,), 14),), 32, 2, Granularity.PARAMETER),  # a cut tensor
    ],
)
def test_a_layout_proves_its_own_invariants(
    segments: tuple[Segment, ...], numel: int, shards: int, granularity: Granularity
) -> None:
    with pytest.raises(AssertionError):
        FlatLayout(segments, numel, shards, granularity)


# -- update columns -------------------------------------------------------------------------------------------------
SHAPES = [(5, 7), (3,), (4, 2, 3), (1, 9), (6, 1), ()]


def placed() -> list[tuple[int, tuple[int, ...]]]:
    """Parameters one behind the other, with gaps."""
    places, offset = [], 0
    for shape in SHAPES:
        places.append((offset, shape))
        offset += torch.Size(shape).numel() + 3
    return places


@pytest.mark.parametrize("cuts", [(0, 200), (0, 3, 5, 6, 20, 41, 42, 60, 200), tuple(range(0, 210, 4))])
def test_parts_of_all_ranges_together_are_the_whole(cuts: tuple[int, ...]) -> None:
    places, whole = placed(), torch.arange(1.0, 201.0)
    marked, squares = torch.zeros(200), [torch.zeros(width_of(shape)) for shape in SHAPES]
    columns = [torch.arange(width_of(shape))[:: 2 if len(shape) > 1 else 1] for shape in SHAPES]
    for start, stop in zip(cuts[:-1], cuts[1:], strict=True):
        flat, target = whole[start:stop], marked[start:stop]
        for band in bands_of(places, start, min(stop, 200)):
            some = columns[band.segment]
            compact = torch.full((band.rows * some.numel(),), float("nan"))
            band.take(flat, some, compact)
            assert torch.isfinite(compact).all()
            band.put(target, some, compact)
            band.squares(flat, squares[band.segment])
    wanted = torch.zeros(200)
    for (offset, shape), some, found in zip(places, columns, squares, strict=True):
        matrix = whole[offset : offset + torch.Size(shape).numel()].view(-1, width_of(shape))
        wanted[offset : offset + matrix.numel()].view(-1, width_of(shape))[:, some] = matrix[:, some]
        torch.testing.assert_close(found, matrix.square().sum(0))
    assert torch.equal(marked, wanted)


def test_how_many_are_chosen() -> None:
    assert [chosen_of(shape, 0.25) for shape in ((8, 8), (8, 3), (4, 2, 6), (9,), (), (0, 4))] == [2, 1, 3, 1, 1, 0]
    assert chosen_of((1 << 21,), 0.25) == 0, "a large vector is the host's"
    assert Band(0, 0, 10, 3, 4).rows == 4, "the end of a row, two rows, the begin of one"


# -- plan -----------------------------------------------------------------------------------------------------------
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
    persistent = [plan.persistent.param, plan.persistent.grad, plan.persistent.optim]
    assert [_say(s) for s in persistent] == [small, grad, optim]
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
    sizes = {"reduce_bucket_size": 11, "prefetch_bucket_size": 12, "param_persistence_threshold": 13}
    plan = _plan({"stage": 3, "max_live_parameters": 14, **sizes})
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
