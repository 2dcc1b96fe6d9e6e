"""Optimizers that cannot work are refused in a sentence; state that one makes at its construction is that of any shape.

That every optimizer gives the result that it gives without sharding, with its groups' own rates and decays, the gate
(test_verify_training.py) and the fuzzer show.
"""

import contextlib
import functools
import logging
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from deepspeed.tools.verify.grads import full_parameters
from deepspeed.tools.verify.models import (
    Case,
    case_named,
)
from tests.dist.test_offload_optimizers import Accumulating
from tests.harness.lockstep import equal
from tests.harness.logs import logged
from tests.harness.pool import RankPool
from tests.harness.training import STAGES, make_config, outcome, parameter_error, plain_train, start, train_step

pytestmark = pytest.mark.timeout(120)
STEPS = 4
TOLERANCE = 1e-6


def plain_config(stage: int, **changes: Any) -> dict[str, Any]:
    """A configuration that tolerates every optimizer and cuts parameters in many pieces."""
    return make_config(stage, zero_allow_untested_optimizer=True, **changes)


def trained_error(engine: Any, case: Case, expected: dict[str, Tensor]) -> tuple[float, str]:
    """Train, and say how far the parameters are from those expected."""
    for step in range(STEPS):
        train_step(engine, case, step)
    result = parameter_error(engine.module, expected)
    engine.destroy()
    return result


def refusals() -> dict[str, str]:
    """What is said about optimizers that cannot work."""
    model = case_named("plain").build()
    foreign = torch.optim.AdamW([nn.Parameter(torch.zeros(3))])
    return {
        "foreign": outcome(lambda: start(model, plain_config(2, optimizer=None), optimizer=foreign)),
        "unknown": outcome(lambda: start(model, plain_config(2, optimizer={"type": "AdmW", "params": {"lr": 1e-3}}))),
        "max_grad_norm": outcome(
            lambda: start(model, plain_config(2, optimizer={"type": "AdamW", "params": {"max_grad_norm": 1.0}}))
        ),
        "twice": outcome(
            lambda: start(model, plain_config(2), model_parameters=[model.head.weight, model.head.weight])
        ),
    }


def test_refusals_are_sentences(pool2: RankPool) -> None:
    for told in pool2.run(refusals):
        assert all(told.values()), told
        assert "AdamW" in told["unknown"] and "gradient_clipping" in told["max_grad_norm"], told


def of_matrices(stage: int) -> tuple[dict[str, int], int, dict[str, Tensor]]:
    """The plan's bytes where a bucket is as large as one of six matrices; elements that this rank updates; weights."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(32, 32, bias=False) for _ in range(6)])
    muon = {"type": "Muon", "params": {"lr": 0.01}}
    engine = start(model, plain_config(stage, optimizer=muon, zero={"reduce_bucket_size": 1024}))
    for step in range(3):
        x = torch.randn(4, 32, generator=torch.Generator().manual_seed(10 * step + engine.global_rank))
        engine.backward(engine(x).square().mean())
        engine.step()
    planned = {line.what: line.device for line in engine.memory_plan().lines}
    updated = sum(view.param.numel() for view in engine._views)
    weights = full_parameters(engine.module)
    engine.destroy()
    return planned, updated, weights


def test_whole_tensors_are_divided_over_the_ranks_and_not_padded(pool2: RankPool) -> None:
    """And the ranks update as many each: also where a unit is a block, of one tensor here."""
    wanted = pool2.run(of_matrices, 0)[0][2]
    for stage in (1, 2, 3):
        for planned, updated, weights in pool2.run(of_matrices, stage):
            assert updated == 3 * 1024 and equal(weights, wanted)
            if stage < 3:
                assert planned["parameters"] == 4 * 6 * 1024 and planned["gradients"] == 4 * 3 * 1024, planned


class OfAll(Accumulating):
    """The same for who does not say that it sees single elements."""

    elementwise = False


def over_all_parameters(place: str, stage: int, failing: int) -> list[str]:
    """What two updates say with a number over all parameters, if none fails or the first fails on a rank."""
    case = case_named("plain")
    model = case.build()
    optimizer = OfAll(model.parameters(), place=place)
    engine = start(model, plain_config(stage, optimizer=None), optimizer=optimizer)
    fails = mock.patch.object(optimizer, "step", side_effect=ArithmeticError("planted"))
    with fails if engine.global_rank == failing else contextlib.nullcontext():
        said = [outcome(lambda: train_step(engine, case, 0))]
    said.append(outcome(lambda: train_step(engine, case, 1)))
    engine.destroy()
    return said


@pytest.mark.parametrize("place", ["number", "tensor"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_number_over_all_parameters_is_refused_where_ranks_divide_them(
    pool2: RankPool, place: str, stage: int
) -> None:
    for said in pool2.run(over_all_parameters, place, stage, -1):
        refused = ["UsageError" in text and "keeps seen of group 0" in text for text in said]
        assert all(refused) if stage else not any(said)


def test_ranks_compare_such_numbers_also_where_one_fails(pool2: RankPool) -> None:
    other, own = pool2.run(over_all_parameters, "number", 2, 1, time_limit=40)
    assert not other[0] and "planted" in own[0] and "rank 1" in other[1], (own, other)


def two_of_each() -> list[str]:
    """The warnings of an engine whose optimizer and schedule stand in the script and in the configuration."""
    model = case_named("plain").build()
    blocks = {"optimizer": {"type": "AdamW", "params": {}}, "scheduler": {"type": "WarmupLR", "params": {}}}
    with logged(logging.WARNING) as said:
        start(
            model,
            plain_config(2, **blocks),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=2),
        ).destroy()
    return said


def test_blocks_that_objects_of_the_script_replace_are_told_once(pool2: RankPool) -> None:
    first, second = pool2.run(two_of_each)
    text = "the configuration's block {!r} ({}) is ignored, as deepspeed.initialize got another; delete one of the two"
    assert first == ["[rank 0] " + text.format(*block) for block in (("optimizer", "AdamW"), ("scheduler", "WarmupLR"))]
    assert not second


# The parameters of each group of an optimizer that fills its state at construction, by what they begin with.
FIRST: dict[str, list[list[str]]] = {
    "0-dimensional": [["scale", "empty", "*"]],
    "empty": [["empty", "scale", "*"]],
    "alone": [["scale"], ["empty"], ["*"]],
}


def filled(first: str, stage: int) -> tuple[float, str]:
    """Parameter error of a client's Adagrad, whose groups begin with odd shapes."""
    case = case_named("odd_shapes")

    def adagrad(model: nn.Module) -> torch.optim.Optimizer:
        named = dict(model.named_parameters())
        rest = [p for n, p in named.items() if n not in ("scale", "empty")]
        groups = [[p for n in names for p in (rest if n == "*" else [named[n]])] for names in FIRST[first]]
        return torch.optim.Adagrad([{"params": g} for g in groups], lr=1e-2, eps=1e-2, initial_accumulator_value=0.1)

    expected = plain_train(case, adagrad, steps=STEPS)
    model = case.build()
    return trained_error(start(model, plain_config(stage, optimizer=None), optimizer=adagrad(model)), case, expected)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("first", FIRST)
def test_state_filled_at_construction_is_that_of_any_shape(pool2: RankPool, first: str, stage: int) -> None:
    for error, where in pool2.run(filled, first, stage):
        assert error <= TOLERANCE, f"{where} differs by {error}"


def scheduler_can_be_replaced(stage: int) -> list[float]:
    """Clients set ``engine.lr_scheduler = None`` and step their own."""
    case, halving = case_named("plain"), functools.partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)
    sgd = {"type": "SGD", "params": {"lr": 0.1}}
    engine = start(case.build(), make_config(stage, optimizer=sgd), lr_scheduler=halving)
    engine.lr_scheduler = None
    for step in range(4):
        train_step(engine, case, step)
    rates = [group["lr"] for group in engine.optimizer.param_groups]
    engine.destroy()
    return rates


@pytest.mark.parametrize("stage", [0, 3])
def test_scheduler_can_be_removed(pool2: RankPool, stage: int) -> None:
    for rates in pool2.run(scheduler_can_be_replaced, stage):
        assert rates == pytest.approx([0.1] * len(rates)) and rates
