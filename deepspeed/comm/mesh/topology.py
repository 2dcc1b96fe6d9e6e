"""Named mesh axes and their arithmetic. Pure: no process group, no torch.

One set of ranks is factorised for dense parameters and for experts. ZeRO shards over dp and sp together; MiCS (Zhang et
al. 2022) and ZeRO++ (Wang et al. 2023) cut the data-parallel ranks into an *inner* axis ``dp`` (consecutive ranks, one
node or one shard group) and an *outer* axis ``dp_outer``, the replicas of the inner group.
"""

from dataclasses import dataclass
from math import prod

import numpy as np

from deepspeed.errors import DeepSpeedConfigError


@dataclass(frozen=True)
class Axis:
    """Mesh axis as seen by one rank: its name, its size, the index of this rank, and the members."""

    name: str
    size: int
    index: int
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        assert self.size == len(self.ranks) and 0 <= self.index < self.size, self


@dataclass(frozen=True)
class Topology:
    """Grid of ``ranks`` (global ids), row-major, with named axes: the last axis varies fastest."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    ranks: tuple[int, ...]
    data_first: bool = False  # neighbours hold the same experts, instead of different ones

    def __post_init__(self) -> None:
        assert len(self.names) == len(self.sizes) and prod(self.sizes) == len(self.ranks) > 0, self

    def axis(self, rank: int, *names: str) -> Axis:
        """Return the ranks that differ from the global ``rank`` on the named axes only, in grid order, as one axis."""
        place = np.unravel_index(self.ranks.index(rank), self.sizes)
        cut = tuple(slice(None) if name in names else way for name, way in zip(self.names, place, strict=True))
        members = tuple(np.reshape(self.ranks, self.sizes)[cut].ravel().tolist())
        return Axis("_".join(names), len(members), members.index(rank), members)


def dense_topology(
    ranks: tuple[int, ...], *, pp: int = 1, sp: int = 1, tp: int = 1, inner_size: int | None = None
) -> Topology:
    """Factorise ``ranks`` for dense parameters; the rest is data parallel, in shard groups of ``inner_size``.

    Raises DeepSpeedConfigError when the sizes do not multiply to the number of ranks.
    """
    if min(pp, sp, tp) < 1 or len(ranks) % (pp * sp * tp):
        raise DeepSpeedConfigError(
            f"pipeline stages {pp} x sequence-parallel ranks {sp} x tensor-parallel ranks {tp} do not divide "
            f"the {len(ranks)} ranks"
        )
    data = len(ranks) // (pp * sp * tp)
    inner = data if inner_size is None else inner_size
    if inner < 1 or data % inner:
        raise DeepSpeedConfigError(
            f"the shard group size {inner} (mics_shard_size or zero_hpz_partition_size) does not divide the {data} "
            f"data-parallel ranks; use a divisor of {data}"
        )
    return Topology(("pp", "dp_outer", "dp", "sp", "tp"), (pp, data // inner, inner, sp, tp), ranks)


def expert_topology(dense: Topology, ep: int) -> Topology:
    """Arrange the same ranks for experts: ``ep`` ranks hold different experts, ``edp`` the same ones.

    Raises DeepSpeedConfigError when ``ep`` does not divide the ranks of one pipeline stage and shard group.
    """
    pp, outer, *inner = dense.sizes
    size = prod(inner)
    if ep < 1 or size % ep:
        raise DeepSpeedConfigError(
            f"expert-parallel size {ep} does not divide the {size} ranks of one pipeline stage; use a divisor"
        )
    if dense.data_first:
        return Topology(("pp", "dp_outer", "ep", "edp"), (pp, outer, ep, size // ep), dense.ranks)
    return Topology(("pp", "dp_outer", "edp", "ep"), (pp, outer, size // ep, ep), dense.ranks)


def shard_axes(topology: Topology, rank: int) -> tuple[Axis, ...]:
    """Return the axes over which ZeRO may shard a dense parameter, inner first: ranks (dp, sp) of equal weights."""
    _, outer, _, sp, _ = topology.sizes
    inner = topology.axis(rank, "dp", "sp") if sp > 1 else topology.axis(rank, "dp")
    return (inner,) if outer == 1 else (inner, topology.axis(rank, "dp_outer"))
