"""Named mesh axes and their arithmetic. Pure: no process group, no torch.

ZeRO shards over the data-parallel ranks. They are factorised into an *inner* axis (consecutive ranks, one node or one
MiCS shard group) and an *outer* axis (the replicas of the inner group). Plain ZeRO has one axis; MiCS (Zhang et al.
2022) and the hierarchical partitioning of ZeRO++ (Wang et al. 2023) have two.
"""

from dataclasses import dataclass

from deepspeed.errors import DeepSpeedConfigError


@dataclass(frozen=True)
class Axis:
    """One mesh axis as seen by one rank: how many ways, which of them is this rank, and who the members are."""

    name: str
    size: int
    index: int
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        assert self.size == len(self.ranks) and 0 <= self.index < self.size, self


def data_parallel_axes(ranks: tuple[int, ...], rank: int, *, inner_size: int | None = None) -> tuple[Axis, ...]:
    """Factorise the data-parallel ``ranks`` (global ids, ordered) for ``rank``.

    ``inner_size`` None or equal to the number of ranks gives the single axis ``dp``; otherwise ``dp`` (inner,
    consecutive ranks) and ``dp_outer``. Raises DeepSpeedConfigError when ``inner_size`` does not divide the ranks.
    """
    world = len(ranks)
    position = ranks.index(rank)
    inner = world if inner_size is None else inner_size
    if inner < 1 or world % inner:
        raise DeepSpeedConfigError(
            f"the shard group size {inner} (mics_shard_size or zero_hpz_partition_size) does not divide the {world} "
            f"data-parallel ranks; use a divisor of {world}"
        )
    first = position // inner * inner
    dp = Axis("dp", inner, position % inner, ranks[first : first + inner])
    if inner == world:
        return (dp,)
    return (dp, Axis("dp_outer", world // inner, position // inner, ranks[position % inner :: inner]))


def all_axis_groups(ranks: tuple[int, ...], inner_size: int) -> list[tuple[int, ...]]:
    """Every inner and outer rank group, in the one order in which all ranks create their process groups."""
    inner = [ranks[i : i + inner_size] for i in range(0, len(ranks), inner_size)]
    outer = [ranks[i::inner_size] for i in range(inner_size)]
    return inner + (outer if inner_size < len(ranks) else [])
