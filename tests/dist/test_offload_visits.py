"""Optimizer states that travel to the device for their update: bit for bit what an update at home makes.

Ranks without an accelerator have one kind of memory and one kind of kernel, so here the states go to another place in
it and back, by the code that a device runs; ``tests/sim`` holds that to the order of a device's streams.
"""

from typing import Any

import pytest
import torch

from deepspeed.utils import safe_get_full_optimizer_state
from deepspeed.zero.plan import TIERS, StateKind
from deepspeed.zero.update.staged import StagedUpdate
from tests.harness.offload import CASES, CPU, PRECISION, same, snapshot
from tests.harness.pool import RankPool
from tests.harness.training import make_config, start, train_step

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
