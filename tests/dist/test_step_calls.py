"""A ``step`` that is forgotten, or comes where a plain loop updates only, is told once; legal loops nothing."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from deepspeed.tools.verify.models import Stack, regression_batch, seeded
from tests.harness.logs import logged
from tests.harness.pool import RankPool
from tests.harness.training import here, make_config, start

pytestmark = pytest.mark.timeout(120)
Loop = Callable[[Any], None]
STEPS = 3  # rounds of each loop
LONG = 33  # more micro-batches than may come without a step where windows have a length


def loss_of(engine: Any, number: int) -> torch.Tensor:
    x, y = regression_batch(here(0, number))
    return torch.nn.functional.mse_loss(engine(x), y)


def micro_batch(engine: Any, number: int = 0) -> None:
    engine.backward(loss_of(engine, number))


def accumulate(engine: Any, length: int) -> None:
    """As Accelerate does: it says where the boundary is, and steps there only."""
    for number in range(length):
        engine.set_gradient_accumulation_boundary(number == length - 1)
        micro_batch(engine)
    engine.step()


def usual(engine: Any) -> None:
    micro_batch(engine)
    engine.step()


def usual_with_zero_grad(engine: Any) -> None:
    usual(engine)
    if engine.is_gradient_accumulation_boundary():
        engine.zero_grad()


def accelerate(engine: Any) -> None:
    accumulate(engine, LONG)


def accelerate_in_length(engine: Any) -> None:
    accumulate(engine, 2)


def no_sync(engine: Any) -> None:
    with engine.no_sync():
        for _ in range(LONG):
            micro_batch(engine)
    usual(engine)


def optimizer_steps(engine: Any) -> None:
    for _ in range(2):
        loss_of(engine, 0).backward()
    engine.optimizer.step()
    engine.optimizer.zero_grad()


def optimizer_and_schedule_steps(engine: Any) -> None:
    optimizer_steps(engine)
    engine.lr_scheduler.step()


def sum_by_hand(engine: Any) -> None:
    for _ in range(LONG):
        (loss_of(engine, 0) / LONG).backward()
    engine.step()


def two_losses_of_one_forward(engine: Any) -> None:
    loss = loss_of(engine, 0)
    engine.backward(loss, retain_graph=True)
    engine.backward(loss * 0.5)
    engine.step()


def two_forwards_then_two_backwards(engine: Any) -> None:
    first, second = loss_of(engine, 0), loss_of(engine, 1)
    engine.backward(first)
    engine.backward(second)
    engine.step()


def three_forwards_and_backwards(engine: Any) -> None:
    for number in range(3):
        micro_batch(engine, number)
    engine.step()


def teacher_and_evaluation(engine: Any) -> None:
    with torch.no_grad():
        loss_of(engine, 0)
    usual(engine)
    engine.eval()
    for _ in range(LONG):
        loss_of(engine, 0)
    engine.train()


def gradients_only(engine: Any) -> None:
    for _ in range(20):
        micro_batch(engine)
    engine.zero_grad()


def said(loop: Loop, accumulation: int, rounds: int, options: dict[str, Any]) -> list[str]:
    engine = start(seeded(Stack)(), make_config(2, gradient_accumulation_steps=accumulation, **options))
    with logged() as lines:
        for _ in range(rounds):
            loop(engine)
        engine.destroy()
        del engine
        gc.collect()
    return [line for line in lines if "engine.step()" in line]


LEGAL: dict[int, tuple[Loop, ...]] = {
    1: (no_sync, sum_by_hand, optimizer_steps),
    2: (
        *(usual, usual_with_zero_grad, accelerate, accelerate_in_length, no_sync, optimizer_steps, gradients_only),
        *(two_losses_of_one_forward, two_forwards_then_two_backwards, three_forwards_and_backwards),
        teacher_and_evaluation,
    ),
}


@pytest.mark.parametrize("accumulation", LEGAL)
def test_a_legal_loop_is_told_nothing(pool1: RankPool, accumulation: int) -> None:
    told = {loop.__name__: pool1.run(said, loop, accumulation, STEPS, {})[0] for loop in LEGAL[accumulation]}
    assert not any(told.values()), told


def test_a_client_that_counts_itself_is_told_nothing(pool1: RankPool) -> None:
    assert pool1.run(said, sum_by_hand, 2, STEPS, {"managed_gradient_accumulation": False}) == [[]]


@pytest.mark.parametrize("kind", ["WarmupLR", "StepLR"])
def test_a_schedule_that_the_optimizers_step_leaves_standing_is_told_once(pool2: RankPool, kind: str) -> None:
    settings = {"WarmupLR": {"warmup_num_steps": 9}, "StepLR": {"step_size": 2}}
    options = {"scheduler": {"type": kind, "params": settings[kind]}}
    first, second = pool2.run(said, optimizer_steps, 1, STEPS, options)
    assert not second and len(first) == 1 and "does not move the learning-rate schedule" in first[0], first
    assert pool2.run(said, optimizer_and_schedule_steps, 1, STEPS, options) == [[], []]


def at_boundaries(engine: Any) -> None:
    for _ in range(4):
        micro_batch(engine)
    engine.step()


def at_boundaries_with_no_sync(engine: Any) -> None:
    with engine.no_sync():
        for _ in range(3):
            micro_batch(engine)
    usual(engine)


@pytest.mark.parametrize("loop", [at_boundaries, at_boundaries_with_no_sync])
def test_steps_at_the_boundary_only_are_told_once(pool2: RankPool, loop: Loop) -> None:
    first, second = pool2.run(said, loop, 4, 4 * STEPS, {})
    assert not second and len(first) == 1
    assert "every 4 micro-batches only" in first[0] and "after 16 micro" in first[0], first
    assert "call it after every backward(), or see set_gradient_accumulation_boundary()" in first[0]


def never(engine: Any) -> None:
    micro_batch(engine)


def behind_the_question(engine: Any) -> None:
    micro_batch(engine)
    if engine.is_gradient_accumulation_boundary():
        engine.step()


@pytest.mark.parametrize(("loop", "accumulation"), [(never, 1), (never, 2), (behind_the_question, 4)])
def test_a_forgotten_step_is_told_once(pool1: RankPool, loop: Loop, accumulation: int) -> None:
    (first,) = pool1.run(said, loop, accumulation, 520 if accumulation == 1 else 2 * LONG, {})
    assert len(first) == 1
    assert "micro-batches have come without engine.step(): nothing is updated" in first[0], first


@pytest.mark.parametrize(("accumulation", "rounds", "told"), [(1, 5, True), (4, 5, True), (4, 4, False)])
def test_an_engine_that_ends_without_an_update_says_so(
    pool2: RankPool, accumulation: int, rounds: int, told: bool
) -> None:
    first, second = pool2.run(said, never, accumulation, rounds, {})
    assert not second and len(first) == told
    assert not told or "5 micro-batches, and engine.step() was never called" in first[0], first
