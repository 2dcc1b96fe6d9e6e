"""docs/needs.md names commands, options, files and tests that exist, and what is "not yet" is not there."""

import contextlib
import importlib
import io
import re
from functools import cache

from tests.budget.source import ROOT

SCRIPTS = dict(re.findall(r'^"?([\w.]+)"? = "(deepspeed\S+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
ROWS = [line.split(" | ") for line in (ROOT / "docs" / "needs.md").read_text().splitlines() if re.match(r"\| \d", line)]
LATER = {
    name
    for row in ROWS
    for part in row[2].split(";")
    if "not yet" in part
    for name in re.findall(r"`(ds_[^`]+)`", part)
}


@cache
def _help(program: str, *words: str) -> tuple[int, str]:
    module, _, function = SCRIPTS[program].partition(":")
    with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.redirect_stderr(io.StringIO()):
        try:
            status = getattr(importlib.import_module(module), function)([*words, "--help"])
        except SystemExit as end:
            status = end.code
    return status, shown.getvalue()


def _is_there(name: str) -> bool:
    if name.startswith(("tests/", "benchmarks/")):
        path, _, test = name.partition("::")
        file = ROOT / path
        return file.exists() and (not test or f"def {test}(" in file.read_text())
    program, *words = name.split()
    topic = [words[0]] if program in ("ds_verify", "ds_bench", "ds_checkpoint", "ds_config") else []
    status, text = _help(program, *topic)
    return status == 0 and all(re.search(rf"{word}\b", text) for word in words if word.startswith("--"))


def test_there_are_forty_rows() -> None:
    assert [int(row[0].strip("| ")) for row in ROWS] == [*range(1, 41)]
    assert all("`" in row[2] or "not yet" in row[2] for row in ROWS)


def test_all_that_is_named_exists() -> None:
    programs = ("tests/", "benchmarks/", "ds_", "deepspeed ")
    names = {name for row in ROWS for name in re.findall(r"`([^`]+)`", row[2]) if name.startswith(programs)} - LATER
    assert len(names) > 50 and not [name for name in sorted(names) if not _is_there(name)]


def test_what_is_not_yet_is_not_there() -> None:
    assert LATER and not [name for name in sorted(LATER) if _is_there(name)]
