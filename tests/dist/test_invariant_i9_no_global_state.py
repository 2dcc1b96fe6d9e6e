"""I9: no module-level mutable state; several engines live in one process, interleaved, and differ in everything."""

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import deepspeed
from deepspeed.tools.verify.grads import full_parameters
from tests.harness.cases import case_named
from tests.harness.lockstep import TOLERANCE, Lockstep, equal, not_at_rest
from tests.harness.pool import RankPool
from tests.harness.training import here, make_config, start, train_step

pytestmark = pytest.mark.timeout(60)
PACKAGE = Path(deepspeed.__file__).parent


def three_interleaved(stages: tuple[int, int, int]) -> list[tuple[float, str]]:
    """Three engines on three models: forwards in one order, backwards in another, steps in a third."""
    names = ("used_twice", "tied", "conditional")
    pairs = [Lockstep(case_named(name), make_config(stage)) for name, stage in zip(names, stages, strict=True)]
    for step in range(3):
        losses = [pair.case.seeded_loss(pair.engine, here(step))[0] for pair in pairs]
        for index in (1, 2, 0):
            pairs[index].engine.backward(losses[index])
        for pair in pairs:
            pair.plain_backward(step)
            pair.compare_gradients(step)
        for index in (2, 0, 1):
            pairs[index].engine.step()
            pairs[index].optimizer.step()
            pairs[index].optimizer.zero_grad()
        for pair in pairs:
            pair.compare_parameters(step)
            assert not_at_rest(pair.engine) == []
    return [pair.finish() for pair in pairs]


@pytest.mark.in_make_test("(3, 3, 3)", "(1, 3, 2)")
@pytest.mark.parametrize("stages", [(3, 3, 3), (3, 2, 0), (1, 3, 2)], ids=str)
def test_invariant_i9_three_engines_interleaved(pool2: RankPool, stages: tuple[int, int, int]) -> None:
    for results in pool2.run(three_interleaved, stages):
        for error, worst in results:
            assert error <= TOLERANCE, worst


def _alone(config: dict[str, Any]) -> dict[str, Tensor]:
    case = case_named("plain")
    engine = start(case.build(), config)
    for step in range(3):
        train_step(engine, case, step)
    weights = full_parameters(engine.module)
    engine.destroy()
    return weights


def different_settings() -> list[bool]:
    """Engines that differ in dtype, clipping, accumulation and optimizer give bit for bit what each gives alone."""
    case = case_named("plain")
    configs = [
        make_config(3, bf16={"enabled": True}),
        make_config(2, gradient_clipping=0.01, optimizer={"type": "SGD", "params": {"lr": 0.1}}),
        make_config(3, zero={"divergence": "error", "prefetch_bucket_size": 0}),
    ]
    alone = [_alone(config) for config in configs]
    engines = [start(case.build(), config) for config in configs]
    for step in range(3):
        losses = [case.seeded_loss(engine, here(step))[0] for engine in engines]
        for engine, loss in zip(reversed(engines), reversed(losses), strict=True):
            engine.backward(loss)
        for engine in engines:
            engine.step()
    same = [equal(full_parameters(engine.module), weights) for engine, weights in zip(engines, alone, strict=True)]
    for engine in engines:
        engine.destroy()
    return same


def test_invariant_i9_engines_do_not_know_of_each_other(pool2: RankPool) -> None:
    assert pool2.run(different_settings) == [[True] * 3] * 2


def an_error_in_one() -> bool:
    """An error in one engine, or its end, leaves the other's iteration alone."""
    case, expected = case_named("plain"), _alone(make_config(3))
    good, bad = start(case.build(), make_config(3)), start(case.build(), make_config(3))
    for step in range(3):
        loss = case.seeded_loss(good, here(step))[0]
        with pytest.raises(RuntimeError):
            bad(torch.ones(1, 1))
        good.backward(loss)
        if step == 1:
            bad.destroy()
            bad = start(case.build(), make_config(1))
        good.step()
    same = equal(full_parameters(good.module), expected)
    for engine in (good, bad):
        engine.destroy()
    return same


def test_invariant_i9_an_error_stays_in_its_engine(pool2: RankPool) -> None:
    assert pool2.run(an_error_in_one) == [True, True]


STATEFUL = ("dict", "list", "set", "count", "defaultdict", "threading.local", "ContextVar", "iter")
# Names whose value may change at run time although they live in a module, each with its reason.
ALLOWED = {
    "client/zero/init.py:_numbers": "a source of unique numbers",
    "engine/engine.py:running": "a graph through several engines has one backward, and its loss one factor",
    "zero/module/attributes.py:_ids": "a source of unique numbers",
}


def test_invariant_i9_no_module_level_mutable_state_in_the_core() -> None:
    """Module-level names of the core hold constants: no empty containers to be filled, no instances, no ``global``."""
    found = []
    files = [*PACKAGE.glob("zero/*.py"), *PACKAGE.glob("engine/*.py"), *PACKAGE.glob("comm/mesh/*.py")]
    for file in files:
        where = str(file.relative_to(PACKAGE))
        tree = ast.parse(file.read_text(encoding="utf-8"))
        found += [f"{where}: global {', '.join(node.names)}" for node in ast.walk(tree) if isinstance(node, ast.Global)]
        for node in tree.body:
            if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
                continue
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            name = next((t.id for t in targets if isinstance(t, ast.Name)), "")
            empty = isinstance(node.value, (ast.List, ast.Dict, ast.Set)) and not ast.unparse(node.value).strip("[]{}")
            called = ast.unparse(node.value.func) if isinstance(node.value, ast.Call) else ""
            if (empty or called in STATEFUL) and f"{where}:{name}" not in ALLOWED:
                found.append(f"{where}: {name} = {ast.unparse(node.value)}")
    assert found == []
