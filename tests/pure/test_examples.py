"""Every example says how long it takes, and one whose clients are missing says so once."""

import ast
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SCRIPTS = [p for p in [*EXAMPLES.glob("*.py"), EXAMPLES / "elastic" / "train.py"] if "__main__" in p.read_text()]


def test_an_example_says_how_long_it_takes() -> None:
    texts = {script.name: ast.get_docstring(ast.parse(script.read_text())) or "" for script in SCRIPTS}
    assert texts and not [name for name, text in texts.items() if "minute" not in text and "seconds" not in text]


def test_the_extra_has_what_the_examples_need() -> None:
    written = re.search(r"^examples = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.DOTALL | re.MULTILINE)
    assert written, "pyproject.toml has no extra named examples"
    extra = dict(re.findall(r'"([\w-]+)([^"]*)"', written[1]))
    calls = [
        node
        for script in SCRIPTS
        for node in ast.walk(ast.parse(script.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "need"
    ]
    needed = {argument.value for call in calls for argument in call.args if isinstance(argument, ast.Constant)}
    assert needed and needed <= set(extra)
    text = (ROOT / "tests" / "compat" / "README.md").read_text()
    run_with = re.sub(r"\s+", " ", text).partition("Read in or run with")[2]
    pinned = {name: pin.strip("=*") for name, pin in extra.items() if pin.startswith("==")}
    assert pinned and all(f" {name} {version}" in run_with for name, version in pinned.items())


def test_a_missing_client_is_named_by_the_first_rank_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    need = importlib.import_module("shared").need
    ends = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as end:
            need("no_such_client", "torch")
        ends.append(end.value.code)
    text, status = ends  # which Python prints, with status 1
    assert isinstance(text, str) and text.startswith("this example needs no_such_client:") and "torch" not in text
    assert status == 1
