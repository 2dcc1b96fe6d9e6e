"""A parameter that requires a gradient and is in no group of the optimizer costs what a frozen one costs, and is named
once.
"""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepspeed.tools.verify.grads import full_parameters, scaled_error
from deepspeed.tools.verify.models import MicroBatch, case_named
from deepspeed.tools.verify.reference import GATE_ADAM, clip_factor
from tests.harness.lockstep import TOLERANCE, equal, not_at_rest
from tests.harness.logs import logged
from tests.harness.pool import RankPool
from tests.harness.training import STAGES, here, make_config, start

pytestmark = pytest.mark.timeout(60)
CLIP = 0.05
CASE = case_named("plain")


def chosen(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The trained parameters: some of each block, and the head."""
    return [p for n, p in model.named_parameters() if n.startswith("head") or ".up." in n]


def engine_of(stage: int, *, frozen: bool = False) -> Any:
    model = CASE.build().train()
    wanted = chosen(model)
    if frozen:
        model.requires_grad_(requires_grad=False)
        for param in wanted:
            param.requires_grad_()
    config = make_config(stage, gradient_clipping=CLIP, optimizer=None)
    return start(model, config, optimizer=torch.optim.AdamW(wanted, **GATE_ADAM))


def against_plain(stage: int) -> tuple[float, int, list[str], bool, list[str]]:
    """Error against plain training of the chosen ones; gradients left; warnings; the memory of a frozen model; what is
    not at rest.
    """
    with logged(logging.WARNING) as said:
        engine = engine_of(stage)
        plain = CASE.build().train()
        optimizer = torch.optim.AdamW(chosen(plain), **GATE_ADAM)
        error, world, left = 0.0, dist.get_world_size(), 0
        for step in range(3):
            engine.backward(CASE.seeded_loss(engine, here(step))[0])
            left += sum(p.grad is not None for n, p in engine.module.named_parameters() if stage or n.startswith("inp"))
            engine.step()
            for rank in range(world):
                (CASE.seeded_loss(plain, MicroBatch(step, 0, rank, world))[0] / world).backward()
            grads = [p.grad for p in chosen(plain) if p.grad is not None]
            norm = float(torch.nn.utils.get_total_norm(grads))
            for grad in grads:
                grad /= clip_factor(norm, CLIP)
            optimizer.step()
            plain.zero_grad()
            error = max(error, abs(norm - engine.get_global_grad_norm()))
    weights = full_parameters(engine.module)
    error = max(error, *(scaled_error(weights[n], p.detach()) for n, p in plain.named_parameters()))
    plan, restless = engine.memory_plan(), not_at_rest(engine)
    engine.destroy()
    frozen = engine_of(stage, frozen=True)
    same = frozen.memory_plan() == plan
    frozen.destroy()
    return error, left, [text for text in said if "no group of the optimizer" in text], same, restless


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_outside_the_optimizer_is_as_frozen(pool2: RankPool, stage: int) -> None:
    for rank, (error, left, said, same, restless) in enumerate(pool2.run(against_plain, stage)):
        assert error <= TOLERANCE
        assert left == 0, "gradients nobody clears"
        assert len(said) == (rank == 0) and all("inp.weight" in text for text in said)
        assert same
        assert restless == []


def saved_and_loaded(stage: int, folder: str) -> bool:
    engine = engine_of(stage)
    engine.backward(CASE.seeded_loss(engine, here(0))[0])
    engine.step()
    engine.save_checkpoint(folder, tag="t")
    expected = full_parameters(engine.module)
    engine.destroy()
    engine = engine_of(stage)
    for param in engine.module.parameters():
        if not param.is_meta and stage < 3:
            param.data.zero_()
    engine.load_checkpoint(folder, tag="t")
    same = equal(expected, full_parameters(engine.module))
    engine.destroy()
    return same


@pytest.mark.parametrize("stage", [1, 3])
def test_checkpoints_hold_what_is_outside_the_optimizer(pool2: RankPool, tmp_path: Path, stage: int) -> None:
    assert pool2.run(saved_and_loaded, stage, str(tmp_path)) == [True, True]
