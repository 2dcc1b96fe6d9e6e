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
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)
from deepspeed.zero import GatheredParameters
from deepspeed.zero.plan import TIERS, StateKind
from deepspeed.zero.update.staged import StagedUpdate
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
    run,
    same,
    snapshot,
)
from tests.harness.pool import RankPool
from tests.harness.training import here, make_config, start, train_step

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
@pytest.mark.parametrize("loop", [froze_later, interrupted])
@pytest.mark.parametrize("stage", [2, 3])
def test_loops(pool2: RankPool, tmp_path: Path, stage: int, loop: Callable[[Any, Case], list[float]]) -> None:
    names = FEW if stage == 3 else WITHOUT_PARAM[1:]
    check(pool2.run(run, Plan(stage=stage, loop=loop, config={"gradient_clipping": 0.1}), str(tmp_path), names))


@pytest.mark.in_make_test("odd_shapes")
@pytest.mark.parametrize("case", [name for name in CASES if not name.startswith("wide")])
def test_models(pool2: RankPool, tmp_path: Path, case: str) -> None:
    check(pool2.run(run, Plan(case, steps=3), str(tmp_path), FEW))


@pytest.mark.in_make_test("AdamW")
@pytest.mark.parametrize("optimizer", ["AdamW", "Lamb"])
def test_a_rank_without_an_element_on_the_drive_takes_part_in_the_update(
    pool3: RankPool, tmp_path: Path, optimizer: str
) -> None:
    """The ranks tell each other how their tiles went; one that has none would wait for something else."""
    plan = Plan("single", steps=2, config={"optimizer": {"type": optimizer, "params": {"lr": 1e-2}}})
    check(pool3.run(run, plan, str(tmp_path), ("grads tiles", "both nvme"), time_limit=30))


# -- schedules and backends --------------------------------------------------------------------------------------


def other_backend(backend: str, folder: str) -> list[str]:
    """Differences under another IO engine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_AIO_BACKEND", backend)
        return compare(Plan(steps=3), folder, ("one buffer", "grads nvme"))


@pytest.mark.in_make_test("libaio")
@pytest.mark.parametrize("backend", ["threads", "libaio"])
def test_other_backends(pool2: RankPool, tmp_path: Path, backend: str) -> None:
    check(pool2.run(other_backend, backend, str(tmp_path)))


# -- offload visits -------------------------------------------------------------------------------------------------
TRAVEL = {**CPU, "ratio": 0.5, "device_states": "travel"}


def trained(offload: dict[str, Any], config: dict[str, Any], *, hook: bool = False, reload: str = "") -> dict[str, Any]:
    """Losses and all states after some steps; what visits does so for real. Collective."""
    case = CASES["wide_accumulation"]()
    zero = {"offload_optimizer": offload}
    options = {"gradient_accumulation_steps": case.accumulation, "gradient_clipping": 0.05, **config}

    def engine_of() -> Any:
        engine = start(case.build().train(), make_config(3, zero=zero, **options))
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
    slot = {
        name: safe_get_full_optimizer_state(param, key)
        for name, param in engine.module.named_parameters(remove_duplicate=False)
    }
    found = {**snapshot(engine), **{f"slot of {name}": value for name, value in slot.items()}}
    engine.destroy()
    return found | {"told": torch.tensor(told)}


def differing(config: dict[str, Any], **options: Any) -> list[str]:
    """What is not equal to the last bit."""
    wanted, found = trained(CPU, config, **options), trained(TRAVEL, config, **options)
    assert wanted.keys() == found.keys(), wanted.keys() ^ found.keys()
    return [name for name in wanted if not same(wanted[name], found[name])]


@pytest.mark.in_make_test("bf16")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_an_update_away_from_home_is_the_same(pool2: RankPool, precision: str) -> None:
    assert pool2.run(differing, PRECISION[precision]) == [[], []]


@pytest.mark.parametrize("optimizer", ["Lion", "Adagrad"])
def test_for_other_optimizers_too(pool1: RankPool, optimizer: str) -> None:
    config = {"optimizer": {"type": optimizer, "params": {"lr": 0.01}}, "bf16": {"enabled": True}}
    assert pool1.run(differing, config) == [[]]


def _with_a_hook() -> list[str]:
    return differing(PRECISION["bf16"], hook=True)


def test_with_a_hook_of_the_users_all_visit_at_once(pool1: RankPool) -> None:
    assert pool1.run(_with_a_hook) == [[]]


def _resumed(folder: str) -> list[str]:
    return differing(PRECISION["bf16"], reload=folder)


def test_states_that_were_loaded_go_home_first(pool1: RankPool, tmp_path: Any) -> None:
    assert pool1.run(_resumed, str(tmp_path)) == [[]]


def _places() -> list[str]:
    zero = {"offload_optimizer": {**CPU, "ratio": 0.5}}
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32, bias=False) for _ in range(6)))
    engine = start(model, make_config(3, zero=zero))
    names = {tier: name for name, tier in TIERS.items()}
    tiers = [names[unit.plan.of(StateKind.OPTIM).tier] for unit in engine.runtime.units if unit.trainable]
    engine.destroy()
    return tiers


def test_what_the_device_updates_is_spread_over_the_units(pool1: RankPool) -> None:
    assert pool1.run(_places) == [["cpu", "none"] * 3]


def _refused(offload: dict[str, Any]) -> str:
    config = make_config(2, zero={"offload_optimizer": offload}, optimizer=None)
    model = CASES["wide"]().build()
    try:
        start(model, config, optimizer=torch.optim.AdamW(model.parameters()))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(("key", "value"), [("device_states", "travel"), ("delayed_update", True)])
def test_another_optimizer_is_refused(pool1: RankPool, key: str, value: object) -> None:
    (text,) = pool1.run(_refused, {**CPU, key: value})
    assert text.startswith("OptimizerConfigError") and key in text and "AdamW" in text


# -- offload read ahead ---------------------------------------------------------------------------------------------
def _train(folder: str | None, door: str) -> dict[str, Any]:
    """Three steps, with a write through ``door`` between the last backward and its update."""
    place = {} if folder is None else {"offload_optimizer": {"device": "nvme", "nvme_path": folder}}
    case = CASES["wide"]()
    engine = start(case.build().train(), make_config(3, zero=place))
    ahead = []
    for step in range(3):
        for loss in case.seeded_loss(engine, here(step)):
            engine.backward(loss)
        ahead.append(len(getattr(engine.runtime.update, "_ahead", ())))
        param = next(p for p in engine.module.parameters() if p.dim() > 1)
        if step == 2 and door == "master":
            safe_set_full_fp32_param(param, 2.0 * safe_get_full_fp32_param(param))
        elif step == 2 and door == "slot":
            safe_set_full_optimizer_state(param, torch.full(param.ds_shape, 0.25), "exp_avg")
        elif step == 2 and door == "gathered":
            with GatheredParameters([param], modifier_rank=0):
                param.data.mul_(0.5)
        engine.step()
        engine.runtime.update.wait()
    out = engine.runtime.update._staging._out if hasattr(engine.runtime.update, "_staging") else 0
    values = [safe_get_full_fp32_param(p).clone() for p in engine.module.parameters()]
    for loss in case.seeded_loss(engine, here(3)):  # read ahead for an update that never comes
        engine.backward(loss)
    engine.destroy()
    return {"ahead": ahead, "out": out, "values": values}


@pytest.mark.parametrize("door", ["none", "master", "slot", "gathered"])
def test_writes_between_backward_and_update_count(pool2: RankPool, tmp_path: Path, door: str) -> None:
    plain = pool2.run(_train, None, door)
    for seen, wanted in zip(pool2.run(_train, str(tmp_path), door), plain, strict=True):
        assert min(seen["ahead"]) > 0 and seen["out"] == 0
        for ours, theirs in zip(seen["values"], wanted["values"], strict=True):
            assert torch.equal(ours, theirs)
