"""Everything of torch that has to be another thing while a program is recorded, put there and taken back.

Private names of torch that the simulator stands on, here and in its neighbours:
``torch.utils.backend_registration._setup_privateuseone_for_python_backend`` (device.py), ``torch._subclasses`` (fake
tensors), ``torch._C._distributed_c10d.FakeWork`` and ``torch.distributed._tools.fake_collectives`` (record.py),
``torch._C._set_only_lift_cpu_tensors``, ``Tensor._make_subclass``, ``UntypedStorage._cdata``,
``torch.utils._python_dispatch._disable_current_modes``, ``ProcessGroup._get_sequence_number_for_group`` (control.py).
"""

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional

from deepspeed.device import Accelerator, set_accelerator
from deepspeed.errors import UsageError
from deepspeed.simulate import device, natives
from deepspeed.simulate.costs import Machine
from deepspeed.simulate.device import MODULE, NAME
from deepspeed.simulate.record import Recorder
from deepspeed.simulate.timeline import Timeline


def _movable_data() -> property:
    """``FakeTensor.data``: assigning a tensor of another device moves the parameter there, as it does for real ones."""
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
    """``Tensor._make_subclass`` with the simulated device's dispatch keys for every fake tensor: ``set_data`` compares
    them, and a fake tensor's own device is a note beside them.
    """

    def make_subclass(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if "device_for_backend_keys" in kwargs:
            kwargs["device_for_backend_keys"] = torch.device(NAME)
        return make(cls, *args, **kwargs)

    return make_subclass


def _attention(plain: Callable[..., Any]) -> Callable[..., Any]:
    """The fused kernel, which torch would not choose on a device of others."""

    def attend(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
        scale: float | None = None, enable_gqa: bool = False,
    ) -> Any:  # fmt: skip
        if query.device.type != NAME or attn_mask is not None:
            return plain(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        if enable_gqa and (times := query.shape[-3] // key.shape[-3]) > 1:
            key, value = (t.repeat_interleave(times, -3) for t in (key, value))
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, scale=scale)[0]

    return attend


def _pinned_copy(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True).copy_(tensor)


@contextlib.contextmanager
def recording(
    machine: Machine, *, world: int, rank: int = 0, keep: bool = False, store: dist.Store | None = None
) -> Iterator[Recorder]:
    """Inside, this process is rank ``rank`` of ``world`` on ``machine``, and what it does is recorded, not done.

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
            (FakeTensor, "record_stream", lambda tensor, stream: stores.cover(tensor, stream.number)),
            (torch.Tensor, "pin_memory", lambda tensor, *_: _pinned_copy(tensor)),
            (torch, "equal", lambda *_: True),  # there are no values that could differ
            (FakeTensor, "tolist", lambda tensor: recorder.read_list(read_list, tensor)),
            (FakeWork, "wait", lambda work, *_: recorder.work_done(work)),
            (torch.Tensor, "_make_subclass", staticmethod(_keys_of_the_device(torch.Tensor._make_subclass))),
            (functional, "scaled_dot_product_attention", _attention(functional.scaled_dot_product_attention)),
        ):
            stack.enter_context(patch.object(owner, name, value))
        stack.enter_context(natives.replaced(recorder))
        stack.enter_context(MODULE.recorded_by(recorder))
        stack.enter_context(fake)
        torch._C._set_only_lift_cpu_tensors(True)  # noqa: FBT003
        stack.callback(torch._C._set_only_lift_cpu_tensors, False)  # noqa: FBT003
        stack.enter_context(recorder)
        yield recorder
