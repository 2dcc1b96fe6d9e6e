"""``ds_verify loop``, ``gas`` and ``teardown``: they pass, they fail, and they say what is wrong with their input."""

import pytest

from deepspeed.verify.cli import main
from deepspeed.verify.training.loop import LOOPS, run_loop
from tests.harness.pool import RankPool

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("name", LOOPS)
def test_every_loop_of_the_gate_equals_plain_torch(pool2: RankPool, name: str) -> None:
    for errors in pool2.run(run_loop, name, 3, 2):
        assert max(error for error, _ in errors.values()) <= 1e-6, errors


@pytest.mark.exhaustive
@pytest.mark.parametrize("command", ["loop", "gas", "teardown"])
def test_the_gates_pass(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command]) == 0
    assert "FAIL" not in capsys.readouterr().out


def test_splits_that_are_too_far_from_the_whole_batch_fail(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gas", "--tolerance", "-1"]) == 1
    shown = capsys.readouterr().out
    assert shown.count("  FAIL\n") == 20 and "error of the loss" in shown


def test_memory_that_grew_too_much_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["teardown", "--cycles", "2", "--growth", "-100"]) == 1
    shown = capsys.readouterr().out
    assert shown.count("FAIL\n    live tensors grew by 0 B, resident memory by") == 4


@pytest.mark.parametrize(
    "arguments", [["loop", "--steps", "0"], ["teardown", "--cycles", "none"], ["gas", "--tolerance", "x"]]
)
def test_what_cannot_be_is_a_sentence(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2 and f"argument {arguments[1]}: " in capsys.readouterr().err
