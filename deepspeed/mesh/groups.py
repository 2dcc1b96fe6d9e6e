"""Process groups for mesh axes: the only place besides ``comm`` that creates them."""

import contextlib
import os
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from deepspeed.comm.collectives import AxisGroup, gather_objects
from deepspeed.errors import UsageError
from deepspeed.mesh.topology import Axis, dense_topology, shard_axes


@dataclass(frozen=True)
class Mesh:
    """The ranks of one engine, by what they share.

    ``job``: every rank of the engine. ``data``: the ranks that are fed different batches, over which gradients are
    averaged. ``zero``: the ranks that hold the same parameters, whole or in shards: values are broadcast and
    collectives are agreed on there. ``groups`` are its axes (inner first), over which states are cut. ``control`` is a
    host-side (gloo) group over it for messages of a few bytes, None for one rank or where none is wanted.
    ``name`` tells engines apart, and is the same on their ranks.
    """

    groups: tuple[AxisGroup, ...]
    job: AxisGroup
    data: AxisGroup
    zero: AxisGroup
    control: AxisGroup | None
    name: str = ""

    @property
    def talk(self) -> AxisGroup:
        """Where every rank of the job tells the others something: on the host, if it can."""
        return self.control if self.control is not None and self.control.size == self.job.size else self.job

    @property
    def first(self) -> bool:
        """True on the one rank of the job that speaks for all: logs, manifests, whole weights."""
        return self.job.index == 0


def plain_mesh(backend: str, *, group: dist.ProcessGroup | None = None) -> Mesh:
    """One axis over an existing group (default: the whole world), without new process groups."""
    alone = not dist.is_initialized()
    pg = None if alone else group or dist.group.WORLD
    ranks = (0,) if alone else tuple(dist.get_process_group_ranks(pg))
    everyone = AxisGroup(pg, len(ranks), 0 if alone else ranks.index(dist.get_rank()), ranks, backend)
    return Mesh((everyone,), everyone, everyone, everyone, None)


def _new_group(name: str, axis: Axis | AxisGroup, backend: str) -> AxisGroup:
    """A group of the ranks of ``axis``, made by them alone: the ranks outside may be making other groups.

    ``dist.new_group`` cannot: either all ranks of the job take part, or it names the group by how many groups each rank
    has, which may differ, and may come again after a group was destroyed, with addresses where nobody listens any more.
    """
    ranks, kind, label = list(axis.ranks), dist.Backend(backend), c10d.GroupName(f"{name}/{axis.ranks[0]}")
    store, limit = c10d._get_default_store(), c10d._get_default_timeout(kind)
    try:
        pg, _ = c10d._new_process_group_helper(axis.size, axis.index, ranks, kind, store, label, timeout=limit)
    except RuntimeError as error:
        raise UsageError(
            f"the {backend} group of {len(ranks)} ranks cannot be made: {str(error).partition(chr(10))[0]}. If the "
            "ranks are on several machines, set GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) on each to the network "
            "interface that leads to the others; GLOO_SOCKET_IFNAME is "
            f"{os.environ.get('GLOO_SOCKET_IFNAME', 'not set')!r} here"
        ) from error
    c10d._world.pg_group_ranks[pg] = {rank: position for position, rank in enumerate(ranks)}
    return AxisGroup(pg, axis.size, axis.index, axis.ranks, backend)


def build_mesh(
    backend: str, *, inner_size: int | None = None, group: dist.ProcessGroup | None = None, control: bool = True
) -> Mesh:
    """Create the groups of one engine over ``group`` (default: the whole world). Collective over its ranks.

    ``backend``: "nccl" or "gloo". One rank needs no process group. Raises UsageError when a group cannot be made.
    """
    plain = plain_mesh(backend, group=group)
    everyone, groups = plain.zero, plain.groups
    if everyone.size == 1:
        return plain
    # A name that no mesh over these ranks has had, the same on all of them.
    count = c10d._get_default_store().add(f"deepspeed/meshes/{everyone.ranks[everyone.index]}", 1)
    name = f"deepspeed/mesh{max(gather_objects(count, everyone))}"
    host = _new_group(f"{name}/control", everyone, backend if everyone.alike else "gloo") if control else None
    axes = shard_axes(dense_topology(everyone.ranks, inner_size=inner_size), dist.get_rank())
    if len(axes) > 1:
        groups = tuple(_new_group(f"{name}/{axis.name}", axis, backend) for axis in axes)
    return Mesh(groups, everyone, everyone, everyone, host, name)


def meet_at_end(mesh: Mesh, limit_s: float = 60.0) -> bool:
    """Whether all ranks end their engine together: the same answer on all of them, within ``limit_s`` seconds.

    Not a collective: a rank that has raised may never come, or be in another collective of a group that this one would
    disturb. So they meet in the store, where the first to decide decides for all.
    """
    if mesh.job.size == 1 or mesh.job.alike:
        return True
    try:
        store = dist.PrefixStore(f"{mesh.name}/end", c10d._get_default_store())
        if store.add("ranks", 1) == mesh.job.size:
            store.compare_set("end", "", "together")
        with contextlib.suppress(RuntimeError):
            store.wait(["end"], timedelta(seconds=limit_s))
        return bool(store.compare_set("end", "", "apart") == b"together")
    except (RuntimeError, ValueError):  # the store went with the rank that kept it, or the default group was destroyed
        return False


def destroy_mesh(mesh: Mesh, *, keep_axes: bool = False) -> None:
    """Give back the groups that ``build_mesh`` made, never the caller's own; ``keep_axes``: shards lie on them."""
    for group in (mesh.control, *(() if keep_axes else mesh.groups)) if dist.is_initialized() else ():
        if group is not None and group.pg is not mesh.zero.pg:
            dist.destroy_process_group(group.pg)
