"""The device layer on a real accelerator."""

import pytest
import torch

from deepspeed.accelerator.device import get_accelerator
from deepspeed.client import activation as checkpointing
from tests.gpu.target import needs_device

pytestmark = [pytest.mark.gpu, needs_device]


def test_streams_order_work() -> None:
    accelerator = get_accelerator()
    side, done = accelerator.Stream(), accelerator.Event(enable_timing=True)
    start = accelerator.Event(enable_timing=True)
    x = torch.ones(1024, device=accelerator.current_device_name())
    side.wait_stream(accelerator.current_stream())
    with accelerator.stream(side):
        start.record(side)
        y = x * 2
        done.record(side)
    accelerator.current_stream().wait_event(done)
    assert float(y.sum()) == 2048.0
    accelerator.synchronize()
    assert start.elapsed_time(done) >= 0.0


def test_memory_and_random_state() -> None:
    accelerator = get_accelerator()
    accelerator.reset_peak_memory_stats()
    before = accelerator.memory_allocated()
    block = torch.ones(2**20, device=accelerator.current_device_name())
    assert accelerator.memory_allocated() - before >= 4 * 2**20 <= accelerator.max_memory_allocated()
    assert 0 < accelerator.available_memory() <= accelerator.total_memory()
    accelerator.manual_seed_all(3)
    state = accelerator.get_rng_state()
    first = torch.rand_like(block)
    accelerator.set_rng_state(state)
    assert torch.equal(first, torch.rand_like(block))
    assert accelerator.default_generator(0).device.type == accelerator.device_name()
    assert accelerator.is_pinned(accelerator.pin_memory(torch.ones(4)))


def test_checkpoint_inputs_rest_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpointing, "_settings", checkpointing._Settings(checkpoint_in_cpu=True, synchronize=True))
    accelerator = get_accelerator()
    x = torch.ones(2**20, device=accelerator.current_device_name(), requires_grad=True)
    checkpointing.checkpoint(lambda value: (value * 3).square(), x * 1).sum().backward()
    assert float(x.grad[0]) == 18.0
