"""Process groups for mesh axes: the only place besides ``comm`` that creates them."""

from dataclasses import dataclass

import torch.distributed as dist

from deepspeed.comm.collectives import AxisGroup
from deepspeed.mesh.topology import Axis, all_axis_groups, data_parallel_axes


@dataclass(frozen=True)
class ZeroMesh:
    """The data-parallel mesh of one engine.

    ``axes[i]`` is served by ``groups[i]``; ``world`` spans all axes; ``control`` is a host-side (gloo) group over the
    same ranks that carries agreement messages of a few bytes, or None for one rank.
    """

    axes: tuple[Axis, ...]
    groups: tuple[AxisGroup, ...]
    world: AxisGroup
    control: AxisGroup | None

    @property
    def size(self) -> int:
        return self.world.size


def build_zero_mesh(backend: str, *, inner_size: int | None = None, group: dist.ProcessGroup | None = None) -> ZeroMesh:
    """Create the groups of one engine over ``group`` (default: the whole world). Collective over all ranks.

    ``backend`` is what tensors travel on ("nccl" or "gloo"). One rank needs no process group at all.
    """
    if not dist.is_initialized():
        axis = Axis("dp", 1, 0, (0,))
        alone = AxisGroup(None, 1, 0, (0,), backend)
        return ZeroMesh((axis,), (alone,), alone, None)
    rank = dist.get_rank()
    ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
    world = AxisGroup(group or dist.group.WORLD, len(ranks), ranks.index(rank), ranks, backend)
    axes = data_parallel_axes(ranks, rank, inner_size=inner_size)
    control = None
    if world.size > 1:
        pg = dist.new_group(list(ranks), backend="gloo", use_local_synchronization=group is not None)
        control = AxisGroup(pg, world.size, world.index, ranks, "gloo")
    if len(axes) == 1:
        return ZeroMesh(axes, (world,), world, control)
    made = {}
    for members in all_axis_groups(ranks, axes[0].size):
        pg = dist.new_group(list(members), backend=backend, use_local_synchronization=False)
        if rank in members:
            made[members] = pg
    groups = tuple(AxisGroup(made[a.ranks], a.size, a.index, a.ranks, backend) for a in axes)
    return ZeroMesh(axes, groups, world, control)


def destroy_zero_mesh(mesh: ZeroMesh) -> None:
    """Give back the groups that ``build_zero_mesh`` made (never the caller's own)."""
    if not dist.is_initialized():
        return
    made = [g for g in (*mesh.groups, mesh.control) if g is not None and g.pg is not mesh.world.pg]
    for group in made:
        dist.destroy_process_group(group.pg)


def plain_mesh(backend: str, *, group: dist.ProcessGroup | None = None) -> ZeroMesh:
    """One axis over an existing group, without new process groups: for model construction, before there is an engine."""
    if not dist.is_initialized():
        return build_zero_mesh(backend)
    ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
    world = AxisGroup(group or dist.group.WORLD, len(ranks), ranks.index(dist.get_rank()), ranks, backend)
    return ZeroMesh(data_parallel_axes(ranks, dist.get_rank()), (world,), world, None)
