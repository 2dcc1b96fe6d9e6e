"""Mesh axes: both factorisations cover the same ranks once; owned ranges of every rank tile the flat space."""

from math import prod

import pytest

from deepspeed.comm.collectives import AxisGroup
from deepspeed.comm.mesh.groups import Mesh
from deepspeed.comm.mesh.topology import Axis, Topology, dense_topology, expert_topology, shard_axes
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.zero.partition import owned_range
from deepspeed.zero.plan import Spread
from tests.harness.rows import for_each

S, R = Spread.SHARDED, Spread.REPLICATED
RANKS = (4, 5, 6, 7, 12, 13)
EIGHT = tuple(range(8))


def _groups(topology: Topology, *names: str) -> list[tuple[int, ...]]:
    """The members of every group over the named axes."""
    return sorted({topology.axis(rank, *names).ranks for rank in topology.ranks})


def _shard_axes(rank: int, inner: int | None = None) -> tuple[Axis, ...]:
    return shard_axes(dense_topology(RANKS, inner_size=inner), rank)


def test_one_axis_by_default() -> None:
    for position, rank in enumerate(RANKS):
        assert _shard_axes(rank) == (Axis("dp", 6, position, RANKS),) == _shard_axes(rank, 6)


@for_each("inner", [1, 2, 3])
def test_inner_and_outer_axes_factorise_the_ranks(inner: int) -> None:
    topology = dense_topology(RANKS, inner_size=inner)
    groups = [*_groups(topology, "dp"), *_groups(topology, "dp_outer")]
    for rank in RANKS:
        dp, outer = _shard_axes(rank, inner)
        assert (dp.size, outer.size) == (inner, 6 // inner)
        assert dp.ranks[dp.index] == rank == outer.ranks[outer.index]
        assert dp.ranks in groups and outer.ranks in groups
        assert set(dp.ranks) & set(outer.ranks) == {rank}


@for_each("inner", [4, 5, 7, 0, -2])
def test_a_size_that_does_not_divide_is_refused(inner: int) -> None:
    with pytest.raises(DeepSpeedConfigError, match=f"{inner}.*6"):
        dense_topology(RANKS, inner_size=inner)


SIZES = [(1, 1, 1, 1), (2, 2, 2, 1), (1, 2, 1, 4), (2, 1, 4, 1), (8, 1, 1, 1), (1, 8, 1, 1), (1, 1, 8, 1), (1, 1, 2, 2)]


@for_each(("pp", "sp", "tp", "inner"), SIZES)
def test_the_groups_of_every_axis_hold_every_rank_once(pp: int, sp: int, tp: int, inner: int) -> None:
    topology = dense_topology(EIGHT, pp=pp, sp=sp, tp=tp, inner_size=inner)
    for names in (*((n,) for n in topology.names), ("dp", "sp"), ("dp_outer", "dp"), ("pp", "tp"), topology.names):
        groups = _groups(topology, *names)
        assert sorted(r for members in groups for r in members) == list(EIGHT)
        assert {len(members) for members in groups} == {prod(topology.axis(0, name).size for name in names)}
        for rank in EIGHT:
            axis = topology.axis(rank, *names)
            assert axis.ranks in groups and axis.ranks[axis.index] == rank
    # Two axes meet in one rank, and all of them together are everybody.
    for rank in EIGHT:
        assert prod(topology.axis(rank, name).size for name in topology.names) == 8
        assert set(topology.axis(rank, "pp").ranks) & set(topology.axis(rank, "dp", "sp", "tp").ranks) == {rank}


def test_tensor_parallel_ranks_are_neighbours_and_stages_are_far_apart() -> None:
    topology = dense_topology(EIGHT, pp=2, tp=2)
    assert _groups(topology, "tp") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert _groups(topology, "dp") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert _groups(topology, "pp") == [(0, 4), (1, 5), (2, 6), (3, 7)]


def test_experts_factorise_the_same_ranks() -> None:
    dense = dense_topology(EIGHT, pp=2, tp=2)
    experts = expert_topology(dense, 2)
    assert _groups(experts, "ep") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert _groups(experts, "edp") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert _groups(experts, "pp") == _groups(dense, "pp")
    for rank in EIGHT:
        assert set(experts.axis(rank, "edp", "ep").ranks) == set(dense.axis(rank, "dp", "sp", "tp").ranks)


def test_sequence_ranks_are_further_ways_of_the_shard_axis() -> None:
    topology = dense_topology(EIGHT, sp=2, inner_size=2)
    inner, outer = shard_axes(topology, 5)
    assert inner == Axis("dp_sp", 4, 1, (4, 5, 6, 7)) and outer == Axis("dp_outer", 2, 1, (1, 5))


@for_each("sizes", [{"pp": 3}, {"tp": 0}, {"pp": 4, "tp": 4}, {"sp": 5}])
def test_sizes_that_do_not_multiply_to_the_ranks_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(DeepSpeedConfigError, match="8 ranks"):
        dense_topology(EIGHT, **sizes)


@for_each("ep", [0, 3, 8])
def test_expert_sizes_that_do_not_divide_a_stage_are_refused(ep: int) -> None:
    with pytest.raises(DeepSpeedConfigError, match=f"{ep}.*4"):
        expert_topology(dense_topology(EIGHT, pp=2), ep)


def test_groups_of_thousands_of_ranks_are_quick_arithmetic() -> None:
    topology = dense_topology(tuple(range(4096)), pp=8, tp=8, inner_size=8)
    assert topology.axis(77, "dp").size == 8 and topology.axis(4095, "dp_outer").ranks[-1] == 4095


def _mesh(rank: int, inner: int | None) -> Mesh:
    groups = tuple(AxisGroup(None, a.size, a.index, a.ranks, "gloo") for a in _shard_axes(rank, inner))
    everyone = AxisGroup(None, 6, RANKS.index(rank), RANKS, "gloo")
    return Mesh(groups, everyone, everyone, everyone, None)


@for_each(
    ("inner", "spread", "copies"),
    [(None, (S,), 1), (None, (R,), 6), (2, (S, S), 1), (2, (S, R), 3), (3, (S, R), 2), (3, (R, S), 3), (2, (R, R), 6)],
)
def test_owned_ranges_tile_the_space_once_per_copy(inner: int | None, spread: tuple[Spread, ...], copies: int) -> None:
    ranges = [owned_range(60, spread, _mesh(rank, inner)) for rank in RANKS]
    times = [sum(start <= i < stop for start, stop in ranges) for i in range(60)]
    assert times == [copies] * 60


def test_the_outer_cut_lies_within_the_inner_piece() -> None:
    """So that gathering over the inner axis alone restores PARAM from OPTIM gathered over the outer one (hpZ)."""
    for rank in RANKS:
        mesh = _mesh(rank, 2)
        inner, both = owned_range(60, (S, R), mesh), owned_range(60, (S, S), mesh)
        assert inner[0] <= both[0] < both[1] <= inner[1]


def test_an_axis_proves_itself() -> None:
    for size, index in ((2, 2), (3, 0)):
        with pytest.raises(AssertionError):
            Axis("dp", size, index, (0, 1))
    with pytest.raises(AssertionError):
        Topology(("dp", "tp"), (2, 2), (0, 1, 2))
