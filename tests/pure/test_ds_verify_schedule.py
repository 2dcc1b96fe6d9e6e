"""``ds_verify schedule`` draws what each rank of a pipeline does when."""

from pathlib import Path

import pytest

from deepspeed.tools.verify.cli import main


def _lines(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main(["schedule", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def test_one_forward_one_backward(capsys: pytest.CaptureFixture[str]) -> None:
    lines = _lines(capsys, "--stages", "2", "--micro-batches", "3")
    assert lines[:2] == ["rank 0: 01..aa2bb.cc", "rank 1: .0aa1bb2cc.."]
    assert "1f1b: 12 units of time, of which ranks wait 25.0% (the bubble)" in lines[3]
    assert lines[4].endswith("by rank: 2, 1")


def test_weight_gradients_are_capitals(capsys: pytest.CaptureFixture[str]) -> None:
    lines = _lines(capsys, "--schedule", "zero_bubble", "--micro-batches", "4")
    rows = [line.removeprefix(f"rank {rank}: ") for rank, line in enumerate(lines[:4])]
    assert all(sorted(row.replace(".", "")) == sorted("0123abcdABCD") for row in rows)
    assert all(row.index(small) < row.index(small.upper()) for row in rows for small in "abcd")


def test_a_picture_needs_matplotlib(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert main(["schedule", "--png", str(tmp_path / "a.png")]) == 1
    assert "--png needs matplotlib" in capsys.readouterr().out
