"""Activations in host memory: gradients stay bitwise the same, the last stay on the device, nothing is kept behind.

Copies from the CPU to itself stand for those of a device; what a stream does beside them is not seen here.
"""

import contextlib
import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepspeed.accelerator.device import get_accelerator
from deepspeed.errors import UsageError
from deepspeed.runtime.activation_checkpointing.offload_activations import (
    get_checkpoint_hidden_states_offloading_ctx_manager,
)
from deepspeed.sequence.tiling.offload import OffloadActivations

LAYERS = 6


def _gradients(context: Any, *, reentrant: bool, backwards: int = 1) -> list[torch.Tensor]:
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.2), nn.Tanh()) for _ in range(LAYERS))
    hidden = torch.randn(4, 32, requires_grad=True) * 1.0
    with context:
        for layer in layers:
            hidden = checkpoint(layer, hidden, use_reentrant=reentrant)
    for _ in range(backwards):
        hidden.square().sum().backward(retain_graph=backwards > 1)
    return [param.grad / backwards for param in layers.parameters() if param.grad is not None]


def _of_the_cpu(self: OffloadActivations, tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and not tensor.is_leaf and tensor.nbytes >= self._smallest


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("streams", [True, False])
def test_gradients_are_bitwise_the_same(monkeypatch: Any, reentrant: bool, streams: bool) -> None:
    monkeypatch.setattr(OffloadActivations, "moves", _of_the_cpu)
    make = functools.partial(
        get_checkpoint_hidden_states_offloading_ctx_manager, use_streams=streams, min_offload_bytes=64
    )
    plain = _gradients(contextlib.nullcontext(), reentrant=reentrant)
    manager = make(keep_last_count=2)
    for again in range(1, 3):
        found = _gradients(manager, reentrant=reentrant)
        assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True)) and len(found) == 2 * LAYERS
        assert manager.copied == again * (LAYERS - 2)
        assert not manager._known  # the backward has let all of them go
    bare = make(max_fwd_stash_count=0, keep_last_count=0)
    assert all(torch.equal(a, b) for a, b in zip(_gradients(bare, reentrant=reentrant), plain, strict=True))
    if not reentrant:
        twice = _gradients(make(), reentrant=False, backwards=2)
        assert all(torch.equal(a, b) for a, b in zip(twice, plain, strict=True))


def test_at_most_so_many_tensors_wait_for_their_copies(monkeypatch: Any) -> None:
    monkeypatch.setattr(OffloadActivations, "moves", _of_the_cpu)
    manager = get_checkpoint_hidden_states_offloading_ctx_manager(max_fwd_stash_count=1, keep_last_count=1)
    value = torch.randn(512, requires_grad=True)
    kept = [manager._pack(value * number) for number in range(5)]
    assert [one.tensor is None for one in kept] == [True, True, True, False, False]  # one waits, one is kept
    assert manager._pack(value) is value  # a leaf, as weights are
    assert torch.equal(manager._unpack(kept[1]), value.detach()) and kept[0].tensor is not None  # fetched ahead


def test_memory_that_was_filled_ahead_in_vain_waits_for_its_copy(monkeypatch: Any) -> None:
    monkeypatch.setattr(OffloadActivations, "moves", _of_the_cpu)
    manager = get_checkpoint_hidden_states_offloading_ctx_manager(keep_last_count=0, max_fwd_stash_count=0)
    value, waited = torch.randn(512, requires_grad=True), []
    kept = [manager._pack(value * number) for number in range(2)]
    manager._unpack(kept.pop())
    event = kept[0].event
    assert kept[0].tensor is not None and event is not None
    stream = type("Stream", (), {"wait_event": lambda _, event: waited.append(event)})()
    monkeypatch.setattr(get_accelerator(), "current_stream", lambda: stream, raising=False)
    kept.clear()
    assert waited == [event]


def test_on_the_cpu_nothing_is_copied() -> None:
    manager = get_checkpoint_hidden_states_offloading_ctx_manager()
    _gradients(manager, reentrant=False)
    assert manager.copied == 0
    with pytest.raises(UsageError, match="keep_last_count is a whole number of at least 0, not -1"):
        get_checkpoint_hidden_states_offloading_ctx_manager(keep_last_count=-1)


def test_only_what_a_forward_computed_on_a_device_moves() -> None:
    manager = get_checkpoint_hidden_states_offloading_ctx_manager()
    weight = nn.Parameter(torch.empty(16, 32, device="meta"))
    twice = weight * 2
    moves = [manager.moves(value) for value in (weight, twice, twice.detach(), twice[0], weight.t())]
    assert moves == [False, True, False, False, False]  # linear layers save such views of their weights


def test_what_several_operations_save_is_copied_once_and_keeps_its_strides(monkeypatch: Any) -> None:
    monkeypatch.setattr(OffloadActivations, "moves", _of_the_cpu)
    manager = get_checkpoint_hidden_states_offloading_ctx_manager(keep_last_count=0, max_fwd_stash_count=0)
    manager.share = 0.25
    value = (torch.randn(64, 32, requires_grad=True) * 1.0).t()
    kept, again = manager._pack(value), manager._pack(value.view_as(value))
    assert kept is again and manager.copied == 1
    assert kept.tensor is None and kept.host.numel() == 512 and kept.rest.numel() == 1536
    for _ in range(2):
        back = manager._unpack(kept)
        assert torch.equal(back, value.detach()) and back.stride() == value.stride()
    assert kept.tensor is None  # both have had it
    apart = manager._pack((torch.randn(64, 32, requires_grad=True) * 1.0)[:, ::2])
    assert isinstance(apart, torch.Tensor)  # has no memory of its own
    value.detach().mul_(2.0)
    assert manager._pack(value) is not kept
