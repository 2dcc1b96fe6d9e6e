"""``ds_verify loop``, ``gas``, ``optim``, ``lr`` and ``teardown``: they pass, they fail, and say what is wrong. That
loops, splits of a batch, optimizers and rates are those of plain PyTorch is shown here once, by the gates themselves.
"""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import nn

from deepspeed.tools.verify import cli, training
from deepspeed.tools.verify.grads import Errors
from deepspeed.tools.verify.reference import trainable
from deepspeed.tools.verify.training import LOOPS, OPTIMIZERS, run_loop, run_optimizer, run_split
from tests.harness.pool import RankPool

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("name", LOOPS)
def test_every_loop_of_the_gate_equals_plain_torch(pool2: RankPool, name: str) -> None:
    for errors in pool2.run(run_loop, name, 3, 2):
        assert max(error for error, _ in errors.values()) <= 1e-6, errors


# Ranks, samples of a micro-batch, accumulation; what is counted; the stage. The gate has all of them.
SPLITS = [
    *(((1, 8, 1), "samples", 0), ((2, 2, 2), "samples", 2), ((4, 1, 2), "samples", 3)),
    *(((1, 1, 8), "tokens", 2), ((4, 1, 2), "tokens", 1), ((2, 2, 2), "ragged", 3), ((2, 2, 2), "ragged", 0)),
]


@pytest.mark.parametrize(("split", "kind", "stage"), SPLITS, ids=str)
def test_splits_of_the_gate_equal_the_whole_batch(
    request: pytest.FixtureRequest, split: tuple[int, int, int], kind: str, stage: int
) -> None:
    ranks, micro, accumulation = split
    pool: RankPool = request.getfixturevalue(f"pool{ranks}")
    for errors in pool.run(run_split, stage, micro, accumulation, kind):
        assert max(error for error, _ in errors.values()) <= 1e-6, errors


@pytest.mark.exhaustive
@pytest.mark.parametrize("command", ["grads", "loop", "gas", "optim", "lr", "teardown"])
def test_the_gates_pass(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command]) == 0
    assert "FAIL" not in capsys.readouterr().out


@pytest.mark.parametrize("name", [*OPTIMIZERS, "SGD, offloaded"])
def test_optimizers_of_the_gate_equal_themselves_unsharded(pool2: RankPool, name: str) -> None:
    for errors in pool2.run(run_optimizer, name, 3, 2):
        assert max(error for error, _ in errors.values()) <= 1e-6, errors


def test_an_optimizer_that_ignores_its_groups_is_noticed(pool2: RankPool) -> None:
    for errors in pool2.run(_without_groups):
        assert errors["param"][0] > 1e-4 and errors["grad"][0] <= 1e-6


def _without_groups() -> Errors:
    groups = training.groups
    calls: list[nn.Module] = []

    def first_time(model: nn.Module) -> list[dict[str, Any]]:
        calls.append(model)  # the reference comes first
        return groups(model) if len(calls) == 1 else [{"params": list(trainable(model).values())}]

    with mock.patch.object(training, "groups", first_time):
        return run_optimizer("SGD", 3, 1)


@pytest.mark.parametrize("skipped", [(), training.SKIPPED])
def test_rates_of_the_gate_equal_plain_torch(pool2: RankPool, tmp_path: Path, skipped: tuple[int, ...]) -> None:
    folder = None if skipped else str(tmp_path)
    assert pool2.run(training.run_trace, 3, 4, skipped, folder) == [training.plain_trace(skipped)] * 2


def test_rates_that_differ_fail(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(training, "RANKS", (1,))
    monkeypatch.setattr(training, "ACCUMULATION", (1,))
    monkeypatch.setattr(training, "plain_trace", lambda skipped: [0.1] * training.UPDATES)
    assert cli.main(["lr"]) == 1
    shown = capsys.readouterr().out
    assert shown.count("  FAIL\n") == 3 and "0.1 0.1 0.05 0.05" in shown


@pytest.mark.exhaustive
def test_splits_that_are_too_far_from_the_whole_batch_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(training, "SPLITS", ((2, 2, 2),))
    assert cli.main(["gas", "--tolerance", "0"]) == 1
    shown = capsys.readouterr().out
    assert shown.count("  FAIL\n") == 12 and "error of the loss" in shown


def test_memory_that_grew_too_much_fails(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    growth = {**cli.OPTIONS["growth"], "type": float}  # below zero, so that what has not grown has grown too much
    monkeypatch.setitem(cli.OPTIONS, "growth", growth)
    assert cli.main(["teardown", "--cycles", "2", "--growth", "-100"]) == 1
    shown = capsys.readouterr().out
    text = "FAIL\n    live tensors grew by 0 B, files by 0, threads by 0, groups by 0, resident memory by"
    assert shown.count(text) == 5
