"""A profiler of torch's sees the engine's phases, gathers and reductions by name."""

import torch

from deepspeed.tools.verify.models import case_named
from tests.harness.pool import RankPool
from tests.harness.training import make_config, start, train_step


def _ranges() -> tuple[set[str], set[str]]:
    """The names that a profiler sees in a step, and those of the sharded units."""
    case = case_named("plain")
    engine = start(case.build(), make_config(3))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        train_step(engine, case, 0)
    titles = {unit.name for unit in engine.runtime.units if unit.movable}
    engine.destroy()
    return {event.key for event in profile.key_averages()}, titles


def test_phases_gathers_and_reductions_are_ranges_of_the_profiler(pool2: RankPool) -> None:
    for seen, titles in pool2.run(_ranges):
        assert titles and {"forward", "backward", "step"} <= seen
        assert {f"{what} {title}" for what in ("gather", "reduce") for title in titles} <= seen
