"""Gathers by the device's copy engines: they land in memory that every member of a group has registered.

Collectives take multiprocessors away from the kernels beside them. NCCL (2.28 and later) moves a gather by the copy
engines instead where its communicator was made with the zero-CTA policy and its output lies in symmetric memory. That
has to be the same piece of it on all members, while which memory of a unit is free differs from rank to rank; so there
is one window, as large as the largest unit, and what has come to it is copied to where it belongs.

Private torch names used here: ``torch.distributed._symmetric_memory`` (``set_backend``, ``empty``, ``rendezvous``).
"""

import importlib
import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from deepspeed.comm.collectives import AxisGroup, Collective, as_bytes, describe, gather_flat, gather_objects
from deepspeed.device import get_accelerator
from deepspeed.observe.log import logger
from deepspeed.tier.transfer import ARRIVED, Transfer

_SYMMETRIC = "torch.distributed._symmetric_memory"
_BACKENDS, _LEAST_NCCL = ("nccl",), (2, 28)


def _refusal(backend: str) -> str:
    """Why this rank cannot have a window; "" where it may."""
    if backend not in _BACKENDS:
        return f"only nccl has such gathers, and the backend is {backend}"
    policy = getattr(getattr(dist, "ProcessGroupNCCL", None), "NCCL_CTA_POLICY_ZERO", None)
    version = get_accelerator().collectives_version()
    if policy is None or version < _LEAST_NCCL:
        number = ".".join(map(str, version)) or "unknown"
        return f"it takes NCCL 2.28 or later, and PyTorch {torch.__version__} has {number}"
    try:
        module = importlib.import_module(_SYMMETRIC)
    except ImportError as error:
        return f"PyTorch {torch.__version__} has no symmetric memory ({error})"
    absent = [name for name in ("set_backend", "empty", "rendezvous") if not hasattr(module, name)]
    return f"PyTorch {torch.__version__} has no {_SYMMETRIC}.{absent[0]}" if absent else ""


def _settled(why: str, group: AxisGroup, *, among: object = None) -> bool:
    """Whether no member has a reason against it, nor what they are ``among`` differs; the first logs it. Collective."""
    reasons, homes = zip(*gather_objects((why, among), group), strict=True)
    first = next(filter(None, reasons), "")
    if not first and len(set(homes)) > 1:
        first = "the ranks are on several machines, which copy engines do not reach across"
    if first and group.index == 0:
        logger.warning("zero_optimization.copy_engine_gathers is left out, gathers go the usual way: %s", first)
    return not first


def window_options(group: AxisGroup) -> Any:
    """What a communicator over the ranks of ``group`` has to be made with for gathers by copy engines; None where there
    are none, for a reason in the log. Collective.
    """
    if not _settled(_refusal(group.backend), group, among=socket.gethostname()):
        return None
    nccl: Any = dist.ProcessGroupNCCL  # torch's stubs do not know its policies
    options = nccl.Options()
    options.config.cta_policy = nccl.NCCL_CTA_POLICY_ZERO
    return options


class Window:
    """Registered memory of the members of one group. Closed until ``open``; then gathers that fit go through it."""

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None
        # The last one through it, and when that has been copied to where it belongs.
        self._last: Transfer = ARRIVED
        self._left: Any = None

    def open(self, nbytes: int, group: AxisGroup, device: torch.device) -> None:
        """Register ``nbytes`` of the memory of ``device``. Collective: all members do, or none; the log says why."""
        memory: torch.Tensor | None = None

        def allocate() -> None:
            nonlocal memory
            module = importlib.import_module(_SYMMETRIC)
            module.set_backend("NCCL")
            memory = module.empty(nbytes, dtype=torch.uint8, device=device)

        def meet() -> None:
            assert memory is not None and group.pg is not None
            # The first collective makes the communicator, which registers; a barrier would choose a device by itself.
            dist.all_reduce(torch.zeros(1, device=device), group=group.pg)
            importlib.import_module(_SYMMETRIC).rendezvous(memory, group.pg.group_name)

        if all(_settled(_failure(step), group) for step in (allocate, meet)):
            self._memory = memory

    def close(self) -> None:
        """Give the memory back."""
        self._memory, self._last, self._left = None, ARRIVED, None

    def fits(self, nbytes: int) -> bool:
        """Whether a gather of so many bytes goes through the window."""
        return self._memory is not None and nbytes <= self._memory.numel()

    def gather(self, full: torch.Tensor, shard: torch.Tensor, group: AxisGroup) -> Transfer:
        """``collectives.all_gather`` by copy engines. Asynchronous; ``full`` is filled by the stream that waits."""
        assert self._memory is not None
        accelerator, end = get_accelerator(), group.note("all_gather", full)
        target, piece = as_bytes(full), as_bytes(shard)
        landing = self._memory[: target.nbytes].view(target.dtype)
        self._last.wait()
        if self._left is not None:  # that may have been on another stream
            accelerator.current_stream().wait_event(self._left)

        def leave() -> None:
            target.copy_(landing)
            self._left = accelerator.Event()
            self._left.record(accelerator.current_stream())

        work = gather_flat(landing, piece, group=group.pg, async_op=True)
        self._last = Collective([work], full, shard, landing, then=(end, leave))
        return self._last


def _failure(step: Callable[[], None]) -> str:
    """Why ``step`` has not worked; "" where it has. Torch refuses by errors of several kinds."""
    try:
        step()
    except (RuntimeError, ValueError, TypeError, AttributeError, ImportError) as error:
        return describe(error)
    return ""
