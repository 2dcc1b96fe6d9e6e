"""Process groups for mesh axes: the only place besides ``comm`` that creates them."""

from dataclasses import dataclass

import torch.distributed as dist

from deepspeed.comm.collectives import AxisGroup
from deepspeed.mesh.topology import Axis, Topology, dense_topology, shard_axes


@dataclass(frozen=True)
class Mesh:
    """The ranks of one engine, by what they share.

    ``job``: every rank of the engine: file names, norm, overflow, errors that all must hear of. ``data``: the ranks that are fed
    different batches. ``zero``: the ranks that hold the same parameters, whole or in shards: values are broadcast and collectives are
    agreed on there. It spans ``axes`` (inner first), over which states are cut; ``axes[i]`` is served by ``groups[i]``. ``control`` is a
    host-side (gloo) group over the ranks of ``zero`` for messages of a few bytes, None for one rank or where none is wanted.
    ``divisor``: ranks over which the mean of a gradient is taken.
    """

    axes: tuple[Axis, ...]
    groups: tuple[AxisGroup, ...]
    job: AxisGroup
    data: AxisGroup
    zero: AxisGroup
    control: AxisGroup | None

    @property
    def divisor(self) -> int:
        return self.data.size

    @property
    def talk(self) -> AxisGroup:
        """Where every rank of the job tells the others something: on the host, if it can."""
        return self.control if self.control is not None and self.control.size == self.job.size else self.job

    @property
    def first(self) -> bool:
        """True on the one rank of the job that speaks for all: logs, manifests, whole weights."""
        return self.job.index == 0


def _members(axis: Axis, pg: dist.ProcessGroup | None, backend: str) -> AxisGroup:
    return AxisGroup(pg, axis.size, axis.index, axis.ranks, backend)


def plain_mesh(backend: str, *, group: dist.ProcessGroup | None = None) -> Mesh:
    """One axis over an existing group (default: the whole world), without new process groups: before there is an engine."""
    alone = not dist.is_initialized()
    pg = None if alone else group or dist.group.WORLD
    ranks = (0,) if alone else tuple(dist.get_process_group_ranks(pg))
    axes = shard_axes(dense_topology(ranks), 0 if alone else dist.get_rank())
    everyone = _members(axes[0], pg, backend)
    return Mesh(axes, (everyone,), everyone, everyone, everyone, None)


def build_mesh(backend: str, *, inner_size: int | None = None, group: dist.ProcessGroup | None = None, control: bool = True) -> Mesh:
    """Create the groups of one engine over ``group`` (default: the whole world). Collective over the ranks of ``group``.

    ``backend`` is what tensors travel on ("nccl" or "gloo"). One rank needs no process group at all.
    """
    plain = plain_mesh(backend, group=group)
    everyone, host = plain.zero, None
    if everyone.size == 1:
        return plain
    topology, rank = dense_topology(everyone.ranks, inner_size=inner_size), dist.get_rank()
    # A caller's group need not be everybody's: then the members alone make the new ones.
    local = group is not None
    if control:
        host = AxisGroup(_new_group(everyone.ranks, "gloo", local=local), everyone.size, everyone.index, everyone.ranks, "gloo")
    axes = shard_axes(topology, rank)
    if len(axes) == 1:
        return Mesh(axes, (everyone,), everyone, everyone, everyone, host)
    made = {members: _new_group(members, backend, local=local) for members in _cut(topology) if rank in members or not local}
    groups = tuple(_members(axis, made[axis.ranks], backend) for axis in axes)
    return Mesh(axes, groups, everyone, everyone, everyone, host)


def _cut(topology: Topology) -> list[tuple[int, ...]]:
    return [*topology.groups("dp", "sp"), *topology.groups("dp_outer")]


def _new_group(ranks: tuple[int, ...], backend: str, *, local: bool) -> dist.ProcessGroup:
    return dist.new_group(list(ranks), backend=backend, use_local_synchronization=local)


def destroy_mesh(mesh: Mesh) -> None:
    """Give back the groups that ``build_mesh`` made (never the caller's own)."""
    if not dist.is_initialized():
        return
    made = [g for g in (*mesh.groups, mesh.control) if g is not None and g.pg is not mesh.zero.pg]
    for group in made:
        dist.destroy_process_group(group.pg)
