"""The kernels of an update are built when the engine is, and not while other ranks wait in the first step."""

import pytest
import torch

import deepspeed
from deepspeed.accelerator.native.spec import OpSpec
from deepspeed.optim import host


def test_initialize_builds_the_kernels_and_the_first_step_builds_none(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    real = host.try_load

    def spied(op: OpSpec) -> object:
        asked.append(op.name)
        return real(op)

    monkeypatch.setattr(host, "try_load", spied)
    host._kernel.cache_clear()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 1},
    }
    engine = deepspeed.initialize(model=torch.nn.Linear(4, 4), config=config)[0]
    try:
        assert asked == ["cpu_adam"]
        engine.backward(engine(torch.ones(1, 4)).sum())
        engine.step()
        assert asked == ["cpu_adam"]
    finally:
        engine.destroy()
