"""The ``torch.distributed`` calls of ``deepspeed.comm``: checked for a process group and timed when the log is on.

Every collective takes three more keywords than torch's: ``prof`` (time this call whatever the settings say),
``log_name`` (name in the log) and ``debug`` (name of the caller, appended to the name when the log's ``debug`` is set).
"""

import functools
import inspect
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from deepspeed.accelerator.device import get_accelerator
from deepspeed.client.comm.comms_log import LOG
from deepspeed.comm.collectives import Collective, gather_flat, require_group, scatter_flat
from deepspeed.errors import pending_class

# Collective: its parameters, in torch's order; "*" marks the one whose bytes are the message.
_COLLECTIVES = {
    "broadcast": "*tensor src group=None async_op=False",
    "all_gather": "*tensor_list tensor group=None async_op=False",
    "all_gather_into_tensor": "*output_tensor tensor group=None async_op=False",
    "all_gather_coalesced": "*output_tensors input_tensors group=None async_op=False",
    "reduce_scatter": "output *input_list op=SUM group=None async_op=False",
    "reduce_scatter_tensor": "output_tensor *tensor op=SUM group=None async_op=False",
    "all_reduce": "*tensor op=SUM group=None async_op=False",
    "inference_all_reduce": "*tensor op=SUM group=None async_op=False",
    "all_reduce_coalesced": "*tensors op=SUM group=None async_op=False",
    "all_to_all_single": "output *tensor output_split_sizes=None input_split_sizes=None group=None async_op=False",
    "all_to_all": "output_tensor_list *input_tensor_list group=None async_op=False",
    "reduce": "*tensor dst op=SUM group=None async_op=False",
    "gather": "*tensor gather_list=None dst=0 group=None async_op=False",
    "scatter": "*tensor scatter_list=None src=0 group=None async_op=False",
    "send": "*tensor dst group=None tag=0",
    "recv": "*tensor src=None group=None tag=0",
    "isend": "*tensor dst group=None tag=0",
    "irecv": "*tensor src=None group=None tag=0",
    "barrier": "group=None async_op=False device_ids=None",
    "monitored_barrier": "group=None timeout=None wait_all_ranks=False",
}
# Everything else that needs a process group.
_OTHERS = {
    "broadcast_object_list": "object_list src group=None device=None",
    "all_gather_object": "object_list obj group=None",
    "batch_isend_irecv": "p2p_op_list",
    "get_rank": "group=None",
    "get_world_size": "group=None",
    "get_local_rank": "",
    "get_global_rank": "group=None group_rank=0",
    "get_world_group": "",
    "get_all_ranks_from_group": "group=None",
    "initialize_mesh_device": "mesh_shape mesh_dim_names",
}
_DEFAULTS = {"": inspect.Parameter.empty, "None": None, "False": False, "0": 0, "SUM": ReduceOp.SUM}


def _each(run: Callable[..., Any], *lists: Sequence[torch.Tensor], **how: Any) -> Collective | None:
    works = [run(*tensors, **how) for tensors in zip(*lists, strict=True)]
    return Collective(works) if how["async_op"] else None


# What is not torch's function of the same name over the same arguments.
_RUNS: dict[str, Callable[..., Any]] = {
    "all_gather_into_tensor": gather_flat,
    "all_gather_coalesced": lambda out, into, group, flag: _each(gather_flat, out, into, group=group, async_op=flag),
    "reduce_scatter_tensor": scatter_flat,
    "inference_all_reduce": lambda *args: dist.all_reduce(*args),
    "all_reduce_coalesced": lambda t, op, group, flag: _each(dist.all_reduce, t, op=op, group=group, async_op=flag),
    "get_local_rank": lambda: int(os.environ.get("LOCAL_RANK", "0")),
    "get_global_rank": lambda group, rank: rank if group is None else dist.get_global_rank(group, rank),
    "get_world_group": lambda: dist.group.WORLD,
    "get_all_ranks_from_group": lambda group: list(dist.get_process_group_ranks(group or dist.group.WORLD)),
    "initialize_mesh_device": lambda shape, names: dist.init_device_mesh(
        get_accelerator().device_name(), tuple(shape), mesh_dim_names=tuple(names)
    ),
}


class _TimedWork:
    """Asynchronous call in flight; its latency is recorded when the call is waited for."""

    def __init__(self, work: Any, end: Callable[[], None]) -> None:
        self._work, self._end = work, end

    def wait(self, *args: Any) -> Any:
        """Wait for the collective, then record it."""
        result = self._work.wait(*args)
        self._end()
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _make(op: str, text: str, *log_keywords: str) -> Callable[..., Any]:
    """Make the function of one row; it binds its arguments by its own signature and passes them on by position."""
    kinds, parts = inspect.Parameter, [part.partition("=") for part in text.split()]
    message = next((index for index, (name, _, _) in enumerate(parts) if name.startswith("*")), None)
    signature = inspect.Signature(
        [kinds(name.lstrip("*"), kinds.POSITIONAL_OR_KEYWORD, default=_DEFAULTS[value]) for name, _, value in parts]
        + [kinds(name, kinds.KEYWORD_ONLY, default=None) for name in log_keywords]
    )

    def call(*args: Any, **kwargs: Any) -> Any:
        require_group(f"deepspeed.comm.{op}")
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        run = functools.partial(_RUNS.get(op) or getattr(dist, op), *bound.args)
        log = bound.kwargs
        name = log.get("log_name") or op
        if not log_keywords or not LOG.wants(name, bool(log["prof"])):
            return run()
        tensors = () if message is None else bound.args[message]
        nbytes = sum(t.nbytes for t in ([tensors] if isinstance(tensors, torch.Tensor) else tensors))
        get_accelerator().synchronize()
        group = bound.arguments.get("group")
        end = LOG.started(name, nbytes, log["debug"], ranks=dist.get_world_size(group))
        result = run()
        if hasattr(result, "wait"):
            return _TimedWork(result, end)
        end()
        return result

    call.__name__ = call.__qualname__ = op
    call.__doc__ = f"``{op}{signature}``, as ``torch.distributed`` has it; UsageError without a process group."
    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


def P2POp(op: Callable[..., Any], tensor: torch.Tensor, peer: int, group: Any = None, tag: int = 0) -> Any:  # noqa: N802 (interface name)
    """Make an entry for ``batch_isend_irecv``; ``op`` is ``isend`` or ``irecv`` of this module or of torch."""
    return dist.P2POp(getattr(dist, op.__name__), tensor, peer, group, tag)


def destroy_process_group(group: Any = None) -> None:
    """Destroy ``group``, or all groups; does nothing without a process group."""
    if dist.is_initialized():
        dist.destroy_process_group(group)


def new_group(ranks: Sequence[int] | None = None, **kwargs: Any) -> Any:
    """Make a group of the global ``ranks``; every rank of the job must make the call."""
    require_group("deepspeed.comm.new_group")
    return dist.new_group(None if ranks is None else list(ranks), **kwargs)


CALLS = {op: _make(op, text, "prof", "log_name", "debug") for op, text in _COLLECTIVES.items()}
CALLS |= {op: _make(op, text) for op, text in _OTHERS.items()}
CALLS |= dict(allgather_fn=CALLS["all_gather_into_tensor"], reduce_scatter_fn=CALLS["reduce_scatter_tensor"])
_HAS = ("has_all_gather_into_tensor", "has_reduce_scatter_tensor", "has_all_reduce_coalesced")
CALLS |= dict.fromkeys(_HAS, lambda: True) | {"has_coalescing_manager": lambda: False}  # calls are issued one by one
CALLS |= {call.__name__: call for call in (P2POp, destroy_process_group, new_group)}
CALLS |= dict(is_available=dist.is_available, is_initialized=dist.is_initialized)
BESIDE = {
    "ReduceOp": ReduceOp,
    "TorchBackend": pending_class("deepspeed.comm.TorchBackend", "The calls are functions of deepspeed.comm."),
}
