"""The block flops_profiler: an engine counts what its model computes, under every way of training, and says it once."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.pipe import PipelineModule
from deepspeed.profiling.flops_profiler import FlopsProfiler
from deepspeed.tools.simulate.models import Decoder, Shape
from tests.harness import pipes
from tests.harness.logs import logged
from tests.harness.pool import RankPool
from tests.harness.training import make_config, outcome, start

pytestmark = pytest.mark.timeout(120)
BATCH, LENGTH, STEPS = 4, 16, 3
SHAPE = Shape(width=32, blocks=2, heads=4, inner=64, vocabulary=50, positions=16, key_heads=2, gated=True)


def by_hand() -> int:
    """Forward and backward of one micro-batch, without recomputation."""
    weights = SHAPE.blocks * (3 * 32 * 32 + 3 * 32 * 64) + 32 * 50
    return 3 * BATCH * LENGTH * (2 * weights + SHAPE.blocks * 4 * LENGTH * 32)


def trained(block: dict[str, Any], *, recompute: bool = False, compiled: bool = False, stage: int = 3, **changes: Any):
    """The profile's figures by part, the mean over ranks, whether it has been made, and the log."""
    with logged(set_level=logging.INFO) as lines:
        torch.manual_seed(5)
        config = make_config(stage, flops_profiler={"enabled": True, **block}, **changes)
        engine = start(Decoder(SHAPE, recompute=recompute), config)
        if compiled:
            engine.compile(backend="eager")
        for step in range(STEPS):
            for _ in range(changes.get("gradient_accumulation_steps", 1)):
                engine.backward(engine(tokens(step)))
                engine.step()
        profile = engine.step_profile
        figures = profile.profiler.profile().totals, profile.flops_per_update, profile.state.value
        engine.destroy()
    return (*figures, lines)


def tokens(step: int) -> torch.Tensor:
    return torch.randint(50, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step))


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "recompute": {"recompute": True},
    "compiled": {"compiled": True},
    "accumulation": {"gradient_accumulation_steps": 2},
    "stage 1": {"stage": 1},
}


@pytest.mark.in_make_test("recompute", "compiled", "accumulation")
@pytest.mark.parametrize("how", WAYS)
def test_an_engine_counts_what_the_formula_says(pool2: RankPool, how: str) -> None:
    micros = WAYS[how].get("gradient_accumulation_steps", 1)
    for totals, per_update, state, _ in pool2.run(trained, {}, **WAYS[how]):
        assert state == "done" and per_update == pytest.approx(by_hand() * micros, rel=0.02)
        assert totals["backward"] == pytest.approx(2 * totals["forward"], rel=0.02)
        blocks = totals["recomputed"] / totals["forward"]
        assert 0.5 < blocks < 1.05 if how == "recompute" else blocks < 0.1


def test_the_report_is_said_once_by_the_first_rank(pool2: RankPool) -> None:
    block = {"peak_tflops": 0.001, "top_modules": 2, "module_depth": 2}
    (*_, first), (*_, second) = pool2.run(trained, block)
    (report,) = [line for line in first if "Flops profile of update 2, rank 0" in line]
    assert "blocks" in report and "MFU " in report and "of 1.000 GFLOPS/s" in report and "all 2 ranks" in report
    assert "forward " in report and "backward " in report and "step " in report
    table = report.partition("Costliest classes by depth:")[2].partition("Every module")[0]
    assert [line.split()[0] for line in table.splitlines() if line.strip()] == ["depth", "0", "1", "2"]
    assert not any("Flops profile" in line for line in second)


def test_a_short_report_goes_into_a_file(pool2: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "folder" / "profile.txt"
    results = pool2.run(trained, {"output_file": str(path), "detailed": False, "profile_step": 0})
    text = path.read_text()
    assert "Flops profile of update 1" in text and "Every module" not in text and "MFU" in text
    assert sum(str(path) in line for *_, lines in results for line in lines) == 1


def test_a_profile_that_is_never_due_is_said_at_the_end(pool2: RankPool) -> None:
    (*_, first), (*_, second) = pool2.run(trained, {"profile_step": 9})
    (said,) = [line for line in first if "flops_profiler.profile_step 9" in line]
    assert f"ended after {STEPS} updates" in said and not any("profile_step 9" in line for line in second)


def refused(path: str) -> str:
    config = make_config(3, flops_profiler={"enabled": True, "output_file": path})
    return outcome(lambda: start(Decoder(SHAPE), config))


def test_a_file_that_cannot_be_written_is_refused_at_the_start(pool2: RankPool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for said in pool2.run(refused, str(tmp_path / "file" / "profile.txt")):
        assert DeepSpeedConfigError.__name__ in said and "flops_profiler.output_file" in said


def same_numbers() -> float:
    """The largest difference that a profile makes to the parameters."""
    results = []
    for enabled in (False, True):
        torch.manual_seed(5)
        engine = start(Decoder(SHAPE), make_config(1, flops_profiler={"enabled": enabled}))
        for step in range(STEPS):
            engine.backward(engine(tokens(step)))
            engine.step()
        results.append(torch.cat([p.detach().flatten() for p in engine.module.parameters()]))
        engine.destroy()
    return float((results[0] - results[1]).abs().max())


def test_a_profile_changes_numbers_by_rounding_alone(pool2: RankPool) -> None:
    assert max(pool2.run(same_numbers)) < 1e-6  # operations that torch takes apart to count them


def piped(schedule: str) -> tuple[float, float]:
    """Operations of an update of two stages, both ranks together, and of the same layers in one process."""
    torch.manual_seed(3)
    config = pipes.config(1, 4, pipeline={"schedule": schedule}, flops_profiler={"enabled": True})
    engine = pipes.start(PipelineModule(pipes.layers(), num_stages=2, loss_fn=pipes.cross_entropy), config)
    data = pipes.batches(0, micros=4)
    for _ in range(4):
        engine.train_batch(data)
    together = engine.step_profile.flops_per_update * 2
    engine.destroy()
    alone = pipes.Plain(pipes.layers())
    profiler = FlopsProfiler(alone)
    profiler.start_profile()
    for micro in range(4):
        inputs, labels = pipes.micro_batch(0, micro, 0)
        pipes.cross_entropy(alone(inputs), labels).backward()
    profiler.stop_profile()
    return together, profiler.get_total_flops() + profiler.get_total_backward_flops()


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_stages_of_a_pipeline_add_up(pool2: RankPool, schedule: str) -> None:
    for together, alone in pool2.run(piped, schedule):
        assert together == pytest.approx(alone, rel=0.02)
