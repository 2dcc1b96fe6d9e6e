"""A line of the log does not cut through a progress bar that the program shows."""

import io

import pytest
import tqdm

from deepspeed.monitor.log import logger


def test_a_line_of_the_log_stands_above_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(logger.handlers[0], "stream", terminal)
    monkeypatch.setattr("sys.stderr", terminal)
    with tqdm.tqdm(total=2, file=terminal, ascii=True, mininterval=0, ncols=60) as bar:
        bar.update()
        logger.warning("one line")
        bar.update()
    written = [part for line in terminal.getvalue().split("\n") for part in line.split("\r") if part.strip()]
    (line,) = [part for part in written if "one line" in part]
    assert line.endswith("one line") and "it/s" not in line, written
    assert any("50%" in part for part in written) and "100%" in written[-1]


def test_without_a_bar_nothing_is_asked_of_tqdm(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(logger.handlers[0], "stream", terminal)
    monkeypatch.setattr(tqdm.tqdm, "external_write_mode", None)
    logger.warning("one line")
    assert terminal.getvalue().endswith("one line\n")
