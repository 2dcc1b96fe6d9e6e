"""Process groups for mesh axes: the only place besides ``comm`` that creates them."""

import contextlib
import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from deepspeed.client.constants import DEFAULT_PROCESS_GROUP_TIMEOUT
from deepspeed.comm.channel import GONE, job_channel
from deepspeed.comm.collectives import AxisGroup, gather_objects
from deepspeed.comm.init import naming_threads, take_turns
from deepspeed.comm.mesh.topology import Axis, Topology, dense_topology, expert_topology, shard_axes
from deepspeed.errors import UsageError


def _alone() -> AxisGroup:
    return AxisGroup(None, 1, 0, (dist.get_rank() if dist.is_initialized() else 0,), "none")


@dataclass(frozen=True)
class Mesh:
    """Process groups of one engine, by what their ranks share.

    ``job``: every rank of the engine. ``data``: the ranks that are fed different batches, over which gradients are
    averaged. ``zero``: the ranks that hold the same parameters, whole or in shards (of one pipeline stage and one
    tensor-parallel part): values are broadcast and collectives are agreed on there. ``groups`` are its axes (inner
    first), over which states are cut. ``control`` is a host-side (gloo) group over it for messages of a few bytes, None
    for one rank or where none is wanted. ``name`` tells engines apart, and is the same on their ranks. ``tp``: the
    ranks that share each layer; ``sp``: each sequence; ``pp``: those that hold the stages one batch passes. ``host``:
    a gloo group over the job, where ``control`` is none. ``topology``: where each rank is; None: only this one is
    known. ``reducing``: a second group over the first axis, for the sums of gradients, as a communicator runs one
    collective at a time. ``experts``: the groups that divide experts and exchange tokens. ``made``: all to destroy.
    ``cuts``: the ranks of a sequence get the whole batch, which the engine cuts; else each gets its part.
    """

    groups: tuple[AxisGroup, ...]
    job: AxisGroup
    data: AxisGroup
    zero: AxisGroup
    control: AxisGroup | None
    name: str = ""
    tp: AxisGroup = field(default_factory=_alone)
    pp: AxisGroup = field(default_factory=_alone)
    sp: AxisGroup = field(default_factory=_alone)
    host: AxisGroup | None = None
    topology: Topology | None = None
    reducing: AxisGroup | None = None
    experts: tuple[AxisGroup, ...] = ()
    made: tuple[AxisGroup, ...] = ()
    cuts: bool = False

    @property
    def sums(self) -> tuple[AxisGroup, ...]:
        """Return the axes, inner first, as gradients are reduced over them."""
        return self.groups if self.reducing is None else (self.reducing, *self.groups[1:])

    @property
    def talk(self) -> AxisGroup:
        """Return the group in which every rank of the job tells the others something: on the host, if it can."""
        return self.host or (self.control if self.control and self.control.size == self.job.size else self.job)

    @property
    def communicators(self) -> set[Any]:
        """Return the groups of several ranks whose collectives run on the device, where each holds memory."""
        made = (group for group in self.made if group is not self.control and group is not self.host)
        groups = (self.job, self.data, self.zero, self.tp, self.pp, self.sp, *self.groups, *self.sums, *made)
        return {group.pg for group in groups if group.size > 1 and group.backend != "gloo"}

    @property
    def first(self) -> bool:
        """Return True on the one rank of the job that speaks for all: logs, manifests, whole weights."""
        return self.job.index == 0

    def sharers(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that share each layer with the global ``rank``, in the order of ``tp``."""
        return (rank,) if self.topology is None else self.topology.axis(rank, "tp").ranks

    def title(self, rank: int) -> str:
        """Name the global ``rank`` for people, with its place on each axis of several ranks but the data-parallel."""
        names = {"pp": "pipeline stage", "sp": "sequence-parallel rank", "tp": "tensor-parallel rank"}
        topology = self.topology
        axes = [(name, topology.axis(rank, axis)) for axis, name in names.items()] if topology is not None else []
        places = ", ".join(f"{name} {axis.index}" for name, axis in axes if axis.size > 1)
        return f"rank {rank} ({places})" if places else f"rank {rank}"


def plain_mesh(backend: str, *, group: dist.ProcessGroup | None = None) -> Mesh:
    """Make a mesh of one axis over an existing group (default: the whole world), without new process groups."""
    alone = not dist.is_initialized()
    pg = None if alone else group or dist.group.WORLD
    ranks = (0,) if alone else tuple(dist.get_process_group_ranks(pg))
    job = AxisGroup(pg, len(ranks), 0 if alone else ranks.index(dist.get_rank()), ranks, backend)
    return Mesh((job,), job, job, job, None)


def _new_group(name: str, axis: Axis | AxisGroup, backend: str) -> AxisGroup:
    """Make a group of the ranks of ``axis``, by these alone: the ranks outside may be making other groups.

    ``dist.new_group`` cannot: all ranks of the job must take part, or its name counts the groups of a rank. Counts may
    differ, and a name may return after its group was destroyed, with addresses where nobody listens any more.
    """
    ranks, kind, label = list(axis.ranks), dist.Backend(backend), c10d.GroupName(f"{name}/{axis.ranks[0]}")
    store, world = c10d._get_default_store(), c10d._get_default_group()
    limit = c10d._get_default_timeout(kind)
    with contextlib.suppress(AttributeError, RuntimeError):  # a backend that does not say
        chosen = world._get_backend(world._device_types[0]).options._timeout
        limit = limit if chosen == DEFAULT_PROCESS_GROUP_TIMEOUT else chosen  # the default: by nobody
    # Were its device known, torch would split the job's communicator, which is a call of all its ranks.
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        sizes = (axis.size, axis.index, ranks)
        with naming_threads(backend):
            pg, _ = c10d._new_process_group_helper(*sizes, kind, store, label, timeout=limit)
    except RuntimeError as error:
        raise UsageError(
            f"the {backend} group of {len(ranks)} ranks cannot be made: {str(error).partition(chr(10))[0]}. If the "
            "ranks are on several machines, set GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) on each to the network "
            "interface that leads to the others; GLOO_SOCKET_IFNAME is "
            f"{os.environ.get('GLOO_SOCKET_IFNAME', 'not set')!r} here"
        ) from error
    finally:
        world.bound_device_id = bound
    c10d._world.pg_group_ranks[pg] = {rank: position for position, rank in enumerate(ranks)}
    return AxisGroup(pg, axis.size, axis.index, axis.ranks, backend)


@functools.cache
def group_over(world: dist.ProcessGroup, ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """Return the one group of ``ranks`` in the default group ``world``, made by these alone when they first call."""
    axis = Axis("", len(ranks), ranks.index(dist.get_rank()), ranks)
    made = _new_group(f"deepspeed/axis/{'-'.join(map(str, ranks))}", axis, dist.get_backend(world))
    assert made.pg is not None
    return made.pg


class _Maker:
    """Make the groups of one mesh; for one set of ranks there is one group, whichever axes span it."""

    def __init__(self, backend: str, job: AxisGroup, groups: Sequence[dist.ProcessGroup]) -> None:
        self._backend = backend
        # A name that no mesh over these ranks has had, the same on all of them, and on no rank outside.
        count = c10d._get_default_store().add(f"deepspeed/meshes/{job.ranks[job.index]}", 1)
        self.name = f"deepspeed/mesh{max(gather_objects(count, job))}/{min(job.ranks)}"
        self.made: list[AxisGroup] = []
        self._over = {tuple(sorted(g.ranks)): g for g in (*(plain_mesh(backend, group=pg).job for pg in groups), job)}

    def new(self, axis: Axis | AxisGroup, label: str, kind: str) -> AxisGroup:
        self.made.append(_new_group(f"{self.name}/{label}", axis, kind))
        return self.made[-1]

    def over(self, axis: Axis) -> AxisGroup:
        members = tuple(sorted(axis.ranks))
        if members not in self._over:
            self._over[members] = self.new(axis, axis.name, self._backend)
        return self._over[members]


def build_mesh(
    backend: str,
    *,
    inner_size: int | None = None,
    group: dist.ProcessGroup | None = None,
    control: bool = True,
    reducing: bool = False,
    pp: int = 1,
    sp: int = 1,
    tp: int = 1,
    order: Sequence[int] | None = None,
    known: Sequence[dist.ProcessGroup] = (),
) -> Mesh:
    """Create the groups of one engine over ``group`` (default: the whole world). Collective over its ranks.

    ``backend``: "nccl" or "gloo". ``pp`` pipeline stages, ``sp`` sequence- and ``tp`` tensor-parallel ranks; the rest
    is data parallel. ``reducing``: with a group for the sums of gradients. ``order``: the ranks as the grid has them,
    if not ascending; ``known``: groups of the caller's that are used where they fit. One rank needs no process group.
    Raises UsageError when a group cannot be made, DeepSpeedConfigError for sizes of more or fewer ranks.
    """
    plain = plain_mesh(backend, group=group)
    job, rank = plain.job, dist.get_rank() if dist.is_initialized() else 0
    topology = dense_topology(tuple(order or job.ranks), pp=pp, sp=sp, tp=tp, inner_size=inner_size)
    if job.size == 1:
        return plain
    maker = _Maker(backend, job, known)
    new, over = maker.new, maker.over
    zero = over(topology.axis(rank, "dp_outer", "dp", "sp"))
    messages = backend if job.alike else "gloo"
    host = new(job, "host", messages) if zero.size < job.size else None
    asks = new(zero, "control", messages) if control and zero.size > 1 else None
    axes = shard_axes(topology, rank)
    data = over(topology.axis(rank, "dp_outer", "dp"))
    sizes = {"tp": tp, "pp": pp, "sp": sp}
    shares: Any = {axis: over(topology.axis(rank, axis)) for axis, size in sizes.items() if size > 1}
    groups = (zero,) if len(axes) == 1 else tuple(over(axis) for axis in axes)
    first = groups[0]
    apart = new(first, "reductions", backend) if reducing and first.size > 1 else None
    if backend == "gloo":  # else it carries a few control messages, which should not wait
        take_turns()
    mesh = Mesh(groups, job, data, zero, asks, maker.name, host=host, topology=topology, **shares)
    return replace(mesh, reducing=apart, made=tuple(maker.made))


def with_group(mesh: Mesh, label: str, ranks: tuple[int, ...]) -> tuple[Mesh, AxisGroup]:
    """Return ``mesh`` with one more group to destroy, of some of its ranks, which alone make it; and that group."""
    axis = Axis(label, len(ranks), ranks.index(dist.get_rank()), ranks)
    group = _new_group(f"{mesh.name}/{label}", axis, mesh.job.backend)
    return replace(mesh, made=(*mesh.made, group)), group


def with_experts(mesh: Mesh, ep: int) -> tuple[Mesh, Mesh]:
    """Return ``mesh`` with more groups to destroy, and the mesh of parameters of experts that ``ep`` ranks divide.

    In the second the ranks that hold parts of one tensor (``tp``) are the expert-parallel ones, and those that hold the
    same values (``zero``, ``groups``) the expert-data-parallel ones. Collective over each group. Raises
    DeepSpeedConfigError when ``ep`` does not divide the ranks.
    """
    rank = mesh.job.ranks[mesh.job.index]
    grid = expert_topology(mesh.topology or dense_topology(mesh.job.ranks), ep)
    known = {group.ranks: group for group in (mesh.job, mesh.zero, *mesh.groups, mesh.tp)}

    def over(*names: str) -> AxisGroup:
        nonlocal mesh
        axis = grid.axis(rank, *names)
        if axis.size > 1 and axis.ranks not in known:
            mesh, known[axis.ranks] = with_group(mesh, f"experts{ep}/{axis.name}", axis.ranks)
        return known[axis.ranks] if axis.size > 1 else _alone()

    parts, zero, first = over("ep"), over("dp_outer", "edp"), over("edp")
    groups = (first,) if len(mesh.groups) == 1 else (first, over("dp_outer"))
    topology = replace(grid, names=tuple({"edp": "dp", "ep": "tp"}.get(name, name) for name in grid.names))
    theirs = replace(mesh, groups=groups, zero=zero, tp=parts, topology=topology, control=None, reducing=None, made=())
    return replace(mesh, experts=(*mesh.experts, parts)), theirs


def meet_at_end(mesh: Mesh, limit_s: float = 60.0, *, comes: bool = True) -> bool:
    """Return whether all ranks end their engine together: the same answer on all of them, within ``limit_s`` seconds.

    Not a collective: a rank that has raised may never come, or be in another collective of a group that this one would
    disturb. Ranks meet in the store, where the first decides for all: at once, if it cannot come (not ``comes``).
    """
    if mesh.job.size == 1 or mesh.job.alike:
        return True
    try:
        channel = job_channel(f"{mesh.name}/end")
        last = comes and channel.add("ranks", 1) == mesh.job.size
        if comes and not last:
            channel.wait("end", seconds=limit_s)
        return bool(channel.claim("end", "together" if last else "apart") == "together")
    except GONE:  # or the default group was destroyed
        return False


def leave_note(
    mesh: Mesh, text: str, *, about: str = "failed", wait_s: float = 0.0, among: AxisGroup | None = None
) -> dict[int, str]:
    """Leave ``text`` (nothing if empty) in the store under this rank, for ranks that hear of no error but see this one
    gone. Return the notes of the ranks ``among`` (None: all), after at most ``wait_s`` seconds until all have left one.
    """
    group = among or mesh.job
    if group.size == 1 or group.alike:
        return {}
    with contextlib.suppress(*GONE):
        channel = job_channel(f"{mesh.name}/{about}")
        if text:
            channel.put(f"rank/{group.ranks[group.index]}", text)
        channel.wait(*(f"rank/{rank}" for rank in group.ranks), seconds=wait_s)
        return channel.of("rank", group.ranks)
    return {}


def drop_note(mesh: Mesh) -> None:
    """Take back the note that ``leave_note`` left: the others know."""
    with contextlib.suppress(*GONE):
        if not mesh.zero.alike:
            job_channel(f"{mesh.name}/failed").drop(f"rank/{mesh.zero.ranks[mesh.zero.index]}")


def destroy_mesh(mesh: Mesh, *, keep_axes: bool = False) -> None:
    """Destroy the groups that ``build_mesh`` made, never the caller's own; ``keep_axes``: those of shards stay."""
    kept = [group.pg for group in (mesh.zero, *mesh.groups)] if keep_axes else []
    for group in mesh.made if dist.is_initialized() else ():
        if group.pg not in kept:
            dist.destroy_process_group(group.pg)
