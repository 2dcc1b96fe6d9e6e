"""Sizes of a job's parallel axes, as an ``mpu`` object of Megatron's kind or a ``mesh_param`` states them."""

from dataclasses import dataclass
from math import prod
from typing import Any

import torch.distributed as dist

from deepspeed.comm.collectives import gather_objects, require_group
from deepspeed.comm.mesh.groups import plain_mesh
from deepspeed.errors import DeepSpeedConfigError

# What the getters of an mpu call an axis; the first that it has counts.
_GETTERS = {
    "pp": ("pipeline_model_parallel", "pipe_parallel"),
    "dp": ("data_parallel",),
    "sp": ("sequence_parallel",),
    "tp": ("tensor_model_parallel", "slice_parallel", "model_parallel"),
}


@dataclass(frozen=True)
class Ways:
    """Arguments of ``build_mesh``. ``group``: the ranks of the engine, None for the whole world; ``order`` is there
    where the client has cut all ranks. ``registered``: the mpu of a client that has divided attention, and gathers
    the losses of a sequence with torch's ``all_gather``, whose backward sums: gradients are averaged over it, too.
    """

    pp: int = 1
    sp: int = 1
    tp: int = 1
    group: dist.ProcessGroup | None = None
    order: tuple[int, ...] | None = None
    known: tuple[dist.ProcessGroup, ...] = ()
    registered: Any = None

    @property
    def shared(self) -> int:
        """Return how many ranks work on one batch together."""
        return self.pp * self.sp * self.tp


def _group_of(mpu: Any, axis: str) -> dist.ProcessGroup | None:
    getters = (getattr(mpu, f"get_{name}_group", None) for name in _GETTERS[axis])
    return next((getter() for getter in getters if getter is not None), None)


def ways_of_mpu(mpu: Any, backend: str) -> Ways:
    """Derive the axes from ``mpu``: of all ranks where it has model-parallel groups, else of its data-parallel group.

    Collective over the world. Raises DeepSpeedConfigError when the groups are no grid of all ranks.
    """
    require_group("an mpu")
    groups = {axis: pg for axis in _GETTERS if (pg := _group_of(mpu, axis)) is not None}
    axes = {axis: plain_mesh(backend, group=pg).job for axis, pg in groups.items()}
    sizes = {axis: axes[axis].size if axis in axes else 1 for axis in _GETTERS}
    if sizes["pp"] * sizes["sp"] * sizes["tp"] == 1:
        return Ways(group=groups.get("dp"))
    world = plain_mesh(backend).job
    coords = tuple(axes[axis].index if axis in axes else 0 for axis in _GETTERS)
    places = gather_objects((coords, tuple(sizes.values())), world)
    distinct = len({place for place, _ in places}) == prod(sizes.values()) == world.size
    if not distinct or any(theirs != places[0][1] for _, theirs in places):
        text = " x ".join(f"{size} {axis}" for axis, size in sizes.items())
        raise DeepSpeedConfigError(
            f"the groups of the mpu ({text} ranks = {prod(sizes.values())}) are no grid of the {world.size} ranks: "
            "the pipeline-, data-, sequence- and tensor-parallel sizes must multiply to their number"
        )
    order = tuple(rank for _, rank in sorted(zip((place for place, _ in places), world.ranks, strict=True)))
    registered, known = mpu if hasattr(mpu, "disable_in_eval") else None, tuple(groups.values())
    return Ways(sizes["pp"], sizes["sp"], sizes["tp"], order=order, known=known, registered=registered)


def ways_of_mesh(mesh_param: Any) -> Ways:
    """Derive the axes from ``mesh_param``: (data-, sequence-parallel) sizes, which multiply to the ranks, or None."""
    if mesh_param is None:
        return Ways()
    try:
        data, sp = (int(size) for size in mesh_param)
    except (TypeError, ValueError):
        raise DeepSpeedConfigError(
            f"mesh_param is (data-parallel ranks, sequence-parallel ranks), two numbers, not {mesh_param!r}"
        ) from None
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if min(data, sp) < 1 or data * sp != ranks:
        raise DeepSpeedConfigError(
            f"mesh_param {data} data-parallel x {sp} sequence-parallel ranks are {data * sp}, but there are {ranks} "
            "ranks; the sizes must multiply to their number"
        )
    return Ways(sp=sp, order=tuple(range(ranks)))
