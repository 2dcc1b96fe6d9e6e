"""The learning rate counts updates, and reaches them; torch's schedules, skips and resumes: test_verify_training.py."""

import math
from typing import Any

import pytest
import torch

from deepspeed.tools.verify.models import case_named
from tests.harness.training import make_config, start, train_step

pytestmark = pytest.mark.timeout(120)
STEPS = 8
SGD = {"type": "SGD", "params": {"lr": 0.1}}
WARMUP = {
    "type": "WarmupDecayLR",
    "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 3, "total_num_steps": 7, "warmup_type": "linear"},
}


def warmup_decay(update: int) -> float:
    """The rate that update number ``update`` (from 0) uses: the schedule is stepped after the update."""
    i = update - 1
    if i < 0:
        return 0.0
    return 0.1 * (i / 3 if i < 3 else max(0.0, (7 - i) / 4))


def step_lr(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """A torch scheduler: halve every two steps."""
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


def lr_trace(stage: int) -> list[float]:
    """The rate in force at each of the updates, of four micro-batches."""
    case = case_named("plain", accumulation=4)
    config = make_config(stage, optimizer=SGD, gradient_accumulation_steps=4)
    engine = start(case.build(), {**config, "scheduler": WARMUP})
    trace = []
    for step in range(STEPS):
        trace.append(engine.get_lr()[0])
        train_step(engine, case, step)
    assert engine.global_steps == STEPS
    engine.destroy()
    return trace


def test_a_schedule_of_the_configuration_counts_updates(pool2: Any) -> None:
    for trace in pool2.run(lr_trace, 2):
        assert trace == pytest.approx([warmup_decay(update) for update in range(STEPS)], abs=1e-9)


def scheduler_can_be_replaced(stage: int) -> list[float]:
    """Clients set ``engine.lr_scheduler = None`` and step their own."""
    case = case_named("plain")
    engine = start(case.build(), make_config(stage, optimizer=SGD), lr_scheduler=step_lr)
    engine.lr_scheduler = None
    for step in range(4):
        train_step(engine, case, step)
    rates = [group["lr"] for group in engine.optimizer.param_groups]
    engine.destroy()
    return rates


@pytest.mark.parametrize("stage", [0, 3])
def test_scheduler_can_be_removed(pool2: Any, stage: int) -> None:
    for rates in pool2.run(scheduler_can_be_replaced, stage):
        assert rates and all(math.isclose(rate, 0.1) for rate in rates)
