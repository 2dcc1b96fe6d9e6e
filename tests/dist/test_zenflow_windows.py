"""In the middle of a window of ZenFlow settings change, parameters are frozen, batches are lost, ranks fail, and states
are looked at, saved and loaded.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from deepspeed.utils import safe_get_full_fp32_param
from deepspeed.verify.grads import full_parameters
from deepspeed.zero.update import zenflow
from tests.dist.test_offload_zenflow import (
    plain_steps,
    rule_of,
    zenflow_engine,
)
from tests.dist.test_update_behind import behind
from tests.harness.offload import CASES, CPU, PRECISION
from tests.harness.pool import RankPool
from tests.harness.training import make_config, outcome, start


# -- what fails ------------------------------------------------------------------------------------------------------
def _raise(*_: Any, **__: Any) -> None:
    raise ArithmeticError("planted")


PARTS = ("_take_states", "_bring_out", "_update_chosen", "_add_all", "_until_ended", "_square_all", "_take_largest")


@contextlib.contextmanager
def planted(engine: Any, part: str, *, rank: int = 1) -> Iterator[None]:
    """Inside, that part of a step fails on one rank."""
    if engine.global_rank == rank:
        with mock.patch.object(zenflow.ZenFlow, part, _raise):
            yield
    else:
        yield


def failing(part: str, at: int, stage: int, overlap: bool, folder: str, way: str) -> list[Any]:
    """What this rank hears in the step that fails on the second one or, if that hears of it later, in the next; behind
    that; and whether it goes on from a checkpoint. Collective.
    """
    with behind() if way == "thread" else contextlib.nullcontext():
        engine = zenflow_engine(stage, rule_of(overlap=overlap), **PRECISION["bf16"])
        plain_steps(engine, "wide", 0, at)
        engine.save_checkpoint(folder)
        before = full_parameters(engine.module)
        if part == "_take_states":  # what has not come home needs not be taken
            safe_get_full_fp32_param(engine.module.inp.weight)
        elif part != "_bring_out":
            plain_steps(engine, "wide", at, at + 1)
        with planted(engine, part):
            heard = [outcome(lambda: plain_steps(engine, "wide", at + 1, at + 2))]
        heard += [outcome(lambda: plain_steps(engine, "wide", at + 2, at + 3)) for _ in range(2)]
        engine.load_checkpoint(folder)
        loaded = all(torch.equal(before[n], p) for n, p in full_parameters(engine.module).items())
        losses = plain_steps(engine, "wide", at, at + 4)
        engine.destroy()
    return [heard, loaded and len(losses) == 4]


@pytest.mark.parametrize(
    ("part", "at", "stage", "overlap", "way"),
    [
        ("_take_states", 4, 2, False, "program"),
        ("_bring_out", 4, 2, True, "program"),
        ("_bring_out", 0, 2, False, "program"),
        ("_square_all", 5, 2, False, "program"),
        ("_take_largest", 5, 1, True, "program"),
        ("_update_chosen", 3, 3, False, "program"),
        ("_add_all", 3, 2, True, "thread"),
        ("_until_ended", 4, 2, True, "thread"),
        ("_until_ended", 4, 3, True, "thread"),
        ("_until_ended", 4, 2, True, "program"),
    ],
)
def test_a_step_that_fails_on_one_rank_is_an_error_of_all_until_a_checkpoint_is_loaded(
    pool2: RankPool, tmp_path: Path, part: str, at: int, stage: int, overlap: bool, way: str
) -> None:
    (other, ahead), (own, again) = pool2.run(failing, part, at, stage, overlap, str(tmp_path), way, time_limit=40)
    assert "planted" in own[0], own
    assert "rank 1" in other[0] + other[1] and "planted" in other[0] + other[1], other
    for texts in (own, other):
        assert "load a checkpoint" in texts[2] and "planted" in texts[2], (own, other)
    assert ahead and again


# -- what it takes, and gives back -----------------------------------------------------------------------------------
def cores_of_an_optimizer(zero: dict[str, Any]) -> list[float]:
    """The share of the cores that a client's optimizer takes in an engine, and behind it."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    model = CASES["wide"]().build()
    optimizer = DeepSpeedCPUAdam(model.parameters())
    engine = start(model, make_config(2, zero=zero, optimizer=None), optimizer=optimizer)
    shares = [optimizer.host_cores]
    engine.destroy()
    return [*shares, optimizer.host_cores]


def test_the_end_of_an_engine_gives_the_cores_back(pool1: RankPool) -> None:
    chosen = {"overlap_step": True, "pt_reserved_cores_perc": 0.25}
    assert pool1.run(cores_of_an_optimizer, {"offload_optimizer": CPU, "zenflow": chosen}) == [[0.75, 1.0]]
    early = {**CPU, "super_offload": True, "cpuadam_cores_perc": 0.5}
    assert pool1.run(cores_of_an_optimizer, {"offload_optimizer": early}) == [[0.5, 1.0]]
