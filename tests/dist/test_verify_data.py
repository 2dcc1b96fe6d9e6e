"""``ds_verify data``: real ranks save in the middle of an epoch, others finish it, and every sample is counted."""

import pytest

from deepspeed.verify.cli import main
from deepspeed.verify.data import faults

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--save-n", "4", "--load-n", "3", "--workers", "2"],
        ["--save-n", "1", "--load-n", "2", "--workers", "0", "--batch", "3", "--at", "0"],
        ["--save-n", "2", "--load-n", "2", "--workers", "1", "--samples", "21", "--at", "3"],
    ],
)
def test_no_sample_twice_none_missing(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "--samples", "101", *arguments]) == 0
    shown = capsys.readouterr().out
    assert shown.endswith("samples: no sample twice, none missing\n") and "then saved" in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--save-n", "0"], "--save-n must be at least 1"),
        (["--workers", "-1"], "--workers"),
        (["--samples", "10", "--batch", "2", "--save-n", "2", "--at", "4"], "has 3 steps of 2 x 2"),
    ],
)
def test_wrong_input_is_a_sentence_and_exit_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", *arguments]) == 2
    told = capsys.readouterr().err
    assert told.startswith("ds_verify: ") and words in told


def test_a_rank_that_fails_is_exit_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["data", "--save-n", "1", "--load-n", "1", "--workers", "0", "--samples", "4", "--time-limit", "0.001"])
        == 1
    )
    assert capsys.readouterr().out.endswith("FAIL\n")


def test_the_first_offenders_are_named() -> None:
    assert faults([[3, 0], [1, 4]], [[2], [5]], 6) == []
    assert faults([[3, 0], [1, 4]], [[0], [2]], 6) == [
        "1 seen twice: 0 (rank 0 of the save, rank 0 of the load)",
        "1 missing: 5",
    ]
    assert faults([[0], [1]], [[2], [3], [0]], 5) == [
        "1 seen twice: 0 (rank 0 of the save, rank 2 of the load)",
        "1 missing: 4",
    ]
    assert faults([[0], [1]], [[2, 3], [4]], 5) == ["load: ranks saw [1, 2] samples"]
    assert (
        faults([[0, 1]], [[1] * 18], 20)[0]
        == "1 seen twice: 1 (" + "rank 0 of the save, " + ", ".join(["rank 0 of the load"] * 18) + ")"
    )
    assert faults([[0]], [[]], 20) == ["19 missing: 1, 2, 3, 4, 5, 6, 7, 8, ..."]


def test_padding_is_not_counted() -> None:
    assert faults([[0], [1]], [[2, 4], [3, 0]], 5) == []
    assert faults([[0, 2], [1, 0]], [[], []], 3) == []
    assert faults([[0, 2], [1, 0]], [[1], [2]], 3) != []
