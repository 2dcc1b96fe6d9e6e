"""The getters of ``deepspeed.utils.groups``: ``get_<family>_group``, ``_world_size`` and ``_rank``, with a leading
underscore or without; those of experts take a group name. An mpu's word comes first; without one the ranks are cut as
the latest living engine cuts them, and without one the whole world is data parallel.
"""

import functools
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from deepspeed.client.comm.calls import CALLS
from deepspeed.comm.collectives import require_group
from deepspeed.comm.mesh.groups import group_over
from deepspeed.comm.mesh.topology import Axis, Topology, dense_topology, expert_topology
from deepspeed.errors import UsageError
from deepspeed.monitor.process_settings import Borrowed

# Family: the axis of the topology that its groups span; those of experts cut the same ranks in another way.
_DATA = ("dp_outer", "dp")
_DENSE: dict[str, tuple[str, ...]] = {"data_parallel": _DATA, "sequence_data_parallel": (*_DATA, "sp")}
_DENSE |= {"tensor_model_parallel": ("tp",), "model_parallel": ("tp",), "sequence_parallel": ("sp",)}
_DENSE |= {"pipe_parallel": ("pp",)}
_EXPERTS = {"expert_parallel": "ep", "expert_data_parallel": "edp"}
# What else an mpu may call them.
_ALIASES = {"tensor_model_parallel": "model_parallel", "sequence_data_parallel": "data_parallel"}
KINDS = ("group", "world_size", "rank")


class _Registered:
    """State of the getters without an engine: the mpu given to ``initialize``, and the latest engine's topology."""

    mpu: Any = None
    topology: Topology | None = None


def register_mpu(mpu: Any) -> None:
    """Let the getters ask ``mpu`` first; None forgets it."""
    _Registered.mpu = mpu


def register_topology(topology: Topology | None) -> None:
    """Let the getters use ``topology``; None: the whole world is data parallel."""
    _Registered.topology = topology


def hold_registered(name: str, value: Any) -> Borrowed:
    """Let the getters use ``value`` as the "mpu" or the "topology" until the result is given back."""
    read, write = functools.partial(getattr, _Registered, name), functools.partial(setattr, _Registered, name)
    return Borrowed(name, value=value, read=read, write=write)


def initialize(ep_size: int = 1, mpu: Any = None) -> None:
    """Register ``mpu`` (deprecated), and make the groups of experts over ``ep_size`` ranks."""
    register_mpu(mpu)
    if ep_size != 1:
        create_expert_groups(ep_size)


def _topology() -> Topology:
    """Return how the ranks are cut now."""
    require_group("deepspeed.utils.groups")
    world = tuple(range(dist.get_world_size()))
    cut = _Registered.topology
    return cut if cut is not None and len(cut.ranks) == len(world) else dense_topology(world)


def _axis(topology: Topology, family: str, group_name: str | None) -> Axis:
    """Return the axis of ``family`` at this rank; ``group_name`` of experts is ``ep_size_<N>``."""
    if group_name is None:
        return topology.axis(dist.get_rank(), *_DENSE[family])
    ep_size = group_name.removeprefix("ep_size_")
    if not ep_size.isdigit() or ep_size == group_name:
        name = "ep_size_<number of ranks that hold different experts>"
        raise UsageError(f"expert groups are named {name!r}, not {group_name!r}")
    return expert_topology(topology, int(ep_size)).axis(dist.get_rank(), _EXPERTS[family])


def _answer(family: str, kind: str, group_name: str | None = None) -> Any:
    """Return ``kind`` ("group", "world_size" or "rank") of ``family``, from the mpu where it knows it."""
    for name in (family, _ALIASES.get(family, family)):
        if (getter := getattr(_Registered.mpu, f"get_{name}_{kind}", None)) is not None:
            return getter()
        if kind != "group" and hasattr(_Registered.mpu, f"get_{name}_group"):
            return CALLS[f"get_{kind}"](_answer(family, "group"))
    return answer_of(_topology(), family, kind, group_name)


def answer_of(topology: Topology, family: str, kind: str, group_name: str | None = None) -> Any:
    """Return ``kind`` of ``family`` where ``topology`` cuts the ranks of the job."""
    axis = _axis(topology, family, group_name)
    if kind == "group":
        world = dist.group.WORLD
        return world if axis.size == dist.get_world_size() else group_over(world, axis.ranks)
    return axis.size if kind == "world_size" else axis.index


def _getter(family: str, kind: str) -> Callable[..., Any]:
    if family in _DENSE:
        return lambda: _answer(family, kind)
    return lambda group_name: _answer(family, kind, group_name)


def _first_of(family: str) -> int:
    return int(CALLS["get_all_ranks_from_group"](_answer(family, "group"))[0])  # a global rank


def _machine_groups() -> dict[str, dist.ProcessGroup]:
    """Return this rank's two groups for an all-to-all in two steps: ``local_<machine>`` of the ranks of its machine,
    and ``global_<place>`` of those that have its place on theirs. Collective over each; the launcher says how many
    ranks a machine has (LOCAL_WORLD_SIZE), and without a number that divides all ranks they are one machine.
    """
    require_group("deepspeed.utils.groups")
    size, rank = dist.get_world_size(), dist.get_rank()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    local = local if 0 < local <= size and size % local == 0 else size
    first, place, world = rank // local * local, rank % local, dist.group.WORLD
    return {
        f"local_{rank // local}": group_over(world, tuple(range(first, first + local))),
        f"global_{place}": group_over(world, tuple(range(place, size, local))),
    }


def create_expert_groups(
    expert_parallel_size_: int,
    mpu: Any = None,
    use_data_before_expert_parallel_: bool = False,  # noqa: FBT001, FBT002 - the order that clients know
) -> None:
    """Make this rank's groups of experts over so many ranks, which the getters return. Collective over each group.

    Neighbours hold different experts, or the same ones with ``use_data_before_expert_parallel_``.
    """
    if mpu is not None:
        register_mpu(mpu)
    now = _topology()
    if now.data_first != use_data_before_expert_parallel_:  # the getters are to find the same groups
        register_topology(replace(now, data_first=use_data_before_expert_parallel_))
    for family in _EXPERTS:
        _answer(family, "group", f"ep_size_{expert_parallel_size_}")


GETTERS: dict[str, Callable[..., Any]] = {
    **{f"get_{family}_{kind}": _getter(family, kind) for family in (*_DENSE, *_EXPERTS) for kind in KINDS},
    "get_tensor_model_parallel_src_rank": functools.partial(_first_of, "tensor_model_parallel"),
    "get_broadcast_src_rank": functools.partial(_first_of, "sequence_data_parallel"),
    "get_local_all_to_all_group": _machine_groups,
    "create_expert_data_and_model_parallel": create_expert_groups,
}


def __getattr__(name: str) -> Any:
    try:
        return GETTERS[name.removeprefix("_")]
    except KeyError:
        raise AttributeError(f"deepspeed.utils.groups has no {name!r}", name=name) from None


def __dir__() -> list[str]:
    return sorted([*GETTERS, *(f"_{name}" for name in GETTERS), "initialize"])
