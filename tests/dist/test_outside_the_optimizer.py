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


def against_plain(stage: int, folder: str) -> dict[str, Any]:
    """Train beside plain training of the chosen ones, save, and load into another engine; what there is to know."""
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
    found: dict[str, Any] = {"error": error, "left": left, "restless": not_at_rest(engine)}
    found["said"] = [text for text in said if "no group of the optimizer" in text]
    plan = engine.memory_plan()
    engine.save_checkpoint(folder, tag="t")
    engine.destroy()
    engine = engine_of(stage, frozen=True)
    found["costs as a frozen one"] = engine.memory_plan() == plan
    engine.destroy()
    engine = engine_of(stage)
    for param in engine.module.parameters():
        if not param.is_meta and stage < 3:
            param.data.zero_()
    engine.load_checkpoint(folder, tag="t")
    found["comes back"] = equal(weights, full_parameters(engine.module))
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_outside_the_optimizer_is_as_frozen_and_comes_back(pool2: RankPool, tmp_path: Path, stage: int) -> None:
    for rank, found in enumerate(pool2.run(against_plain, stage, str(tmp_path))):
        assert found["error"] <= TOLERANCE
        assert found["left"] == 0, "gradients nobody clears"
        assert len(found["said"]) == (rank == 0) and all("inp.weight" in text for text in found["said"])
        assert found["costs as a frozen one"] and found["comes back"]
        assert found["restless"] == []
