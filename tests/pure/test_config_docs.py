"""docs/config.md and docs/config.schema.json are made from the models and the key table, and are current."""

import copy
import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deepspeed.config import DeepSpeedConfigError, load_config
from deepspeed.config.model.root import TOP_LEVEL_KEYS, DeepSpeedConfig
from deepspeed.config.model.settings import all_keys, declared_fields
from deepspeed.config.model.spelling import REMOVED_KEYS, SPELLED
from deepspeed.config.parse import plain_json
from deepspeed.tools.config.cli import STARTERS
from tests.harness.rows import for_each
from tests.pure.test_client_configs import ACCEPTED, HF_ZERO2, HF_ZERO3, PLAIN

ROOT = Path(__file__).parents[2]
REMAKE = "run: python docs/site/configuration.py"


def _script() -> Any:
    """The file that makes them; its folder is no package."""
    spec = importlib.util.spec_from_file_location("configuration", ROOT / "docs" / "site" / "configuration.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MADE = _script()
main, page, schema_text = MADE.main, MADE.page, MADE.schema_text
KEYS = all_keys(DeepSpeedConfig)
SCHEMA = json.loads(schema_text())
PAGE = (ROOT / "docs" / "config.md").read_text()


def _bars(line: str) -> list[str]:
    return re.findall(r"(?<!\\)\|", line)


def test_files_are_current() -> None:
    assert page(PAGE) == PAGE, REMAKE
    assert (ROOT / "docs" / "config.schema.json").read_text() == schema_text(), REMAKE


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "--check"]) == 1 and "is not current" in capsys.readouterr().err
    assert main([str(tmp_path)]) == 0 and main([str(tmp_path), "--check"]) == 0
    path = tmp_path / "config.md"
    path.write_text(f"# By hand\n\n{path.read_text()}more\n")
    assert main([str(tmp_path), "--check"]) == 1 and main([str(tmp_path)]) == 0
    assert path.read_text() == f"# By hand\n\n{page('')}"


def test_every_key_has_a_line_with_its_class() -> None:
    lines = [line for line in PAGE.splitlines() if line.startswith("| `")]
    named = {line.split("`")[1].partition(":")[0] for line in lines}
    assert {*KEYS, *REMOVED_KEYS} <= named
    rows = {line.split("`")[1]: line for line in lines if len(_bars(line)) == 6}
    assert {field.path for field in declared_fields(DeepSpeedConfig)} <= set(rows)
    for path, row in rows.items():
        assert path not in KEYS or f"| {KEYS[path].support.value} |" in row, row
    assert {path for path in KEYS if path not in rows} <= set(SPELLED)


def test_the_page_is_plain() -> None:
    text = PAGE
    assert text.isascii() and not re.search(r"[ \t]\n", text) and text.endswith("\n")
    widths = {len(_bars(line)) for line in text.splitlines() if line.startswith("| `")}
    assert widths <= {3, 4, 6}, "a cell holds a bare bar"


# --- the schema ---


def _alternatives(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if "$ref" in schema:
        inner = SCHEMA
        for part in schema["$ref"].split("/")[1:]:
            inner = inner[part]
        yield from _alternatives(inner)
    yield schema
    for part in schema.get("anyOf", ()):
        yield from _alternatives(part)


def _below(schema: dict[str, Any], part: str) -> dict[str, Any] | None:
    """The schema of one step down: a key, a free key ``<...>`` or a list element ``[]``."""
    if part == "[]":
        return schema.get("items")
    if part.startswith("<"):
        rest = schema.get("additionalProperties", False)
        return None if rest is False else {} if rest is True else rest
    return schema.get("properties", {}).get(part)


def _at(path: str) -> dict[str, Any] | None:
    """The schema of ``path`` below the root."""
    found = SCHEMA
    for part in re.sub(r"\[\]", ".[]", path).split("."):
        below = [_below(option, part) for option in _alternatives(found)]
        found = next((schema for schema in below if schema is not None), None)
        if found is None:
            return None
    return found


def test_every_key_is_in_the_schema() -> None:
    assert [path for path in KEYS if _at(path) is None] == []
    assert set(SCHEMA["properties"]) - {"$schema"} - set(REMOVED_KEYS) == TOP_LEVEL_KEYS


def _kinds(schema: dict[str, Any]) -> set[str]:
    """The JSON types that ``schema`` lets pass."""
    out: set[str] = set()
    for option in _alternatives(schema):
        named = option.get("type")
        out |= set(named) if isinstance(named, list) else {named} if named else set()
        for value in [*option.get("enum", ()), *([option["const"]] if "const" in option else [])]:
            out.add({str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}[type(value)])
    return out


def test_schema_types_match_the_documented_ones() -> None:
    names = {"bool": "boolean", "int": "integer", "float": "number", "list": "array", "object": "object"}
    wrong = []
    for entry in json.loads((ROOT / "tests" / "data" / "config_keys.json").read_text()):
        found = _at(entry["path"])
        if entry["status"] != "current" or found is None or not _kinds(found):
            continue
        kinds = {kind.partition("[")[0] for kind in entry["type"].split("|")} - {"null"}
        wanted = {names.get(kind, "string") for kind in kinds}
        wanted |= {"number"} if "integer" in wanted else set()
        if entry["type"] != "any" and wanted and not wanted & _kinds(found):
            wrong.append((entry["path"], entry["type"], _kinds(found)))
    assert wrong == []


VALID = {
    **{name: ACCEPTED[name] for name in PLAIN},
    "zero 2, auto": HF_ZERO2,
    "zero 3, auto": HF_ZERO3,
    **{
        f"{folder.name} {path.name}": json.loads(plain_json(path.read_text()))
        for folder in (STARTERS, ROOT / "examples" / "configs")
        for path in folder.glob("*.json")
    },
    "schema key": {"$schema": "docs/config.schema.json", "train_batch_size": 8},
}
INVALID: dict[str, dict[str, Any]] = {
    "unknown key": {"train_batch_sizes": 8},
    "unknown inner key": {"zero_optimization": {"stages": 2}},
    "text for a number": {"train_batch_size": "8"},
    "text for a flag": {"bf16": {"enabled": "true"}},
    "out of range": {"zero_optimization": {"stage": 4}},
    "size 0": {"train_micro_batch_size_per_gpu": 0},
    "no such choice": {"gradient_allreduce_op": "max"},
    "auto where nobody fills it": {"train_batch_size": 8, "steps_per_print": "auto"},
}


def test_valid_files_pass_the_schema() -> None:
    checker = pytest.importorskip("jsonschema").Draft202012Validator
    checker.check_schema(SCHEMA)
    files = {name: json.loads(json.dumps(config).replace("Infinity", '"inf"')) for name, config in VALID.items()}
    faults = [(name, fault) for name, data in files.items() for fault in checker(SCHEMA).iter_errors(data)]
    assert [f"{name}, {'.'.join(map(str, fault.path))}: {fault.message}" for name, fault in faults] == []


@for_each("name", INVALID)
def test_invalid_files_fail_in_the_parser_and_in_the_schema(name: str) -> None:
    with pytest.raises(DeepSpeedConfigError):
        load_config(copy.deepcopy(INVALID[name]), world_size=1)
    if importlib.util.find_spec("jsonschema") is not None:
        checker = importlib.import_module("jsonschema").Draft202012Validator
        assert list(checker(SCHEMA).iter_errors(INVALID[name]))


def test_the_readme_counts_the_keys_as_the_manual_does() -> None:
    counts = re.search(r"^(\d+) keys: (\d+) honoured, (\d+) inert here, (\d+) not yet\.$", PAGE, re.MULTILINE)
    sentence = r"of (\d+) keys (\d+) are honoured, (\d+) accepted .*?(\d+) is an error"
    told = re.search(sentence, (ROOT / "README.md").read_text(), re.DOTALL)
    assert counts and told and told.groups() == counts.groups()
