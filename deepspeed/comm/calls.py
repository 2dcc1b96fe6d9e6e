"""The ``torch.distributed`` calls of ``deepspeed.comm``: checked for a process group and timed when the log is on.

Every call takes three more keywords than torch's: ``prof`` (time this call whatever the settings say), ``log_name``
(name in the log) and ``debug`` (name of the caller, appended to the name when the log's ``debug`` is set; found when
not given).
"""

import functools
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from deepspeed.comm.trace import LOG, TimedWork
from deepspeed.device import get_accelerator
from deepspeed.errors import UsageError

# torch 2.13 renamed the tensor collectives; older releases in our range have only the first names.
_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Group = Any
Work = Any


def _require_group(op: str) -> None:
    if not dist.is_initialized():
        raise UsageError(f"deepspeed.comm.{op} needs a process group; call deepspeed.init_distributed() first.")


def _nbytes(*tensors: torch.Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _call(op: str, size: int, run: Callable[[], Any], log: dict[str, Any]) -> Any:
    """Run one collective of ``size`` bytes; ``log`` holds the caller's prof, log_name and debug."""
    _require_group(op)
    unknown = set(log) - {"prof", "log_name", "debug"}
    if unknown:
        raise TypeError(f"{op}() got an unexpected keyword argument {sorted(unknown)[0]!r}")
    name = log.get("log_name") or op
    if not LOG.wants(name, bool(log.get("prof"))):
        return run()
    name = LOG.named(name, log.get("debug"))
    get_accelerator().synchronize()
    start = time.perf_counter()
    result = run()
    if result is not None and hasattr(result, "wait"):
        return TimedWork(result, name, size, start)
    get_accelerator().synchronize()
    LOG.record(name, size, (time.perf_counter() - start) * 1e3)
    return result


def broadcast(tensor: torch.Tensor, src: int, group: Group = None, async_op: bool = False, **log: Any) -> Work:
    """Copy ``tensor`` of global rank ``src`` to all ranks."""
    return _call("broadcast", _nbytes(tensor), lambda: dist.broadcast(tensor, src, group=group, async_op=async_op), log)


def broadcast_object_list(object_list: list[Any], src: int, group: Group = None, device: Any = None) -> None:
    """Copy picklable objects of global rank ``src`` to all ranks, in place."""
    _require_group("broadcast_object_list")
    dist.broadcast_object_list(object_list, src=src, group=group, device=device)


def all_gather(
    tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Group = None, async_op: bool = False, **log: Any
) -> Work:
    """Collect every rank's ``tensor`` in ``tensor_list``."""
    return _call(
        "all_gather",
        _nbytes(*tensor_list),
        lambda: dist.all_gather(tensor_list, tensor, group=group, async_op=async_op),
        log,
    )


def all_gather_object(object_list: list[Any], obj: Any, group: Group = None) -> None:
    """Collect every rank's picklable object."""
    _require_group("all_gather_object")
    dist.all_gather_object(object_list, obj, group=group)


def all_gather_into_tensor(
    output_tensor: torch.Tensor, tensor: torch.Tensor, group: Group = None, async_op: bool = False, **log: Any
) -> Work:
    """Collect every rank's ``tensor`` in one tensor of world-size times its elements."""
    run = functools.partial(_gather_flat, output_tensor, tensor, group=group, async_op=async_op)
    return _call("all_gather_into_tensor", _nbytes(output_tensor), run, log)


allgather_fn = all_gather_into_tensor


class _WorkList:
    """Several calls in flight, waited for together."""

    def __init__(self, works: list[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        """Wait for all of them."""
        for work in self._works:
            work.wait()

    def is_completed(self) -> bool:
        """True when none is in flight."""
        return all(work.is_completed() for work in self._works)


def _each(calls: Sequence[Callable[[], Work]], async_op: bool) -> _WorkList | None:
    works = [call() for call in calls]
    return _WorkList(works) if async_op else None


def all_gather_coalesced(
    output_tensors: Sequence[torch.Tensor],
    input_tensors: Sequence[torch.Tensor],
    group: Group = None,
    async_op: bool = False,
    **log: Any,
) -> Work:
    """``all_gather_into_tensor`` for pairs of tensors."""
    pairs = list(zip(output_tensors, input_tensors, strict=True))
    calls = [functools.partial(_gather_flat, o, i, group=group, async_op=async_op) for o, i in pairs]
    return _call("all_gather_coalesced", _nbytes(*output_tensors), lambda: _each(calls, async_op), log)


def reduce_scatter(
    output: torch.Tensor,
    input_list: list[torch.Tensor],
    op: Any = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    **log: Any,
) -> Work:
    """Reduce the list element-wise over ranks; rank i keeps entry i."""
    run = functools.partial(dist.reduce_scatter, output, input_list, op=op, group=group, async_op=async_op)
    return _call("reduce_scatter", _nbytes(*input_list), run, log)


def reduce_scatter_tensor(
    output_tensor: torch.Tensor,
    tensor: torch.Tensor,
    op: Any = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    **log: Any,
) -> Work:
    """Reduce ``tensor`` over ranks; rank i keeps its i-th part."""
    run = functools.partial(_scatter_flat, output_tensor, tensor, op=op, group=group, async_op=async_op)
    return _call("reduce_scatter_tensor", _nbytes(tensor), run, log)


reduce_scatter_fn = reduce_scatter_tensor


def all_reduce(
    tensor: torch.Tensor, op: Any = ReduceOp.SUM, group: Group = None, async_op: bool = False, **log: Any
) -> Work:
    """Reduce ``tensor`` in place over ranks; all ranks get the result."""
    return _call(
        "all_reduce", _nbytes(tensor), lambda: dist.all_reduce(tensor, op=op, group=group, async_op=async_op), log
    )


def inference_all_reduce(
    tensor: torch.Tensor, op: Any = ReduceOp.SUM, group: Group = None, async_op: bool = False, **log: Any
) -> Work:
    """``all_reduce`` under the name that inference code logs."""
    return _call(
        "inference_all_reduce",
        _nbytes(tensor),
        lambda: dist.all_reduce(tensor, op=op, group=group, async_op=async_op),
        log,
    )


def all_reduce_coalesced(
    tensors: Sequence[torch.Tensor], op: Any = ReduceOp.SUM, group: Group = None, async_op: bool = False, **log: Any
) -> Work:
    """``all_reduce`` for several tensors."""
    calls = [functools.partial(dist.all_reduce, t, op=op, group=group, async_op=async_op) for t in tensors]
    return _call("all_reduce_coalesced", _nbytes(*tensors), lambda: _each(calls, async_op), log)


def all_to_all_single(
    output: torch.Tensor,
    tensor: torch.Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: Group = None,
    async_op: bool = False,
    **log: Any,
) -> Work:
    """Send part i of ``tensor`` (dim 0) to rank i and collect what the ranks sent here."""
    splits = {"output_split_sizes": output_split_sizes, "input_split_sizes": input_split_sizes}
    run = functools.partial(dist.all_to_all_single, output, tensor, **splits, group=group, async_op=async_op)
    return _call("all_to_all_single", _nbytes(tensor), run, log)


def all_to_all(
    output_tensor_list: list[torch.Tensor],
    input_tensor_list: list[torch.Tensor],
    group: Group = None,
    async_op: bool = False,
    **log: Any,
) -> Work:
    """Send entry i to rank i and collect what the ranks sent here."""
    run = functools.partial(dist.all_to_all, output_tensor_list, input_tensor_list, group=group, async_op=async_op)
    return _call("all_to_all", _nbytes(*input_tensor_list), run, log)


def reduce(
    tensor: torch.Tensor, dst: int, op: Any = ReduceOp.SUM, group: Group = None, async_op: bool = False, **log: Any
) -> Work:
    """Reduce ``tensor`` over ranks; only global rank ``dst`` gets the result."""
    return _call(
        "reduce", _nbytes(tensor), lambda: dist.reduce(tensor, dst, op=op, group=group, async_op=async_op), log
    )


def gather(
    tensor: torch.Tensor,
    gather_list: list[torch.Tensor] | None = None,
    dst: int = 0,
    group: Group = None,
    async_op: bool = False,
    **log: Any,
) -> Work:
    """Collect every rank's ``tensor`` on global rank ``dst``."""
    return _call(
        "gather",
        _nbytes(tensor),
        lambda: dist.gather(tensor, gather_list, dst=dst, group=group, async_op=async_op),
        log,
    )


def scatter(
    tensor: torch.Tensor,
    scatter_list: list[torch.Tensor] | None = None,
    src: int = 0,
    group: Group = None,
    async_op: bool = False,
    **log: Any,
) -> Work:
    """Give every rank one entry of global rank ``src``'s list."""
    return _call(
        "scatter",
        _nbytes(tensor),
        lambda: dist.scatter(tensor, scatter_list, src=src, group=group, async_op=async_op),
        log,
    )


def send(tensor: torch.Tensor, dst: int, group: Group = None, tag: int = 0, **log: Any) -> None:
    """Send to global rank ``dst`` and wait."""
    _call("send", _nbytes(tensor), lambda: dist.send(tensor, dst, group=group, tag=tag), log)


def recv(tensor: torch.Tensor, src: int | None = None, group: Group = None, tag: int = 0, **log: Any) -> int:
    """Receive from global rank ``src`` (None: from anyone); returns the sender."""
    return int(_call("recv", _nbytes(tensor), lambda: dist.recv(tensor, src, group=group, tag=tag), log))


def isend(tensor: torch.Tensor, dst: int, group: Group = None, tag: int = 0, **log: Any) -> Work:
    """Start sending to global rank ``dst``."""
    return _call("isend", _nbytes(tensor), lambda: dist.isend(tensor, dst, group=group, tag=tag), log)


def irecv(tensor: torch.Tensor, src: int | None = None, group: Group = None, tag: int = 0, **log: Any) -> Work:
    """Start receiving from global rank ``src``."""
    return _call("irecv", _nbytes(tensor), lambda: dist.irecv(tensor, src, group=group, tag=tag), log)


def P2POp(op: Callable[..., Any], tensor: torch.Tensor, peer: int, group: Group = None, tag: int = 0) -> Any:  # noqa: N802 (interface name)
    """One entry for ``batch_isend_irecv``; ``op`` is ``isend`` or ``irecv`` of this module or of torch."""
    native = {isend: dist.isend, irecv: dist.irecv}.get(op, op)
    return dist.P2POp(native, tensor, peer, group, tag)


def batch_isend_irecv(p2p_op_list: list[Any]) -> list[Work]:
    """Start all transfers of the list."""
    _require_group("batch_isend_irecv")
    return list(dist.batch_isend_irecv(p2p_op_list))


def barrier(group: Group = None, async_op: bool = False, device_ids: list[int] | None = None, **log: Any) -> Work:
    """Wait until every rank is here."""
    return _call("barrier", 0, lambda: dist.barrier(group=group, async_op=async_op, device_ids=device_ids), log)


def monitored_barrier(
    group: Group = None, timeout: timedelta | None = None, wait_all_ranks: bool = False, **log: Any
) -> None:
    """Barrier that names the missing ranks when ``timeout`` passes (gloo only)."""
    _call(
        "monitored_barrier",
        0,
        lambda: dist.monitored_barrier(group, timeout=timeout, wait_all_ranks=wait_all_ranks),
        log,
    )


# information


def is_available() -> bool:
    """True when PyTorch has ``torch.distributed``."""
    return dist.is_available()


def is_initialized() -> bool:
    """True when there is a process group, whoever started it."""
    return dist.is_available() and dist.is_initialized()


def get_rank(group: Group = None) -> int:
    """This process' rank in ``group``."""
    _require_group("get_rank")
    return dist.get_rank(group)


def get_world_size(group: Group = None) -> int:
    """Number of ranks in ``group``."""
    _require_group("get_world_size")
    return dist.get_world_size(group)


def get_local_rank() -> int:
    """Rank among the processes of this machine, as the launcher states it."""
    _require_group("get_local_rank")
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_global_rank(group: Group = None, group_rank: int = 0) -> int:
    """Global rank of rank ``group_rank`` of ``group``."""
    _require_group("get_global_rank")
    return group_rank if group is None else dist.get_global_rank(group, group_rank)


def get_world_group() -> Group:
    """The group of all ranks."""
    _require_group("get_world_group")
    return dist.group.WORLD


def get_all_ranks_from_group(group: Group = None) -> list[int]:
    """Global ranks of ``group`` in group order."""
    _require_group("get_all_ranks_from_group")
    return list(dist.get_process_group_ranks(dist.group.WORLD if group is None else group))


def new_group(ranks: Sequence[int] | None = None, **kwargs: Any) -> Group:
    """A group of the global ``ranks``; every rank of the job must make the call."""
    _require_group("new_group")
    return dist.new_group(None if ranks is None else list(ranks), **kwargs)


def destroy_process_group(group: Group = None) -> None:
    """Take ``group``, or everything, down; does nothing without a process group."""
    if is_initialized():
        dist.destroy_process_group(group)


def initialize_mesh_device(mesh_shape: tuple[int, ...], mesh_dim_names: tuple[str, ...]) -> Any:
    """A ``DeviceMesh`` of this accelerator over all ranks."""
    _require_group("initialize_mesh_device")
    return dist.init_device_mesh(
        get_accelerator().device_name(), tuple(mesh_shape), mesh_dim_names=tuple(mesh_dim_names)
    )


def has_all_gather_into_tensor() -> bool:
    """True: every supported torch has it."""
    return hasattr(dist, "all_gather_into_tensor")


def has_reduce_scatter_tensor() -> bool:
    """True: every supported torch has it."""
    return hasattr(dist, "reduce_scatter_tensor")


def has_all_reduce_coalesced() -> bool:
    """True: provided by this module."""
    return True


def has_coalescing_manager() -> bool:
    """False: calls are issued one by one."""
    return False
