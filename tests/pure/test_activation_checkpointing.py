"""``deepspeed.checkpointing``: same numbers as without, the same random draws again, settings that are checked."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from deepspeed.client import activation as checkpointing
from deepspeed.errors import UsageError


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setattr(checkpointing, "_settings", checkpointing._Settings())
    monkeypatch.setattr(checkpointing, "_CUDA_RNG_STATE_TRACKER", checkpointing.RNGStatesTracker())
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.runs = 0

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        self.runs += 1
        tracker = checkpointing.get_cuda_rng_tracker()
        with tracker.fork() if tracker.states_ else contextlib.nullcontext():
            x = nn.functional.dropout(x, 0.5)
        return nn.functional.dropout(torch.tanh(self.layer(x)) * scale, 0.5)


KINDS = {"reentrant": checkpointing.checkpoint, "other": checkpointing.non_reentrant_checkpoint}


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_same_gradients_as_without(kind: str, needs_grad: bool, streams: bool) -> None:
    torch.manual_seed(0)
    block, data = Block(), torch.randn(4, 8)

    def gradients(call: object) -> list[torch.Tensor]:
        torch.manual_seed(5)
        if streams:
            checkpointing.model_parallel_cuda_manual_seed(11)
        x = data.clone().requires_grad_(needs_grad)
        block.zero_grad()
        out = call(block, x) if call else block(x)
        torch.rand(3)  # moves the default stream on between forward and backward
        if streams:
            with checkpointing.get_cuda_rng_tracker().fork():
                torch.rand(3)
        out.square().sum().backward()
        return [p.grad.clone() for p in block.parameters()] + ([x.grad.clone()] if needs_grad else [])

    plain = gradients(None)
    runs = block.runs
    checked = gradients(KINDS[kind])
    assert block.runs == runs + 2  # once forward, once again in backward
    for a, b in zip(plain, checked, strict=True):
        assert torch.equal(a, b)


def test_keyword_arguments() -> None:
    block, x = Block().eval(), torch.randn(2, 8, requires_grad=True)
    torch.manual_seed(0)
    a = checkpointing.checkpoint(block, x, scale=3.0)
    torch.manual_seed(0)
    assert torch.equal(a, block(x, scale=3.0))
    weight = nn.Parameter(torch.full((1,), 2.0))  # by name, and with a gradient all the same
    checkpointing.checkpoint(lambda y, weight: y * weight, x, weight=weight).sum().backward()
    assert torch.equal(weight.grad, x.detach().sum().reshape(1)) and torch.equal(x.grad, torch.full_like(x, 2.0))


def test_settings_from_block_and_arguments() -> None:
    assert not checkpointing.is_configured()
    config = {"activation_checkpointing": {"cpu_checkpointing": True, "number_checkpoints": 4, "profile": True}}
    checkpointing.configure(None, config, profile=False)
    settings = checkpointing._settings
    assert checkpointing.is_configured() and settings.checkpoint_in_cpu and not settings.profile
    assert settings.num_checkpoints == 4
    checkpointing.set_num_layers(9)
    assert settings.num_checkpoints == 9
    checkpointing.reset()
    x = torch.randn(2, 8, requires_grad=True)
    checkpointing.checkpoint(Block(), x).sum().backward()
    assert x.grad is not None
    given = ("partition_activations", "contiguous_checkpointing", "checkpoint_in_cpu", "profile")
    checkpointing.configure(mpu_=None, **dict.fromkeys(given, False))  # as Lightning calls it
    assert not checkpointing._settings.checkpoint_in_cpu


def test_impossible_combinations_change_nothing() -> None:
    with pytest.raises(AssertionError, match="partition_activations"):
        checkpointing.configure(None, contiguous_checkpointing=True)
    with pytest.raises(AssertionError, match="num_checkpoints"):
        checkpointing.configure(None, partition_activations=True, contiguous_checkpointing=True)
    with pytest.raises(AssertionError, match="get_model_parallel_rank"):
        checkpointing.configure(SimpleNamespace(), partition_activations=True)
    assert not checkpointing.is_configured() and not checkpointing._settings.partition_activations


def test_inert_partitioning_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(checkpointing.logger, "warning", lambda message, **_: said.append(message))
    checkpointing.configure(None, partition_activations=True)
    checkpointing.partition_activations_in_checkpoint(True)
    assert len(said) == 1 and "no effect" in said[0]


def test_streams_are_separate_and_seeded_per_rank() -> None:
    checkpointing.configure(SimpleNamespace(get_model_parallel_rank=lambda: 3))
    checkpointing.model_parallel_cuda_manual_seed(100)
    tracker = checkpointing.get_cuda_rng_tracker()
    outside = torch.get_rng_state()
    with tracker.fork(checkpointing._MODEL_PARALLEL_RNG_TRACKER_NAME):
        inside = torch.rand(2)
        assert torch.initial_seed() == 100 + 2718 + 3
    assert torch.equal(outside, torch.get_rng_state())
    with tracker.fork():
        assert not torch.equal(inside, torch.rand(2))  # the stream went on
    checkpointing.model_parallel_reconfigure_tp_seed(100)
    with tracker.fork():
        assert torch.equal(inside, torch.rand(2))
    for name, seed in (("model-parallel-rng", 1), ("other", 2821)):
        with pytest.raises(UsageError):
            tracker.add(name, seed)
    with pytest.raises(UsageError, match="no random stream"), tracker.fork("missing"):
        pass
