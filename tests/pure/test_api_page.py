"""The API page shows every public method of the engine, inherited ones too, and nothing that is internal."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "api.md").read_text()


with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(ROOT / "docs" / "site"))
    api = importlib.import_module("api")


def _methods_on_page() -> list[str]:
    return [name for names in re.findall(r"<!-- methods: (.*?) -->", PAGE, re.DOTALL) for name in names.split()]


def test_every_public_name_of_the_engine_is_on_the_page() -> None:
    public, answers = api.public_names(), api.answers()
    in_tables = set(re.findall(r"`(\w+)(?:\(\))?`", answers))
    prose = set(re.findall(r"`(\w+)`", PAGE))
    missing = set(public) - set(_methods_on_page()) - in_tables - prose
    assert not missing
    assert "<!-- generated: answers -->" in PAGE
    methods = {n for n, thing in public.items() if inspect.isfunction(thing)}
    assert methods <= set(_methods_on_page()) | in_tables, "prose alone is not enough for a method"


def test_nothing_internal_is_on_the_page() -> None:
    public = api.public_names()
    shown = [*_methods_on_page(), *re.findall(r"members: \[(.*?)\]", PAGE, re.DOTALL)]
    words = [word for text in shown for word in re.findall(r"\w+", text)]
    assert not [word for word in words if word.startswith("_")]
    assert set(_methods_on_page()) <= set(public) and len(_methods_on_page()) == len(set(_methods_on_page()))
    for internal in ("give_way", "follow_data", "keep_with", "settle_weights", "gradient_divisor", "whole_state"):
        assert internal not in public


def test_every_shown_method_and_answer_has_a_text() -> None:
    public = api.public_names()
    assert not [name for name in _methods_on_page() if not inspect.getdoc(public[name])]
    rows = [line for line in api.answers().splitlines() if line.startswith("| `")]
    assert len(rows) > 50 and not [row for row in rows if row.endswith("|  |")]


def test_every_object_that_the_page_names_exists() -> None:
    for path in re.findall(r"^::: (\S+)$", PAGE, re.MULTILINE):
        owner, _, name = path.rpartition(".")
        home = importlib.import_module(
            owner if not owner.rpartition(".")[2][:1].isupper() else owner.rpartition(".")[0]
        )
        assert hasattr(home, name) or importlib.import_module(path), path


def test_the_tables_of_calls_and_optimizers_have_what_clients_import() -> None:
    comm, optimizers = api.communication(), api.optimizers()
    for name in ("all_reduce", "barrier", "get_rank", "init_distributed", "log_summary"):
        assert f"`{name}(" in comm, name
    for name in ("FusedAdam", "DeepSpeedCPUAdam", "FusedLion", "FusedLamb", "MuonWithAuxAdam"):
        assert f"`{name}`" in optimizers
