"""The getters of ``deepspeed.utils.groups``: ``get_<family>_group``, ``_world_size`` and ``_rank``, with a leading
underscore or without. An mpu's word comes first; without one the whole world is data parallel, and nothing else is.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from deepspeed.comm.calls import CALLS
from deepspeed.comm.collectives import require_group
from deepspeed.pending import pending_function, raise_not_yet

# What an mpu may call them.
_ALIASES = {"tensor_model_parallel": "model_parallel", "sequence_data_parallel": "data_parallel"}
_FAMILIES = (*_ALIASES, "data_parallel", "model_parallel", "sequence_parallel")
_WHAT = ("group", "world_size", "rank")


class _Registered:
    """The mpu given to ``deepspeed.initialize`` or ``groups.initialize``. The getters are bare functions that clients
    call without any engine in hand, so the last one has to be remembered here; engines keep their own."""

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
def _alone(_world: Any, rank: int) -> Any:
    # Local synchronisation: ranks outside the group need not make this call. Cached for the current world only.
    return dist.new_group([rank], use_local_synchronization=True)


def _answer(family: str, what: str) -> Any:
    """``what`` ("group", "world_size" or "rank") of ``family``, from the mpu where it knows it."""
    for name in (family, _ALIASES.get(family, family)):
        if (getter := getattr(_Registered.mpu, f"get_{name}_{what}", None)) is not None:
            return getter()
        if what != "group" and hasattr(_Registered.mpu, f"get_{name}_group"):
            return CALLS[f"get_{what}"](_answer(family, "group"))
    require_group("deepspeed.utils.groups")
    world, whole = dist.group.WORLD, family.endswith("data_parallel") or dist.get_world_size() == 1
    if what == "group":
        return world if whole else _alone(world, dist.get_rank())
    return CALLS[f"get_{what}"]() if whole else int(what == "world_size")


def _first_of(family: str) -> int:
    """The global rank of the first member of ``family``'s group."""
    return int(CALLS["get_all_ranks_from_group"](_answer(family, "group"))[0])


_PENDING = [f"get_{family}_{what}" for family in ("expert_parallel", "expert_data_parallel") for what in _WHAT]
GETTERS: dict[str, Callable[..., Any]] = {
    **{f"get_{family}_{what}": functools.partial(_answer, family, what) for family in _FAMILIES for what in _WHAT},
    "get_tensor_model_parallel_src_rank": functools.partial(_first_of, "tensor_model_parallel"),
    "get_broadcast_src_rank": functools.partial(_first_of, "sequence_data_parallel"),
    **{n: pending_function(f"deepspeed.utils.groups._{n}") for n in (*_PENDING, "get_local_all_to_all_group")},
}


def __getattr__(name: str) -> Any:
    try:
        return GETTERS[name.removeprefix("_")]
    except KeyError:
        raise AttributeError(f"deepspeed.utils.groups has no {name!r}", name=name) from None


def __dir__() -> list[str]:
    return sorted([*GETTERS, *(f"_{name}" for name in GETTERS), "initialize"])
