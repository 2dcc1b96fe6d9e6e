"""A configuration is read from a dict, a file with comments or base64; whatever is unreadable is one sentence."""

import base64
import copy
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from deepspeed.config import DeepSpeedConfig, DeepSpeedConfigError, load_config, read_config_source
from deepspeed.config.parse import key_lines, line_of, plain_json
from tests.harness.rows import for_each

COMMENTED = """{
  // batch
  "train_batch_size": 8,   # eight
  /* "optimizer": {"type": "none"}, */
  "optimizer": {
    "type": "Adam",
    "params": {"lr": 1e-3, "betas": [0.9, 0.99]}
  },
  zero_optimization: {
    stage: 2
    "note_url": "http://x#y",
  },
}
"""


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "ds.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def message(source: object, *, world_size: int = 1) -> str:
    with pytest.raises(DeepSpeedConfigError) as caught:
        load_config(source, world_size=world_size)
    assert isinstance(caught.value, ValueError)
    return str(caught.value)


def test_dict_is_kept_and_never_changed() -> None:
    zero = {"stage": 3, "stage3_prefetch_bucket_size": 5e7, "cpu_offload": False, "reduce_bucket_size": "auto"}
    optimizer = {"type": "Adam", "params": {"betas": [0.9, 0.99]}}
    source = {"train_batch_size": 8, "bfloat16": {"enabled": "auto"}, "zero_optimization": zero, "optimizer": optimizer}
    before = copy.deepcopy(source)
    cfg = load_config(source, world_size=2)
    assert cfg.source is source and source == before
    assert cfg.optimizer.params is not optimizer["params"] and cfg.optimizer.params["betas"] == (0.9, 0.99)


def test_comments_bare_keys_and_trailing_commas(tmp_path: Path) -> None:
    path = write(tmp_path, COMMENTED.replace('    "note_url": "http://x#y",\n', ""))
    for given in (path, str(path)):
        cfg = load_config(given, world_size=2)
        assert (cfg.train_micro_batch_size_per_gpu, cfg.zero.stage, cfg.optimizer.params["lr"]) == (4, 2, 1e-3)
    assert read_config_source(path) == cfg.source


def test_byte_order_mark(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, b'\xef\xbb\xbf{"train_batch_size": 1}'), world_size=1).train_batch_size == 1


def test_base64() -> None:
    """Long text is not mistaken for a path."""
    for name in ("??>>~~", "x" * 6000):
        data = {"train_batch_size": 4, "csv_monitor": {"job_name": name}}
        encoded = base64.urlsafe_b64encode(json.dumps(data).encode()).decode()
        for given in (encoded, encoded.rstrip("=")):
            cfg = load_config(given, world_size=2)
            assert cfg.source == data and cfg.train_micro_batch_size_per_gpu == 2
    assert "'a' is written 2 times" in message(base64.urlsafe_b64encode(b'{"a": 1, "a": 2}').decode())


def test_missing_file_and_directory(tmp_path: Path) -> None:
    text = message("no/such/ds_config.json")
    assert "'no/such/ds_config.json' does not exist" in text and "working directory" in text
    assert f"{str(tmp_path)!r} is a directory" in message(tmp_path)


def test_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, "{}")

    def refuse(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert "cannot be read: Permission denied" in message(path)


@pytest.mark.parametrize(
    ("words", "contents"),
    [
        ("ds.json' is empty", ["", "  \n\n"]),
        ("is not a text file", [b"\x80\x02}q\x00", b"\x00\x01\x02", b"PK\x03\x04\xff\xfe"]),
        ("must hold one object|broken JSON", ["[1, 2]", '"text"', "3", "null"]),
        ("broken JSON at line 1, column 24", ['{"train_batch_size": 8 "fp16": {}}']),
        ("line 5, column 1", ['{\n  // note\n  "train_batch_size": 8,\n  "fp16": {"enabled": true\n']),
        ("line 3, column 1", ['{\n  "fp16": {"enabled": true}}\n}', '{\n  "a": [1, 2\n}']),
        ("line 1, column 74", ['{"a": NaN /* the relaxed parser takes the rest of the line for a text */}']),
        ("line 1, column 10", ['{"a": 1, /* a comment without an end']),
        ("nested too deeply", ["[" * 5000]),
    ],
)
def test_what_is_no_configuration_is_refused(tmp_path: Path, words: str, contents: list[str | bytes]) -> None:
    """Of broken JSON line and column are named."""
    for content in contents:
        text = message(write(tmp_path, content))
        assert "ds.json" in text and re.search(words, text), content
        assert "line" not in words or "broken JSON at line" in text


def test_duplicate_key_with_lines(tmp_path: Path) -> None:
    path = write(tmp_path, '{\n "train_batch_size": 1,\n "fp16": {"enabled": true,\n   "enabled": false}\n}')
    assert "the key 'fp16.enabled' is written 2 times (lines 3, 4)" in message(path)
    commented = write(tmp_path, '{ # c\n "train_batch_size": 1,\n "train_batch_size": 2}')
    assert "'train_batch_size' is written 2 times (lines 2, 3)" in message(commented)


def test_wrong_source_type_and_number_of_ranks() -> None:
    for source in (None, 3, ["a"], b"{}"):
        assert f"not {type(source).__name__}" in message(source)
    assert "at least 1, not 0" in message({"train_batch_size": 1}, world_size=0)


def test_lines_of_nested_keys() -> None:
    lines = key_lines(COMMENTED)
    expected = {"train_batch_size": [3], "optimizer": [5], "optimizer.params.betas": [7]}
    expected |= {"zero_optimization.stage": [10], "zero_optimization.note_url": [11]}
    assert expected.items() <= lines.items()
    assert line_of(lines, "zero_optimization.absent.key") == 9
    assert line_of(lines, "absent") is None
    assert key_lines("a: 1\nb: {\n c: text here\n}\nd: '''\n{x\n'''\ne: 2")["e"] == [8]
    assert key_lines('{"a": [{"b": 1},\n {"b": 2}]}') == {"a": [1], "a.0.b": [1], "a.1.b": [2]}


@for_each("text", ["", "}", "{{{", '{"a"', "[[", '{"a": "', "/*", ":::", "{a:b", "]]]]{"])
def test_scanner_never_fails(text: str) -> None:
    assert all(line == 1 for lines in key_lines(text).values() for line in lines), "there is only one line"


def test_plain_json_keeps_positions() -> None:
    text = '{"a": "//x", # c\n "b": 1, /* d\n */ }'
    plain = plain_json(text)
    assert len(plain) == len(text) and json.loads(plain) == {"a": "//x", "b": 1}


def test_package_needs_no_torch() -> None:
    package = Path(__file__).parents[2] / "deepspeed"
    code = (
        "import sys, types\n"
        "parent = types.ModuleType('deepspeed'); parent.__path__ = [sys.argv[1]]; sys.modules['deepspeed'] = parent\n"
        "import deepspeed.config\n"
        "deepspeed.config.load_config({'train_batch_size': 1}, world_size=1)\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code, str(package)], check=True, timeout=60, cwd=package.parent)


def test_a_configuration_made_earlier_is_a_source() -> None:
    data = {"train_batch_size": 8, "zero_optimization": {"stage": 2}}
    first = DeepSpeedConfig(data)
    again = load_config(first, world_size=4)
    assert again.source is data and again.train_micro_batch_size_per_gpu == 2 and again.zero_stage == 2
