"""docs/config.md and docs/config.schema.json are made from the models and the key table, and are current."""

import copy
import importlib
import json
import re
from math import isfinite
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from deepspeed.config import DeepSpeedConfigError, load_config
from deepspeed.config.model.root import TOP_LEVEL_KEYS, DeepSpeedConfig
from deepspeed.config.model.settings import all_keys, declared_fields
from deepspeed.config.model.spelling import REMOVED_KEYS, SPELLED
from deepspeed.config.parse import plain_json
from deepspeed.tools.config.cli import STARTERS
from tests.harness.rows import for_each
from tests.pure.test_client_configs import ACCEPTED, HF_ZERO2, HF_ZERO3, PLAIN
from tests.pure.test_config_removed import document as nested
from tests.pure.test_config_values import BY_PROGRAM, KEYS as DOCUMENTED, NUMBERS, beyond, document, right, wrong

ROOT = Path(__file__).parents[2]
REMAKE = "run: python docs/site/configuration.py"


with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(ROOT / "docs" / "site"))  # the file that makes them is there
    made = importlib.import_module("configuration")
main, page, schema_text = made.main, made.page, made.schema_text
KEYS = all_keys(DeepSpeedConfig)
SCHEMA = json.loads(schema_text())
CHECKER = jsonschema.Draft202012Validator(SCHEMA)
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


def _is_unknown(config: dict[str, Any]) -> bool:
    """Whether the schema has no such key somewhere in ``config``."""
    faults = [*CHECKER.iter_errors(config)]
    while faults:
        fault = faults.pop()
        if fault.validator == "additionalProperties":
            return True
        faults += fault.context
    return False


def test_every_key_is_in_the_schema() -> None:
    assert [path for path in set(KEYS) - set(DOCUMENTED) if _is_unknown(nested(path, None))] == []
    assert [path for path in DOCUMENTED if _is_unknown(document(path, None))] == []
    assert set(SCHEMA["properties"]) - {"$schema"} - set(REMOVED_KEYS) == TOP_LEVEL_KEYS


def test_the_schema_takes_and_refuses_the_values_that_the_parser_does() -> None:
    """Of each documented key; test_config_values.py gives these values to the parser."""
    assert [path for path in DOCUMENTED if not CHECKER.is_valid(document(path, right(path)))] == []
    values = [(path, value) for path in DOCUMENTED if path not in BY_PROGRAM for value in wrong(path)]
    values += [(path, value) for path in NUMBERS for value in beyond(path)]
    finite = [(path, value) for path, value in values if not isinstance(value, float) or isfinite(value)]
    assert [(path, value) for path, value in finite if CHECKER.is_valid(document(path, value))] == []


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
    "auto where nobody fills it": {"train_batch_size": 8, "steps_per_print": "auto"},
}


def test_valid_files_pass_the_schema() -> None:
    CHECKER.check_schema(SCHEMA)
    files = {name: json.loads(json.dumps(config).replace("Infinity", '"inf"')) for name, config in VALID.items()}
    faults = [(name, fault) for name, data in files.items() for fault in CHECKER.iter_errors(data)]
    assert [f"{name}, {'.'.join(map(str, fault.path))}: {fault.message}" for name, fault in faults] == []


@for_each("name", INVALID)
def test_invalid_files_fail_in_the_parser_and_in_the_schema(name: str) -> None:
    with pytest.raises(DeepSpeedConfigError):
        load_config(copy.deepcopy(INVALID[name]), world_size=1)
    assert not CHECKER.is_valid(INVALID[name])


def test_the_readme_counts_the_keys_as_the_manual_does() -> None:
    counts = re.search(r"^(\d+) keys: (\d+) honoured, (\d+) inert here, (\d+) not yet\.$", PAGE, re.MULTILINE)
    sentence = r"of (\d+) keys (\d+) are honoured, (\d+) accepted .*?(\d+) is an error"
    told = re.search(sentence, (ROOT / "README.md").read_text(), re.DOTALL)
    assert counts and told and told.groups() == counts.groups()
