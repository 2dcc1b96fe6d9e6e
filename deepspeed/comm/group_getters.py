"""The getters of ``deepspeed.utils.groups``.

Data parallelism is the whole world unless an mpu says otherwise; tensor, sequence and expert parallelism have one rank.
"""

import functools
from typing import Any

import torch.distributed as dist

from deepspeed.comm import calls
from deepspeed.errors import UsageError
from deepspeed.pending import raise_not_yet


class _Registered:
    """The mpu given to ``deepspeed.initialize`` or ``groups.initialize``. The getters are bare functions that clients call
    without any engine in hand, so the last mpu has to be remembered here; engines keep their own."""

    mpu: Any = None


def register_mpu(mpu: Any) -> None:
    """Let the getters ask ``mpu`` first; None forgets it."""
    _Registered.mpu = mpu


def initialize(ep_size: int = 1, mpu: Any = None) -> None:
    """Deprecated: remembers ``mpu``; expert parallelism (``ep_size`` > 1) is not in this release."""
    if ep_size != 1:
        raise_not_yet(f"groups.initialize(ep_size={ep_size})", "Use ep_size=1.")
    register_mpu(mpu)


@functools.lru_cache(maxsize=1)
def _alone_in(_world: Any) -> Any:
    # Local synchronisation: other ranks need not make this call at the same time. Cached for the current world only.
    return dist.new_group([dist.get_rank()], use_local_synchronization=True)


def _from_mpu(*names: str) -> Any:
    for name in names:
        getter = getattr(_Registered.mpu, name, None)
        if getter is not None:
            return getter()
    return None


def _require_world() -> Any:
    if not dist.is_initialized():
        raise UsageError("deepspeed.utils.groups has no groups yet; call deepspeed.initialize() or deepspeed.init_distributed() first.")
    return dist.group.WORLD


def get_data_parallel_group() -> Any:
    """Group over which gradients are averaged."""
    world = _require_world()
    group = _from_mpu("get_data_parallel_group")
    return world if group is None else group


def get_data_parallel_world_size() -> int:
    """Ranks in the data-parallel group."""
    return calls.get_world_size(get_data_parallel_group())


def get_data_parallel_rank() -> int:
    """This rank's place in the data-parallel group."""
    return calls.get_rank(get_data_parallel_group())


def get_tensor_model_parallel_group() -> Any:
    """Group that holds one model together."""
    world = _require_world()
    group = _from_mpu("get_tensor_model_parallel_group", "get_model_parallel_group")
    return _alone_in(world) if group is None else group


def get_tensor_model_parallel_world_size() -> int:
    """Ranks that hold one model together."""
    return int(_from_mpu("get_tensor_model_parallel_world_size", "get_model_parallel_world_size") or 1)


def get_tensor_model_parallel_rank() -> int:
    """This rank's place in the tensor-parallel group."""
    return int(_from_mpu("get_tensor_model_parallel_rank", "get_model_parallel_rank") or 0)


def get_tensor_model_parallel_src_rank() -> int:
    """Global rank of the first member of the tensor-parallel group."""
    return calls.get_all_ranks_from_group(get_tensor_model_parallel_group())[0]


def get_sequence_parallel_group() -> Any:
    """Group that splits one sequence."""
    world = _require_world()
    group = _from_mpu("get_sequence_parallel_group")
    return _alone_in(world) if group is None else group


def get_sequence_parallel_world_size() -> int:
    """Ranks that split one sequence."""
    return int(_from_mpu("get_sequence_parallel_world_size") or 1)


def get_sequence_parallel_rank() -> int:
    """This rank's place in the sequence-parallel group."""
    return int(_from_mpu("get_sequence_parallel_rank") or 0)


def get_sequence_data_parallel_group() -> Any:
    """Group over which ZeRO shards: sequence times data parallel."""
    group = _from_mpu("get_sequence_data_parallel_group")
    return get_data_parallel_group() if group is None else group


def get_sequence_data_parallel_world_size() -> int:
    """Ranks in the sequence-times-data-parallel group."""
    return calls.get_world_size(get_sequence_data_parallel_group())


def get_sequence_data_parallel_rank() -> int:
    """This rank's place in the sequence-times-data-parallel group."""
    return calls.get_rank(get_sequence_data_parallel_group())


def get_broadcast_src_rank() -> int:
    """Global rank whose parameters the data-parallel group starts from."""
    return calls.get_all_ranks_from_group(get_sequence_data_parallel_group())[0]


def get_expert_parallel_group(group_name: str) -> Any:
    """NotYetError: there are no expert groups in this release."""
    raise_not_yet(f"the expert-parallel group {group_name!r}")


def get_local_all_to_all_group() -> Any:
    """NotYetError: hierarchical all-to-all is not in this release."""
    raise_not_yet("the local all-to-all group")
