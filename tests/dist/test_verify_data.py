"""``ds_verify data``: real ranks save in the middle of an epoch, others finish it, and every sample is counted."""

from pathlib import Path

import pytest

from deepspeed.tools.verify.cli import main
from deepspeed.tools.verify.data import faults, train

pytestmark = pytest.mark.timeout(300)


def test_no_sample_twice_none_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "--save-n", "4", "--load-n", "3", "--workers", "2", "--samples", "101"]) == 0
    shown = capsys.readouterr().out
    assert shown.endswith("101 samples: no sample twice, none missing\n") and "then saved" in shown


@pytest.mark.parametrize(
    ("saving", "loading", "samples", "batch", "workers", "at"), [(1, 2, 101, 3, 0, 0), (2, 2, 21, 4, 1, 3)]
)
def test_ends_of_an_epoch(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    saving: int,
    loading: int,
    samples: int,
    batch: int,
    workers: int,
    at: int,
) -> None:
    first, second = (request.getfixturevalue(f"pool{world}") for world in (saving, loading))
    before = first.run(train, str(tmp_path), samples, batch, workers, at)
    after = second.run(train, str(tmp_path), samples, batch, workers, None)
    assert faults(before, after, samples) == []


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
