"""Engine surface that has no guarantee file of its own: generation context, timers, missing parts."""

import logging

import pytest
import torch

import deepspeed
from deepspeed.errors import NotYetError
from deepspeed.tools.verify.models import case_named
from deepspeed.zero.param import ReleasedFace
from tests.harness.logs import logged
from tests.harness.pool import RankPool
from tests.harness.training import here, make_config, start, train_step

pytestmark = pytest.mark.timeout(60)


def generate_unevenly(stage: int) -> list[str]:
    case = case_named("plain")
    engine = start(case.build(), make_config(stage))
    faults = []
    inputs = case.batch(here(0))[0]
    train_step(engine, case, 0)
    with torch.no_grad():
        expected = engine(inputs)
        with deepspeed.zero.unwrap_model_for_generation(engine) as whole:
            for _ in range(1 + 2 * torch.distributed.get_rank()):  # no collective inside, so counts may differ
                if not torch.equal(whole(inputs), expected):
                    faults.append("the unwrapped module computes something else")
    if stage == 3 and not any(isinstance(p, ReleasedFace) for p in engine.module.parameters()):
        faults.append("nothing was released afterwards")
    train_step(engine, case, 1)
    return faults


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_ranks_may_generate_different_lengths_inside_unwrap(pool2: RankPool, stage: int) -> None:
    assert pool2.run(generate_unevenly, stage) == [[], []]


def breakdown() -> list[str]:
    with logged(set_level=logging.INFO) as lines:
        case = case_named("plain")
        engine = start(case.build(), make_config(2, wall_clock_breakdown=True, steps_per_print=1))
        train_step(engine, case, 0)
    return lines


def test_readers_have_the_names_that_help_and_tracebacks_show() -> None:
    for name in ("train_batch_size", "loss_scale", "current_loss_scale", "get_global_grad_norm"):
        assert getattr(deepspeed.DeepSpeedEngine, name).__name__ == name


def test_wall_clock_breakdown_logs_every_phase(pool1: RankPool) -> None:
    (lines,) = pool1.run(breakdown)
    (said,) = [line for line in lines if "time (ms)" in line]
    assert all(phase in said for phase in ("forward", "backward", "step"))


def missing(name: str) -> str:
    engine = start(case_named("plain").build(), make_config(0))
    try:
        getattr(engine, name)("somewhere")
    except NotYetError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", ["train_batch", "eval_batch"])
def test_parts_that_come_later_say_so_by_name(pool1: RankPool, name: str) -> None:
    (said,) = pool1.run(missing, name)
    assert name in said


def modes() -> tuple[bool, ...]:
    """``training`` of engine and module after eval() and train()."""
    engine = start(torch.nn.Linear(4, 4), make_config(1))
    engine.eval()
    off = engine.training, engine.module.training
    engine.train()
    on = engine.training, engine.module.training
    engine.destroy()
    return *off, *on


def test_the_engine_itself_knows_its_mode(pool2: RankPool) -> None:
    """``engine.training`` follows ``eval()`` and ``train()``."""
    assert pool2.run(modes) == [(False, False, True, True)] * 2
