"""Everything of torch that has to be another thing while a program is recorded, put there and taken back.

Private names of torch that the simulator stands on, here and in its neighbours:
``torch.utils.backend_registration._setup_privateuseone_for_python_backend`` (device.py), ``torch._subclasses`` (fake
tensors), ``torch._C._distributed_c10d.FakeWork`` and ``torch.distributed._tools.fake_collectives`` (record.py),
``torch._C._set_only_lift_cpu_tensors``, ``Tensor._make_subclass``, ``UntypedStorage._cdata``,
``torch.utils._python_dispatch._disable_current_modes``, ``Library._destroy``,
``ProcessGroup._get_sequence_number_for_group`` (control.py).
"""

import contextlib
import importlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from deepspeed.accelerator.device import Accelerator, set_accelerator
from deepspeed.errors import UsageError
from deepspeed.tools.simulate import device, natives
from deepspeed.tools.simulate.costs import Machine
from deepspeed.tools.simulate.device import MODULE, NAME
from deepspeed.tools.simulate.record import Recorder
from deepspeed.tools.simulate.timeline import Timeline

_HALF = (torch.bfloat16, torch.float16)


def _movable_data() -> property:
    """Replace ``FakeTensor.data``: assigning a tensor of another device moves the parameter, as for real tensors."""
    plain: Any = torch.Tensor.data

    def read(self: FakeTensor) -> torch.Tensor:
        value: torch.Tensor = plain.__get__(self)
        return value

    def write(self: FakeTensor, value: torch.Tensor) -> None:
        if isinstance(value, FakeTensor):
            self.fake_device = value.fake_device
        plain.__set__(self, value)

    return property(read, write)


def _keys_of_the_device(make: Callable[..., Any]) -> Callable[..., Any]:
    """Give every fake tensor of ``Tensor._make_subclass`` the simulated device's dispatch keys: ``set_data`` compares
    them, and a fake tensor's own device is a note beside them.
    """

    def make_subclass(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if "device_for_backend_keys" in kwargs:
            kwargs["device_for_backend_keys"] = torch.device(NAME)
        return make(cls, *args, **kwargs)

    return make_subclass


class _Traced:
    """Replace ``torch._subclasses.FakeTensor``, by which libraries ask whether they are being traced: a library that
    thinks so builds masks, and leaves out looks at values, that a real step has not. Nothing is an instance.
    """


def _deep_copy(tensor: FakeTensor, memo: dict[int, Any]) -> torch.Tensor:
    """Copy in place of ``Tensor.__deepcopy__``, which copies the storage: to torch a fake one is in host memory."""
    if id(tensor) not in memo:
        made = tensor.detach().clone()
        is_param = isinstance(tensor, torch.nn.Parameter)
        memo[id(tensor)] = torch.nn.Parameter(made, requires_grad=tensor.requires_grad) if is_param else made
    copied: torch.Tensor = memo[id(tensor)]
    return copied


def _pinned_copy(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True).copy_(tensor)


def _kernel(query: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, *, grouped: bool) -> str:
    """Return the kernel that torch takes on a CUDA device, by ATen's sdp_utils.cpp; only one kernel takes a mask."""
    half, widths = query.dtype in _HALF, {query.shape[-1], value.shape[-1]}
    if query.dim() != 4 or query.dtype is torch.float64:
        return "plain"
    if mask is None and half and len(widths) == 1 and max(widths) <= 256:
        return "flash"
    return "plain" if grouped or any(width % (8 if half else 4) for width in widths) else "efficient"


@contextlib.contextmanager
def _fused_attention(plain_calls: Counter[str]) -> Iterator[None]:
    """Give attention a CUDA device's kernels inside, of which torch chooses none on other devices, however the function
    was imported. ``plain_calls`` counts the calls that are plain products on CUDA too, by what they are.
    """

    def attend(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None,
        dropout: float = 0.0, is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
    ) -> Any:  # fmt: skip
        grouped = enable_gqa and query.shape[-3] != key.shape[-3]
        kernel = _kernel(query, value, mask, grouped=grouped) if query.device.type == NAME else "host"
        if kernel == "plain":
            kind = "grouped " * grouped + "masked " * (mask is not None)
            plain_calls[f"{kind}{query.dtype} {tuple(query.shape)}"] += 1
        if kernel in ("plain", "host"):
            options = {"scale": scale, "enable_gqa": enable_gqa}
            return torch.ops.aten._scaled_dot_product_attention_math(
                query, key, value, mask, dropout, is_causal, **options
            )[0]
        if grouped:
            key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
        if kernel == "flash":
            flash = torch.ops.aten._scaled_dot_product_flash_attention
            return flash(query, key, value, dropout, is_causal, scale=scale)[0]
        if mask is not None:
            if mask.dtype is torch.bool:  # torch makes what is added to the scores first
                mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
            mask = mask.expand(*query.shape[:-1], key.shape[-2])
        trains = torch.is_grad_enabled() and query.requires_grad
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        return efficient(query, key, value, mask, trains, dropout, is_causal, scale=scale)[0]

    library = torch.library.Library("aten", "IMPL")  # noqa: TOR901
    for key in ("PrivateUse1", "AutogradPrivateUse1"):
        library.impl("scaled_dot_product_attention", attend, key)
    try:
        yield
    finally:
        library._destroy()


@contextlib.contextmanager
def recording(
    machine: Machine, *, world: int, rank: int = 0, keep: bool = False, store: dist.Store | None = None
) -> Iterator[Recorder]:
    """Record what this process does inside, as rank ``rank`` of ``world`` on ``machine``, instead of doing it.

    ``keep``: the timeline keeps every span. Starts torch.distributed with peers that do not exist, and ends it;
    ``store``: one that the other ranks' processes share.
    Raises UsageError where a process group exists already.
    """
    if dist.is_initialized():
        raise UsageError("a simulation starts its own process group; run it in a process that has none")
    device.install()
    importlib.import_module("torch._dynamo")  # before tensors are fake: it keeps some of its own
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    recorder = Recorder(fake, Timeline(machine.used_by(world), keep=keep))
    stores, read_list = recorder.stores, FakeTensor.tolist
    identity = {"RANK": rank, "LOCAL_RANK": rank % int(machine["gpus_per_node"]), "WORLD_SIZE": world}
    with contextlib.ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)  # kernels in host memory are one piece, on the one thread that is recorded
        stack.enter_context(patch.dict(os.environ, {name: str(value) for name, value in identity.items()}))
        stack.enter_context(patch.object(sys, "excepthook", sys.excepthook))  # a process group puts its own there
        dist.init_process_group("fake", store=store or dist.HashStore(), rank=rank, world_size=world)
        stack.callback(dist.destroy_process_group)
        set_accelerator(Accelerator(NAME))
        stack.callback(set_accelerator, None)
        for owner, name, value in (
            (torch.UntypedStorage, "resize_", lambda storage, nbytes: stores.resize(storage, nbytes)),
            (torch.UntypedStorage, "data_ptr", lambda storage: stores.storage_pointer(storage)),
            (FakeTensor, "data_ptr", lambda tensor: stores.pointer(tensor)),
            (FakeTensor, "data", _movable_data()),
            (FakeTensor, "__deepcopy__", _deep_copy),
            (FakeTensor, "record_stream", lambda tensor, stream: stores.cover(tensor, stream.number)),
            (torch.Tensor, "pin_memory", lambda tensor, *_: _pinned_copy(tensor)),
            (torch, "equal", lambda *_: True),  # there are no values that could differ
            (FakeTensor, "tolist", lambda tensor: recorder.read_list(read_list, tensor)),
            (FakeWork, "wait", lambda work, *_: recorder.work_done(work)),
            (torch.Tensor, "_make_subclass", staticmethod(_keys_of_the_device(torch.Tensor._make_subclass))),
            (torch._subclasses, "FakeTensor", _Traced),
        ):
            stack.enter_context(patch.object(owner, name, value))
        stack.enter_context(natives.replaced(recorder))
        stack.enter_context(_fused_attention(recorder.plain_attention))
        stack.enter_context(MODULE.recorded_by(recorder))
        stack.enter_context(fake)
        torch._C._set_only_lift_cpu_tensors(True)  # noqa: FBT003
        stack.callback(torch._C._set_only_lift_cpu_tensors, False)  # noqa: FBT003
        stack.enter_context(recorder)
        yield recorder
