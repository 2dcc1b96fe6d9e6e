"""The getters of ``deepspeed.utils.groups``.

An mpu's word comes first, then the registered topology; without either the whole world is data parallel.
"""

import functools
from typing import Any

import torch.distributed as dist

from deepspeed.comm import calls
from deepspeed.errors import UsageError
from deepspeed.mesh.topology import Axis, Topology, dense_topology, expert_topology
from deepspeed.pending import raise_not_yet


class _Registered:
    """The mpu given to ``deepspeed.initialize`` or ``groups.initialize``, and the topology. The getters are bare
    functions that clients call without any engine in hand, so the last ones have to be remembered here; engines keep
    their own."""

    mpu: Any = None
    topology: Topology | None = None


def register_mpu(mpu: Any) -> None:
    """Let the getters ask ``mpu`` first; None forgets it."""
    _Registered.mpu = mpu


def register_topology(topology: Topology | None) -> None:
    """Let the getters answer from ``topology`` (dense axes); None: data parallelism is the whole world."""
    _Registered.topology = topology


def initialize(ep_size: int = 1, mpu: Any = None) -> None:
    """Deprecated: remembers ``mpu``; expert parallelism (``ep_size`` > 1) is not in this release."""
    if ep_size != 1:
        raise_not_yet(f"groups.initialize(ep_size={ep_size})", "Use ep_size=1.")
    register_mpu(mpu)


def _topology() -> Topology:
    if not dist.is_initialized():
        raise UsageError(
            "deepspeed.utils.groups has no groups yet; call deepspeed.initialize() or "
            "deepspeed.init_distributed() first."
        )
    return _Registered.topology or dense_topology(tuple(range(dist.get_world_size())))


@functools.lru_cache(maxsize=64)
def _new_group(_world: Any, ranks: tuple[int, ...]) -> Any:
    # Local synchronisation: ranks outside the group need not make this call. Cached for the current world only.
    return dist.new_group(list(ranks), use_local_synchronization=True)


def _group(axis: Axis) -> Any:
    world = dist.group.WORLD
    return world if axis.size == dist.get_world_size() else _new_group(world, axis.ranks)


def _asked(kind: str, what: str, topology: Topology, *axes: str) -> Any:
    """``what`` ("group", "world_size" or "rank") of the group over ``axes``, which an mpu knows as ``kind``."""
    kinds = [kind, "model_parallel"] if kind == "tensor_model_parallel" else [kind]
    for name in kinds:
        if (getter := getattr(_Registered.mpu, f"get_{name}_{what}", None)) is not None:
            return getter()
    if what != "group" and any(hasattr(_Registered.mpu, f"get_{name}_group") for name in kinds):
        group = _asked(kind, "group", topology, *axes)
        return calls.get_world_size(group) if what == "world_size" else calls.get_rank(group)
    axis = topology.axis(dist.get_rank(), *axes)
    return {"group": lambda: _group(axis), "world_size": lambda: axis.size, "rank": lambda: axis.index}[what]()


def get_data_parallel_group() -> Any:
    """Group over which gradients are averaged."""
    return _asked("data_parallel", "group", _topology(), "dp_outer", "dp")


def get_data_parallel_world_size() -> int:
    """Ranks in the data-parallel group."""
    return int(_asked("data_parallel", "world_size", _topology(), "dp_outer", "dp"))


def get_data_parallel_rank() -> int:
    """This rank's place in the data-parallel group."""
    return int(_asked("data_parallel", "rank", _topology(), "dp_outer", "dp"))


def get_tensor_model_parallel_group() -> Any:
    """Group that holds one model together."""
    return _asked("tensor_model_parallel", "group", _topology(), "tp")


def get_tensor_model_parallel_world_size() -> int:
    """Ranks that hold one model together."""
    return int(_asked("tensor_model_parallel", "world_size", _topology(), "tp"))


def get_tensor_model_parallel_rank() -> int:
    """This rank's place in the tensor-parallel group."""
    return int(_asked("tensor_model_parallel", "rank", _topology(), "tp"))


def get_tensor_model_parallel_src_rank() -> int:
    """Global rank of the first member of the tensor-parallel group."""
    return calls.get_all_ranks_from_group(get_tensor_model_parallel_group())[0]


def get_sequence_parallel_group() -> Any:
    """Group that splits one sequence."""
    return _asked("sequence_parallel", "group", _topology(), "sp")


def get_sequence_parallel_world_size() -> int:
    """Ranks that split one sequence."""
    return int(_asked("sequence_parallel", "world_size", _topology(), "sp"))


def get_sequence_parallel_rank() -> int:
    """This rank's place in the sequence-parallel group."""
    return int(_asked("sequence_parallel", "rank", _topology(), "sp"))


def get_sequence_data_parallel_group() -> Any:
    """Group over which ZeRO shards: sequence times data parallel."""
    if _Registered.mpu is not None and not hasattr(_Registered.mpu, "get_sequence_data_parallel_group"):
        return get_data_parallel_group()
    return _asked("sequence_data_parallel", "group", _topology(), "dp_outer", "dp", "sp")


def get_sequence_data_parallel_world_size() -> int:
    """Ranks in the sequence-times-data-parallel group."""
    return calls.get_world_size(get_sequence_data_parallel_group())


def get_sequence_data_parallel_rank() -> int:
    """This rank's place in the sequence-times-data-parallel group."""
    return calls.get_rank(get_sequence_data_parallel_group())


def get_broadcast_src_rank() -> int:
    """Global rank whose parameters the data-parallel group starts from."""
    return calls.get_all_ranks_from_group(get_sequence_data_parallel_group())[0]


def _experts(group_name: str) -> Topology:
    """The expert factorisation named ``ep_size_<N>``. Raises UsageError for other names, DeepSpeedConfigError for sizes
    that do not fit.
    """
    ways = group_name.removeprefix("ep_size_")
    if not ways.isdigit() or ways == group_name:
        raise UsageError(
            f"expert groups are named 'ep_size_<number of ranks that hold different experts>', not {group_name!r}"
        )
    return expert_topology(_topology(), int(ways))


def get_expert_parallel_group(group_name: str) -> Any:
    """Group whose ranks hold different experts."""
    return _asked("expert_parallel", "group", _experts(group_name), "ep")


def get_expert_parallel_world_size(group_name: str) -> int:
    """Ranks that hold different experts."""
    return int(_asked("expert_parallel", "world_size", _experts(group_name), "ep"))


def get_expert_parallel_rank(group_name: str) -> int:
    """This rank's place among those that hold different experts."""
    return int(_asked("expert_parallel", "rank", _experts(group_name), "ep"))


def get_expert_data_parallel_group(group_name: str) -> Any:
    """Group whose ranks hold the same experts."""
    return _asked("expert_data_parallel", "group", _experts(group_name), "dp_outer", "edp")


def get_local_all_to_all_group() -> Any:
    """NotYetError: hierarchical all-to-all is not in this release."""
    raise_not_yet("the local all-to-all group")
