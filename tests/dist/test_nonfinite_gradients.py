"""A non-finite gradient skips the step on every rank and the log names the parameter, the rank and the step."""

import math
from typing import Any

import pytest

from deepspeed.errors import UsageError
from deepspeed.tools.verify.grads import full_parameters
from tests.dist.test_late_norm import Poisoned, late as late_norms
from tests.harness.lockstep import equal
from tests.harness.logs import logged
from tests.harness.pool import RankPool
from tests.harness.training import STAGES

pytestmark = pytest.mark.timeout(60)


def left_out(stage: int, dtype: str, value: float) -> dict[str, Any]:
    """Of three updates, the second of which is left out: what engine and log say of it."""
    extra = {} if dtype == "fp32" else {dtype: {"enabled": True}}
    job = Poisoned(stage, [1], value, gradient_clipping=1.0, **extra)
    engine = job.engine
    with logged() as lines:
        job.update(0)
        before = full_parameters(engine.module)
        job.update(1)
        unchanged = equal(before, full_parameters(engine.module))
        counts = engine.skipped_steps, engine.global_steps, engine.optimizer.overflow, engine.was_step_applied()
        state = (engine.get_global_grad_norm(), *counts)
        job.update(2)
    norm = engine.get_global_grad_norm()
    engine.destroy()
    return {"unchanged": unchanged, "state": state, "lines": lines, "norm": norm}


@pytest.mark.in_make_test("0-fp32-nan", "1-bf16-inf", "2-fp32-inf", "3-bf16-nan")
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_the_log_names_parameter_rank_and_step(pool2: RankPool, stage: int, dtype: str, value: float) -> None:
    first, second = pool2.run(left_out, stage, dtype, value)
    for seen in (first, second):
        assert seen["unchanged"]
        assert seen["state"] == (math.inf, 1, 2, True, False)
        assert math.isfinite(seen["norm"])
    said = [line for line in first["lines"] if "not finite" in line]
    assert len(said) == 1
    assert Poisoned.name in said[0] and "rank 1" in said[0] and "step 2" in said[0], said[0]


def skipped_on_and_on(stage: int, limit: int, good: tuple[int, ...], config: dict[str, object]) -> list[str]:
    """Up to ten updates, with bad gradients of rank 1 in all but ``good``; where the job ends, and how."""
    bad = set(range(10)) - set(good)
    job, ends = Poisoned(stage, bad, anomalies={"nonfinite_updates": limit}, **config), list[str]()
    for number in range(10):
        try:
            job.update(number)
        except UsageError as error:
            ends.append(f"update {number}: {error}")
            break
    job.engine.destroy()
    return ends


@pytest.mark.in_make_test("1-at once", "3-late")
@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_row_of_skipped_updates_ends_the_job_on_all_ranks(pool2: RankPool, stage: int, late: bool) -> None:  # noqa: FBT001
    ranks = pool2.run(behind if late else skipped_on_and_on, stage, 3, (0, 3), {"bf16": {"enabled": True}})
    ends, others = ranks
    assert ends == others
    assert len(ends) == 1 and ends[0].startswith("update 6: 3 updates in a row were skipped"), ends
    assert f"since step 5, when the gradient of {Poisoned.name} was" in ends[0] and "nonfinite_updates" in ends[0], ends


def behind(*args: Any) -> Any:
    """``skipped_on_and_on`` where nobody waits for a norm."""
    with late_norms():
        return skipped_on_and_on(*args)


@pytest.mark.parametrize(
    ("limit", "good", "config"),
    [(0, (), {}), (3, (0, 3, 6, 9), {}), (2, (0,), {"fp16": {"enabled": True, "initial_scale_power": 16}})],
    ids=["off", "no row", "adaptive scale"],
)
def test_other_jobs_go_on(pool2: RankPool, limit: int, good: tuple[int, ...], config: dict[str, object]) -> None:
    assert pool2.run(skipped_on_and_on, 2, limit, good, config) == [[], []]
