"""The one-step delayed update equals the same rule written down with plain torch.

w: the weights a forward computes with, m: the masters. g_t = gradient at w_t; m_{t+1} = rule(m_t, g_t);
w_{t+1} = m_t from the first delayed update on, m_{t+1} before it, and after whatever brings the weights up to date.
"""

import contextlib
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from deepspeed.tools.verify.grads import full_parameters, scaled_error
from deepspeed.tools.verify.models import IN_FEATURES, MicroBatch
from deepspeed.tools.verify.reference import GATE_ADAM
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state, safe_set_full_fp32_param
from deepspeed.zero import GatheredParameters
from tests.dist.test_update_behind import behind, held_back
from tests.harness.offload import (
    CASES,
    CPU,
    PRECISION,
    at_the_end,
    differences,
    differs_resumed,
    plain_steps,
    started,
)
from tests.harness.pool import RankPool
from tests.harness.training import here, outcome, train_step

CASE, STEPS = "wide_accumulation", 7
DELAYED = {**CPU, "delayed_update": True}


def reference(*, world: int, warm_up: int, clip: float, drains: Collection[int]) -> tuple[list[Tensor], list[Tensor]]:
    """The masters, and the weights of the next forward, after ``STEPS`` steps by the rule above. ``drains``: after
    these steps (from 0) somebody brought the weights up to date.
    """
    case = CASES[CASE]()
    model = case.build().train()
    masters = [torch.nn.Parameter(p.detach().clone()) for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, **GATE_ADAM)
    for step in range(STEPS):
        model.zero_grad()
        for rank in range(world):
            for micro in range(case.accumulation):
                (loss,) = case.seeded_loss(model, MicroBatch(step, micro, rank, world))
                (loss / (world * case.accumulation)).backward()
        old = [m.detach().clone() for m in masters]
        for master, param in zip(masters, model.parameters(), strict=True):
            master.grad = torch.zeros_like(master) if param.grad is None else param.grad.clone()
        if clip:
            torch.nn.utils.clip_grad_norm_(masters, clip)
        optimizer.step()
        late = step >= warm_up and step not in drains
        for param, master, before in zip(model.parameters(), masters, old, strict=True):
            param.data.copy_(before if late else master.detach())
    return [m.detach() for m in masters], [p.detach() for p in model.parameters()]


def delayed_engine(stage: int, *, offload: dict[str, Any] | None = None, **config: Any) -> Any:
    """With the fp32 model of ``reference``."""
    return started(stage, {"offload_optimizer": offload or DELAYED}, CASE, **config)


def against_reference(stage: int, warm_up: int, clip: float, drains: tuple[int, ...]) -> list[float]:
    """Largest errors of the weights before and after they are brought up to date. Collective."""
    engine = delayed_engine(stage, offload={**DELAYED, "delayed_update_warm_up": warm_up}, gradient_clipping=clip)
    case = CASES[CASE]()
    for step in range(STEPS):
        train_step(engine, case, step)
        if step in drains:
            engine.eval()
            engine.train()
    masters, weights = reference(world=engine.world_size, warm_up=warm_up, clip=clip, drains=drains)
    errors = []
    for expected in (weights, masters):
        found = full_parameters(engine.module)
        pairs = zip(found.values(), expected, strict=True)
        errors.append(max(scaled_error(mine.float(), plain) for mine, plain in pairs))
        engine.eval()
    engine.destroy()
    return errors


@pytest.mark.parametrize(
    ("stage", "warm_up", "clip", "drains"), [(3, 0, 0.0, ()), (2, 2, 0.05, ()), (1, 0, 0.05, (2, 4)), (3, 0, 0.0, (6,))]
)
def test_it_is_the_rule_with_plain_torch(
    pool2: RankPool, stage: int, warm_up: int, clip: float, drains: tuple[int, ...]
) -> None:
    for errors in pool2.run(against_reference, stage, warm_up, clip, drains):
        assert max(errors) < 1e-5, errors


def resumed(folder: str, precision: str) -> list[str]:
    """What differs after a save in the middle between going on and starting from it. Collective."""
    offload = {**DELAYED, "delayed_update_warm_up": 2}
    make = partial(delayed_engine, 3, offload=offload, **PRECISION[precision])
    return differs_resumed(make, CASE, 3, STEPS, folder)


@pytest.mark.in_make_test("fp16")
@pytest.mark.parametrize("precision", PRECISION)
def test_a_save_brings_all_up_to_date_and_training_goes_on_from_it_bit_for_bit(
    pool2: RankPool, tmp_path: Path, precision: str
) -> None:
    assert pool2.run(resumed, str(tmp_path), precision) == [[], []]


def ended(stage: int) -> float:
    """How far the weights of a model whose engine has ended are from the last masters. Collective."""
    engine = delayed_engine(stage)
    plain_steps(engine, CASE, 0, 3)
    model = engine.module
    masters = {name: safe_get_full_fp32_param(param) for name, param in model.named_parameters()}
    engine.destroy()
    return max(float((param - masters[name]).abs().max()) for name, param in model.named_parameters())


@pytest.mark.in_make_test("3")
@pytest.mark.parametrize("stage", [1, 3])
def test_the_end_of_an_engine_leaves_the_weights_of_its_last_update(pool2: RankPool, stage: int) -> None:
    assert pool2.run(ended, stage) == [0.0, 0.0]


def overflowed() -> list[str]:
    """A step whose gradients are not finite changes no master, and the update before it is published. Collective."""
    case, found = CASES[CASE](), []
    for bad in (False, True):
        engine = delayed_engine(2, **PRECISION["bf16"])
        plain_steps(engine, CASE, 0, 3)
        if bad:
            for _micro in range(case.accumulation):
                engine.backward(engine(torch.full((2, IN_FEATURES), float("inf"), dtype=torch.bfloat16)).sum())
                engine.step()
            assert not engine.was_step_applied()
        found.append(at_the_end(engine, []))
    return differences(*found)


def test_an_overflow_between_two_updates(pool2: RankPool) -> None:
    assert pool2.run(overflowed) == [[], []]


# -- in a thread -----------------------------------------------------------------------------------------------------
LOOKS = 4  # from this step on


def trained(precision: str, stage: int) -> dict[str, Tensor]:
    """States after some steps, behind the later of which masters and slots are read, and one is written, while updates
    go on.
    """
    engine = delayed_engine(stage, **PRECISION[precision], gradient_clipping=0.05)
    weight, seen = engine.module.inp.weight, []
    for step in range(STEPS):
        plain_steps(engine, CASE, step, step + 1)
        if step >= LOOKS:
            seen += [safe_get_full_fp32_param(weight), safe_get_full_optimizer_state(weight, "exp_avg")]
        if step == LOOKS:
            safe_set_full_fp32_param(weight, torch.full_like(seen[0], 0.25))
    return at_the_end(engine, []) | {f"seen {i}": value for i, value in enumerate(seen)}


def in_a_thread(precision: str, stage: int) -> list[str]:
    """What differs from updates that the program waits for. Collective."""
    wanted = trained(precision, stage)
    with behind() as turns:
        found = trained(precision, stage)
    return differences(wanted, found) + ([] if turns else ["nothing was done behind"])


@pytest.mark.in_make_test("bf16-2")
@pytest.mark.parametrize(("precision", "stage"), [("fp32", 3), ("bf16", 2), ("fp16", 3)])
def test_beside_the_next_step_it_is_the_same_bit_for_bit(pool2: RankPool, precision: str, stage: int) -> None:
    assert pool2.run(in_a_thread, precision, stage) == [[], []]


def waited_in_forward() -> list[bool]:
    """Whether the updates of a step had ended after the forward and backward of the next."""
    case, ended = CASES["wide"](), []
    with held_back() as turns:
        engine = started(3, {"offload_optimizer": DELAYED})
        for step in range(3):
            (loss,) = case.seeded_loss(engine, here(step))
            engine.backward(loss)
            ended.append(bool(turns) and turns[-1].done())
            engine.step()
        engine.destroy()
    return ended


def test_forward_and_backward_do_not_wait_for_it(pool1: RankPool) -> None:
    assert pool1.run(waited_in_forward) == [[False] * 3]


# -- what looks on, and what reads whole weights ---------------------------------------------------------------------
def watched(precision: str) -> list[str]:
    """What differs where a hook sees some updates on the first rank alone; and what it has not seen. Collective."""
    case, found, seen = CASES[CASE](), [], []
    for hooked in (False, True):
        engine = delayed_engine(3, **PRECISION[precision])
        for step in range(STEPS):
            handle = None
            if hooked and engine.global_rank == 0 and step in (2, 3, 5):
                look = engine.basic_optimizer.register_step_pre_hook
                handle = look(lambda o, *_: seen.append([p.grad is None for p in o.param_groups[0]["params"]]))
            train_step(engine, case, step)
            if handle is not None:
                handle.remove()
        rank = engine.global_rank
        found.append(at_the_end(engine, []))
    return differences(*found) + ([f"seen: {seen}"] if rank == 0 and (not seen or any(map(any, seen))) else [])


@pytest.mark.in_make_test("fp32")
@pytest.mark.parametrize("precision", PRECISION)
def test_a_hook_on_one_rank_sees_the_update_and_changes_no_bit(pool2: RankPool, precision: str) -> None:
    assert pool2.run(watched, precision) == [[], []]


def consolidated() -> list[bool]:
    """Whether what somebody may edit, and all whole weights for a file, are of the last masters. Collective."""
    engine = delayed_engine(3)
    plain_steps(engine, CASE, 0, 3)
    weight = engine.module.inp.weight
    master = safe_get_full_fp32_param(weight)
    with GatheredParameters(weight, modifier_rank=0):
        edited = torch.equal(weight.detach(), master)
    plain_steps(engine, CASE, 3, 4)
    masters = {name: safe_get_full_fp32_param(param) for name, param in engine.module.named_parameters()}
    whole = engine._zero3_consolidated_16bit_state_dict()
    engine.destroy()
    return [edited, whole is None or all(torch.equal(whole[name], masters[name]) for name in masters)]


def test_what_saves_or_edits_whole_weights_has_the_last_update(pool2: RankPool) -> None:
    assert pool2.run(consolidated) == [[True, True]] * 2


# -- what goes wrong -------------------------------------------------------------------------------------------------
def failed_in_the_program(door: str, folder: str, stage: int, offload: dict[str, Any]) -> list[str]:
    """A kernel fails on the second rank in the second update, which the program waits for: what this rank hears in that
    step, and then in the next or in a save. Collective.
    """
    patience = mock.patch("deepspeed.zero.sync.failures._PATIENCE_S", 0.5)
    with patience if door == "save" else contextlib.nullcontext():
        engine, case = started(stage, {"offload_optimizer": offload}), CASES["wide"]()
        train_step(engine, case, 0)
        engine.runtime.update.wait()
        fails = mock.patch.object(type(engine.basic_optimizer), "_update_group", side_effect=ArithmeticError("planted"))
        with fails if engine.global_rank == 1 else contextlib.nullcontext():
            heard = [outcome(lambda: train_step(engine, case, 1))]
        doors = {"step": lambda: train_step(engine, case, 2), "save": lambda: engine.save_checkpoint(folder)}
        heard.append(outcome(doors[door]))
        outcome(engine.destroy)
    return heard


def test_one_rank_that_fails_ends_all_with_its_name(pool2: RankPool, tmp_path: Path) -> None:
    """In a thread, and at every other door: test_failed_late_update.py."""
    other, own = pool2.run(failed_in_the_program, "step", str(tmp_path), 2, DELAYED, time_limit=40)
    assert "planted" in own[0] + own[1], own
    assert "rank 1" in other[1] and "planted" in other[1], (other, own)


@pytest.mark.parametrize(
    ("stage", "offload"), [(2, CPU), *(pytest.param(s, DELAYED, marks=pytest.mark.exhaustive) for s in (1, 3))]
)
def test_a_save_by_the_others_names_the_rank_whose_update_has_failed(
    pool2: RankPool, tmp_path: Path, stage: int, offload: dict[str, Any]
) -> None:
    other, own = pool2.run(failed_in_the_program, "save", str(tmp_path), stage, offload, time_limit=40)
    assert "planted" in own[0], own
    assert "rank 1 failed: ArithmeticError: planted" in other[1], other
    pool2.close(at_once=True)  # their connections are closed


def twice(stage: int, offload: dict[str, Any]) -> dict[str, Tensor]:
    """A second backward through a graph from before ``step``."""
    case, engine = CASES["wide"](), delayed_engine(stage, offload=offload, gradient_accumulation_steps=1)
    for step in range(3):
        loss, *_ = case.seeded_loss(engine, here(step))
        engine.backward(loss, retain_graph=True)
        engine.step()
        engine.backward(loss)
        engine.step()
    return at_the_end(engine, [])


def second_backwards(stage: int) -> list[str]:
    """What differs between updates behind the program and ones that it waits for."""
    bad = []
    for name, offload in (("at once", CPU), ("delayed", DELAYED)):
        wanted = twice(stage, offload)
        with behind(0.02):
            found = twice(stage, offload)
        bad += differences(wanted, found, f"{name}: ")
    return bad


@pytest.mark.in_make_test("2")
@pytest.mark.parametrize("stage", [2, 3])
def test_a_second_backward_through_a_graph_from_before_the_step(pool1: RankPool, stage: int) -> None:
    assert pool1.run(second_backwards, stage) == [[]]


def shown_under_a_graph(folder: str) -> list[str]:
    """What is said of evaluations and saves where a forward of the second rank waits for its backward, and where its
    output is gone.
    """
    engine, case = delayed_engine(2), CASES[CASE]()
    train_step(engine, case, 0)
    losses: Any = case.seeded_loss(engine, here(1))
    losses = losses if engine.global_rank == 1 else None
    said = [outcome(engine.eval), outcome(lambda: engine.save_checkpoint(folder))]
    losses = None
    said.append(outcome(engine.eval))
    engine.destroy()
    return said


def test_weights_are_not_brought_up_to_date_between_a_forward_and_its_backward(pool2: RankPool, tmp_path: Path) -> None:
    for evaluated, saved, then in pool2.run(shown_under_a_graph, str(tmp_path)):
        assert "eval() changes weights" in evaluated and "save_checkpoint() changes" in saved and not then
