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

from deepspeed.tools.verify.models import Case
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)
from deepspeed.zero import GatheredParameters
from deepspeed.zero.plan import StateKind
from deepspeed.zero.update.staged import StagedUpdate
from tests.harness.faults import raise_planted
from tests.harness.offload import (
    ALL,
    CASES,
    CPU,
    FEW,
    PRECISION,
    STEPS,
    TYPICAL,
    WITHOUT_PARAM,
    Plan,
    check,
    compare,
    differences,
    snapshot,
    started,
)
from tests.harness.pool import RankPool
from tests.harness.training import here, make_config, outcome, start, train_step

pytestmark = pytest.mark.timeout(120)


# in fp16 until the first scales have overflowed, and the scale has grown again
ENOUGH = {"fp32": 3, "bf16": 3, "fp16": STEPS}


# -- precision, stages, ranks ------------------------------------------------------------------------------------


@pytest.mark.in_make_test("wide_accumulation-bf16")
@pytest.mark.parametrize(
    ("case", "precision"), [("wide", "fp32"), ("wide_accumulation", "bf16"), ("wide_accumulation", "fp16")]
)
def test_every_way_on_one_rank(pool1: RankPool, tmp_path: Path, case: str, precision: str) -> None:
    plan = Plan(case, config=PRECISION[precision], steps=ENOUGH[precision])
    check(pool1.run(compare, plan, str(tmp_path), ALL))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.in_make_test("typical-fp32")
@pytest.mark.parametrize("precision", PRECISION)
@pytest.mark.parametrize("names", [TYPICAL, ALL], ids=["typical", "all"])
def test_ways_on_two_ranks(pool2: RankPool, tmp_path: Path, names: tuple[str, ...], precision: str) -> None:
    plan = Plan(config={**PRECISION[precision], "gradient_clipping": 0.05}, steps=ENOUGH[precision])
    check(pool2.run(compare, plan, str(tmp_path), names))


@pytest.mark.in_make_test("1-fp16")
@pytest.mark.parametrize(("stage", "precision"), [(1, "fp32"), (1, "fp16"), (2, "bf16")])
def test_lower_stages(pool2: RankPool, tmp_path: Path, stage: int, precision: str) -> None:
    plan = Plan("wide_accumulation", stage=stage, config=PRECISION[precision])
    check(pool2.run(compare, plan, str(tmp_path), WITHOUT_PARAM))


@pytest.mark.in_make_test("mics")
@pytest.mark.parametrize(
    "zero", [{}, {"mics_shard_size": 2}, {"zero_hpz_partition_size": 2}], ids=["plain", "mics", "hpz"]
)
def test_four_ranks(pool4: RankPool, tmp_path: Path, zero: dict[str, int]) -> None:
    plan = Plan(config={"zero": zero, "bf16": {"enabled": True}}, steps=3)
    check(pool4.run(compare, plan, str(tmp_path), FEW))


# -- loops ---------------------------------------------------------------------------------------------------------


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
        handle = engine.module.layers[1].register_forward_pre_hook(raise_planted)
        with contextlib.suppress(ZeroDivisionError):
            case.seeded_loss(engine, here(step))
        handle.remove()
        engine.backward(case.seeded_loss(engine, here(step, 1))[0])
        engine.zero_grad()
        engine.backward(case.seeded_loss(engine, here(step, 2))[0] * float("inf"))
        engine.step()
        told += [float(engine.was_step_applied())]
    return told


@pytest.mark.in_make_test("3-interrupted")
@pytest.mark.parametrize("loop", [froze_later, interrupted])
@pytest.mark.parametrize("stage", [2, 3])
def test_loops(pool2: RankPool, tmp_path: Path, stage: int, loop: Callable[[Any, Case], list[float]]) -> None:
    names = FEW if stage == 3 else WITHOUT_PARAM[1:]
    plan = Plan(stage=stage, loop=loop, config={"gradient_clipping": 0.1})
    check(pool2.run(compare, plan, str(tmp_path), names))


@pytest.mark.in_make_test("odd_shapes")
@pytest.mark.parametrize("case", [name for name in CASES if not name.startswith("wide")])
def test_models(pool2: RankPool, tmp_path: Path, case: str) -> None:
    check(pool2.run(compare, Plan(case, steps=3), str(tmp_path), FEW))


@pytest.mark.in_make_test("AdamW")
@pytest.mark.parametrize("optimizer", ["AdamW", "Lamb"])
def test_a_rank_without_an_element_on_the_drive_takes_part_in_the_update(
    pool3: RankPool, tmp_path: Path, optimizer: str
) -> None:
    """The ranks tell each other how their tiles went; one that has none would wait for something else."""
    plan = Plan("single", steps=2, config={"optimizer": {"type": optimizer, "params": {"lr": 1e-2}}})
    check(pool3.run(compare, plan, str(tmp_path), ("grads tiles", "both nvme"), time_limit=30))


# -- states that visit the device ------------------------------------------------------------------------------------
TRAVEL = {**CPU, "ratio": 0.5, "device_states": "travel"}


def trained(offload: dict[str, Any], config: dict[str, Any], *, hook: bool = False, reload: str = "") -> dict[str, Any]:
    """Losses and all states after some steps; what visits does so for real. Collective."""
    case = CASES["wide_accumulation"]()

    def engine_of() -> Any:
        engine = started(3, {"offload_optimizer": offload}, "wide_accumulation", gradient_clipping=0.05, **config)
        if "device_states" in offload:
            runtime = engine.runtime
            runtime.train_by(engine.basic_optimizer, StagedUpdate(runtime, engine.basic_optimizer, engine._parts.tiers))
        if hook:
            engine.basic_optimizer.register_step_post_hook(lambda *_: None)
        return engine

    engine = engine_of()
    told = [value for step in range(3) for value in train_step(engine, case, step)]
    if reload:
        engine.save_checkpoint(reload)
        engine.destroy()
        engine = engine_of()
        engine.load_checkpoint(reload)
    told += [value for step in range(3, 5) for value in train_step(engine, case, step)]
    visits = [unit.plan.loads_states for unit in engine.runtime.units]
    assert any(visits) is ("device_states" in offload) and not all(visits)
    assert all(not unit.plan.loads_states or not unit.plan.of(StateKind.GRAD).away for unit in engine.runtime.units)
    key = next(key for key, value in engine.basic_optimizer.state[engine._views[0].param].items() if value.dim())
    slots = {f"slot of {n}": safe_get_full_optimizer_state(p, key) for n, p in engine.module.named_parameters()}
    found = snapshot(engine) | slots
    engine.destroy()
    return found | {"told": torch.tensor(told)}


def visiting(config: dict[str, Any], hook: bool = False, reload: str = "") -> list[str]:  # noqa: FBT001, FBT002
    """What differs from states that stay on the host. Collective."""
    wanted, found = (trained(offload, config, hook=hook, reload=reload) for offload in (CPU, TRAVEL))
    return differences(wanted, found)


@pytest.mark.in_make_test("bf16")
@pytest.mark.parametrize("precision", PRECISION)
def test_an_update_away_from_home_is_the_same(pool2: RankPool, precision: str) -> None:
    check(pool2.run(visiting, PRECISION[precision]))


@pytest.mark.parametrize("optimizer", ["Lion", "Adagrad"])
def test_for_other_optimizers_too(pool1: RankPool, optimizer: str) -> None:
    config = {"optimizer": {"type": optimizer, "params": {"lr": 0.01}}, **PRECISION["bf16"]}
    check(pool1.run(visiting, config))


def test_with_a_hook_of_the_users_all_visit_at_once(pool1: RankPool) -> None:
    check(pool1.run(visiting, PRECISION["bf16"], hook=True))


def test_states_that_were_loaded_go_home_first(pool1: RankPool, tmp_path: Path) -> None:
    check(pool1.run(visiting, PRECISION["bf16"], reload=str(tmp_path)))


def _refused(zero: dict[str, Any]) -> str:
    config = make_config(2, zero=zero, optimizer=None, zero_force_ds_cpu_optimizer=False)
    model = CASES["wide"]().build()
    return outcome(lambda: start(model, config, optimizer=torch.optim.AdamW(model.parameters())))


@pytest.mark.parametrize(
    ("zero", "words"),
    [
        ({"offload_optimizer": {**CPU, "device_states": "travel"}}, "device_states"),
        ({"offload_optimizer": {**CPU, "delayed_update": True}}, "delayed_update"),
        (
            {"offload_optimizer": CPU, "zenflow": {"topk_ratio": 0.2, "update_interval": 3}},
            "zenflow needs this package's AdamW or Adam, not AdamW",
        ),
    ],
)
def test_another_optimizer_is_refused(pool1: RankPool, zero: dict[str, Any], words: str) -> None:
    (text,) = pool1.run(_refused, zero)
    assert "OptimizerConfigError" in text and words in text and "AdamW" in text, text


# -- what is read ahead of the update --------------------------------------------------------------------------------
def written_before_the_update(folder: str | None) -> dict[str, Any]:
    """Masters after each step, the latter of which have a write between the last backward and the update. Collective.

    Also how many tiles had been read ahead of each update, and how many staging buffers are missing behind it.
    """
    place = {} if folder is None else {"offload_optimizer": {"device": "nvme", "nvme_path": folder}}
    case, engine = CASES["wide"](), started(3, place)
    update, param = engine.runtime.update, next(p for p in engine.module.parameters() if p.dim() > 1)

    def gathered() -> None:
        with GatheredParameters([param], modifier_rank=0):
            param.data.mul_(0.5)

    writes: list[Callable[[], object]] = [
        lambda: None,
        lambda: None,
        lambda: safe_set_full_fp32_param(param, 2.0 * safe_get_full_fp32_param(param)),
        lambda: safe_set_full_optimizer_state(param, torch.full(param.ds_shape, 0.25), "exp_avg"),
        gathered,
    ]
    seen: dict[str, Any] = {"ahead": [], "out": [], "values": {}}
    for step, write in enumerate(writes):
        engine.backward(case.seeded_loss(engine, here(step))[0])
        seen["ahead"].append(len(getattr(update, "_ahead", ())))
        write()
        engine.step()
        update.wait()
        seen["out"].append(update._staging._out if folder else 0)
        for name, value in engine.module.named_parameters():
            seen["values"][f"{name} after step {step}"] = safe_get_full_fp32_param(value).clone()
    engine.backward(case.seeded_loss(engine, here(5))[0])  # read ahead for an update that never comes
    engine.destroy()
    return seen


def test_writes_between_backward_and_update_count(pool2: RankPool, tmp_path: Path) -> None:
    plain = pool2.run(written_before_the_update, None)
    for seen, wanted in zip(pool2.run(written_before_the_update, str(tmp_path)), plain, strict=True):
        assert min(seen["ahead"]) > 0 and not any(seen["out"])
        assert not differences(wanted["values"], seen["values"])
