"""Mesh axes: inner and outer axes factorise the ranks; owned ranges of every rank tile the flat space."""

import pytest

from deepspeed.comm.collectives import AxisGroup
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.mesh.groups import ZeroMesh
from deepspeed.mesh.topology import Axis, all_axis_groups, data_parallel_axes
from deepspeed.zero.plan import Spread
from deepspeed.zero.unit import owned_range

S, R = Spread.SHARDED, Spread.REPLICATED
RANKS = (4, 5, 6, 7, 12, 13)


def test_one_axis_by_default() -> None:
    for position, rank in enumerate(RANKS):
        assert data_parallel_axes(RANKS, rank) == (Axis("dp", 6, position, RANKS),)
        assert data_parallel_axes(RANKS, rank, inner_size=6) == data_parallel_axes(RANKS, rank)


@pytest.mark.parametrize("inner", [1, 2, 3])
def test_inner_and_outer_axes_factorise_the_ranks(inner: int) -> None:
    groups = all_axis_groups(RANKS, inner)
    assert len(groups) == len(set(groups)) or inner == 1
    for rank in RANKS:
        dp, outer = data_parallel_axes(RANKS, rank, inner_size=inner)
        assert (dp.size, outer.size) == (inner, 6 // inner)
        assert dp.ranks[dp.index] == rank == outer.ranks[outer.index]
        assert dp.ranks in groups and outer.ranks in groups
        assert set(dp.ranks) & set(outer.ranks) == {rank}


@pytest.mark.parametrize("inner", [4, 5, 7, 0, -2])
def test_a_size_that_does_not_divide_is_refused(inner: int) -> None:
    with pytest.raises(DeepSpeedConfigError, match=f"{inner}.*6"):
        data_parallel_axes(RANKS, 4, inner_size=inner)


def _mesh(rank: int, inner: int | None) -> ZeroMesh:
    axes = data_parallel_axes(RANKS, rank, inner_size=inner)
    groups = tuple(AxisGroup(None, a.size, a.index, a.ranks, "gloo") for a in axes)
    world = AxisGroup(None, 6, RANKS.index(rank), RANKS, "gloo")
    return ZeroMesh(axes, groups, world, None)


@pytest.mark.parametrize(
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
    with pytest.raises(AssertionError):
        Axis("dp", 2, 2, (0, 1))
    with pytest.raises(AssertionError):
        Axis("dp", 3, 0, (0, 1))
