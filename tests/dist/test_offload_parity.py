"""Where states rest changes no bit: host and drive give the losses, masters, optimizer slots and parameters of the
device.

Every test trains the same model several times on the same ranks, once without offload, and compares everything exactly.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed.tools.verify.models import (
    Case,
)
from tests.harness.offload import (
    ALL,
    CASES,
    FEW,
    PRECISION,
    STEPS,
    TYPICAL,
    WITHOUT_PARAM,
    Plan,
    check,
    compare,
    run,
)
from tests.harness.pool import RankPool
from tests.harness.training import here, train_step

pytestmark = pytest.mark.timeout(120)


# -- precision, stages, ranks ------------------------------------------------------------------------------------


@pytest.mark.in_make_test("wide_accumulation-bf16")
@pytest.mark.parametrize(
    ("case", "precision"), [("wide", "fp32"), ("wide_accumulation", "bf16"), ("wide_accumulation", "fp16")]
)
def test_every_way_on_one_rank(pool1: RankPool, tmp_path: Path, case: str, precision: str) -> None:
    check(pool1.run(run, Plan(case, config=PRECISION[precision]), str(tmp_path), ALL))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.in_make_test("fp32")
@pytest.mark.parametrize("precision", PRECISION)
def test_every_way_on_two_ranks(pool2: RankPool, tmp_path: Path, precision: str) -> None:
    plan = Plan(config={**PRECISION[precision], "gradient_clipping": 0.05})
    check(pool2.run(run, plan, str(tmp_path), ALL if precision == "fp32" else TYPICAL))


@pytest.mark.in_make_test("1-fp16")
@pytest.mark.parametrize(("stage", "precision"), [(1, "fp32"), (1, "fp16"), (2, "bf16")])
def test_lower_stages(pool2: RankPool, tmp_path: Path, stage: int, precision: str) -> None:
    check(
        pool2.run(
            run, Plan("wide_accumulation", stage=stage, config=PRECISION[precision]), str(tmp_path), WITHOUT_PARAM
        )
    )


@pytest.mark.in_make_test("mics")
@pytest.mark.parametrize(
    "zero", [{}, {"mics_shard_size": 2}, {"zero_hpz_partition_size": 2}], ids=["plain", "mics", "hpz"]
)
def test_four_ranks(pool4: RankPool, tmp_path: Path, zero: dict[str, int]) -> None:
    plan = Plan(config={"zero": zero, "bf16": {"enabled": True}}, steps=3)
    check(pool4.run(run, plan, str(tmp_path), ("one buffer", "grads nvme")))


# -- loops ---------------------------------------------------------------------------------------------------------


def unsynced(engine: Any, case: Case) -> list[float]:
    """Two backwards inside no_sync, one outside; then an evaluation."""
    told = []
    for step in range(4):
        with engine.no_sync():
            for micro in range(2):
                loss = case.seeded_loss(engine, here(step, micro))[0]
                engine.backward(loss)
        loss = case.seeded_loss(engine, here(step, 2))[0]
        engine.backward(loss)
        engine.step()
        engine.eval()
        with torch.no_grad():
            told.append(float(case.seeded_loss(engine, here(step, 3))[0]))
        engine.train()
        told.append(float(loss.detach()))
    return told


def froze_later(engine: Any, case: Case) -> list[float]:
    """A block stops training after the second step and trains again after the fourth."""
    told = []
    for step in range(STEPS):
        engine.module.layers[0].requires_grad_(requires_grad=not 2 <= step < 4)
        told += train_step(engine, case, step)
    return told


def interrupted(engine: Any, case: Case) -> list[float]:
    """A gradient that is not finite, a forward that raises, and a window that is dropped between good steps."""
    told = []
    for step in range(4):
        told += train_step(engine, case, step)
        handle = engine.module.layers[1].register_forward_pre_hook(_fail)
        with contextlib.suppress(ZeroDivisionError):
            case.seeded_loss(engine, here(step))
        handle.remove()
        engine.backward(case.seeded_loss(engine, here(step, 1))[0])
        engine.zero_grad()
        engine.backward(case.seeded_loss(engine, here(step, 2))[0] * float("inf"))
        engine.step()
        told += [float(engine.was_step_applied())]
    return told


def _fail(*_: object) -> None:
    raise ZeroDivisionError


@pytest.mark.in_make_test("3-interrupted")
@pytest.mark.parametrize("loop", [unsynced, froze_later, interrupted])
@pytest.mark.parametrize("stage", [2, 3])
def test_loops(pool2: RankPool, tmp_path: Path, stage: int, loop: Callable[[Any, Case], list[float]]) -> None:
    names = FEW if stage == 3 else WITHOUT_PARAM[1:]
    check(pool2.run(run, Plan(stage=stage, loop=loop, config={"gradient_clipping": 0.1}), str(tmp_path), names))


@pytest.mark.in_make_test("odd_shapes")
@pytest.mark.parametrize("case", [name for name in CASES if not name.startswith("wide")])
def test_models(pool2: RankPool, tmp_path: Path, case: str) -> None:
    check(pool2.run(run, Plan(case, steps=3), str(tmp_path), FEW))


def test_adapters_in_16_bit(pool2: RankPool, tmp_path: Path) -> None:
    plan = Plan("everything", config={"gradient_clipping": 0.05, **PRECISION["bf16"]}, steps=4)
    check(pool2.run(run, plan, str(tmp_path), TYPICAL))


@pytest.mark.in_make_test("AdamW")
@pytest.mark.parametrize("optimizer", ["AdamW", "Lamb"])
def test_a_rank_without_an_element_on_the_drive_takes_part_in_the_update(
    pool3: RankPool, tmp_path: Path, optimizer: str
) -> None:
    """The ranks tell each other how their tiles went; one that has none would wait for something else."""
    plan = Plan("single", steps=2, config={"optimizer": {"type": optimizer, "params": {"lr": 1e-2}}})
    check(pool3.run(run, plan, str(tmp_path), ("grads tiles", "both nvme"), time_limit=30))


# -- schedules and backends --------------------------------------------------------------------------------------


def test_a_learning_rate_schedule(pool2: RankPool, tmp_path: Path) -> None:
    block = {"type": "WarmupLR", "params": {"warmup_min_lr": 0.0, "warmup_max_lr": 1e-2, "warmup_num_steps": 4}}
    check(pool2.run(run, Plan(config={"scheduler": block}), str(tmp_path), FEW))


def other_backend(backend: str, folder: str) -> list[str]:
    """Differences under another IO engine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_AIO_BACKEND", backend)
        return compare(Plan(steps=3), folder, ("one buffer", "grads nvme"))


@pytest.mark.in_make_test("libaio")
@pytest.mark.parametrize("backend", ["threads", "libaio"])
def test_other_backends(pool2: RankPool, tmp_path: Path, backend: str) -> None:
    check(pool2.run(other_backend, backend, str(tmp_path)))
