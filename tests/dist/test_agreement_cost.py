"""What agreeing costs is what the formulas of benchmarks/agreement.py say: comparisons, messages and bytes per step."""

import importlib.util
import sys
from types import ModuleType

import pytest
import torch

from tests.budget.source import ROOT
from tests.harness.pool import RankPool
from tests.harness.training import make_config, start

pytestmark = pytest.mark.timeout(60)


def formulas() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_agreement", ROOT / "benchmarks" / "agreement.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def counted(blocks: int) -> list[tuple[int, int, int]]:
    """Of each step: comparisons, messages that this rank sent for them, and their bytes."""
    engine = start(formulas().chain(blocks, 8), make_config(3, zero={"param_persistence_threshold": 0}))
    runtime, sent = engine.runtime, []
    runtime.mesh.control.ledger.append(lambda op, numel, dtype, size: sent.append((op, numel * dtype.itemsize, size)))
    found = []
    for step in range(8):
        sent.clear()
        before = runtime.agreement.rounds
        engine.backward(engine(torch.full((2, 8), 0.1 * step)).square().mean())
        engine.step()
        assert {op for op, _, _ in sent} == {"merge"}
        found.append((runtime.agreement.rounds - before, len(sent), sum(nbytes for _, nbytes, _ in sent)))
    assert runtime.agreement.mismatches == 0
    engine.destroy()
    return found


@pytest.mark.in_make_test("5", "6")
@pytest.mark.parametrize("blocks", [5, 6, 12, 13])
def test_agreement_costs_what_the_formulas_say(pool2: RankPool, pool3: RankPool, pool4: RankPool, blocks: int) -> None:
    bench = formulas()
    for ranks, pool in ((2, pool2), (3, pool3), (4, pool4)):
        for steps in pool.run(counted, blocks):
            learning, predicted = steps[2], steps[-1]
            assert learning == _row(bench.by_doubling(ranks, blocks, bench.comparisons_by_message(blocks)))
            assert predicted == _row(bench.by_doubling(ranks, blocks, 1))


def _row(cost: object) -> tuple[int, int, int]:
    return (cost.comparisons, cost.messages, cost.nbytes)  # type: ignore[attr-defined]


def unequal(blocks: int) -> tuple[int, int, list[tuple[str, int]]]:
    """Requests that differ between the ranks: how many, of how many in all, and the messages."""
    engine = start(formulas().chain(blocks, 8), make_config(3, zero={"param_persistence_threshold": 0}))
    runtime, sent = engine.runtime, []
    runtime.mesh.control.ledger.append(lambda op, numel, dtype, size: sent.append((op, numel * dtype.itemsize)))
    runtime.need([runtime.units[runtime.mesh.zero.index]])
    runtime.flush()
    engine.destroy()
    return runtime.agreement.mismatches, runtime.agreement.rounds, sent


@pytest.mark.parametrize("blocks", [3, 70])
def test_unequal_requests_cost_what_equal_ones_do(pool2: RankPool, pool3: RankPool, blocks: int) -> None:
    for ranks, pool in ((2, pool2), (3, pool3)):
        cost = formulas().by_doubling(ranks, blocks, 1)
        for mismatches, rounds, sent in pool.run(unequal, blocks):
            assert mismatches > 0
            assert sent == [("merge", cost.nbytes // cost.messages)] * (rounds * cost.messages)


def _forwards_without_a_backward(count: int) -> tuple[int, int]:
    """(decisions on record, messages) after forwards with gradients on that no backward follows."""
    engine = start(formulas().chain(4, 8), make_config(3, zero={"param_persistence_threshold": 0}))
    for _ in range(count):
        engine(torch.ones(1, 8))
    agreement = engine.runtime.agreement
    answer = len(agreement._done), agreement.rounds
    engine.destroy()
    return answer


def test_an_evaluation_with_gradients_on_keeps_no_record(pool2: RankPool) -> None:
    few, many = pool2.run(_forwards_without_a_backward, 4)[0], pool2.run(_forwards_without_a_backward, 40)[0]
    assert many[0] <= few[0] + 16, (few, many)
