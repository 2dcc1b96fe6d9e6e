"""A configuration is read from a dict, a file with comments or base64; whatever is unreadable is one sentence."""

import base64
import copy
import json
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
    source = {
        "train_batch_size": 8,
        "bfloat16": {"enabled": "auto"},
        "zero_optimization": {
            "stage": 3,
            "stage3_prefetch_bucket_size": 5e7,
            "cpu_offload": False,
            "reduce_bucket_size": "auto",
        },
        "optimizer": {"type": "Adam", "params": {"betas": [0.9, 0.99]}},
        "tensorboard": {"enabled": False},
    }
    before = copy.deepcopy(source)
    cfg = load_config(source, world_size=2)
    assert cfg.source is source and source == before
    assert cfg.optimizer.params is not source["optimizer"]["params"]
    assert cfg.optimizer.params["betas"] == (0.9, 0.99)
    assert not cfg.tensorboard.enabled
    assert source == before
    assert cfg.source is source


def test_comments_bare_keys_and_trailing_commas(tmp_path: Path) -> None:
    path = write(tmp_path, COMMENTED.replace('    "note_url": "http://x#y",\n', ""))
    for given in (path, str(path)):
        cfg = load_config(given, world_size=2)
        assert (cfg.train_micro_batch_size_per_gpu, cfg.zero.stage, cfg.optimizer.params["lr"]) == (4, 2, 1e-3)
    assert read_config_source(path) == cfg.source


def test_byte_order_mark(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, b'\xef\xbb\xbf{"train_batch_size": 1}'), world_size=1).train_batch_size == 1


@pytest.mark.parametrize("encode", [base64.urlsafe_b64encode, lambda raw: base64.urlsafe_b64encode(raw).rstrip(b"=")])
def test_base64(encode: object) -> None:
    data = {"train_batch_size": 4, "csv_monitor": {"job_name": "??>>~~"}}
    cfg = load_config(encode(json.dumps(data).encode()).decode(), world_size=2)
    assert cfg.source == data and cfg.train_micro_batch_size_per_gpu == 2


def test_long_base64_is_not_mistaken_for_a_path() -> None:
    data = {"train_batch_size": 4, "csv_monitor": {"job_name": "x" * 6000}}
    assert load_config(base64.urlsafe_b64encode(json.dumps(data).encode()).decode(), world_size=1).source == data


def test_missing_file() -> None:
    text = message("no/such/ds_config.json")
    assert "'no/such/ds_config.json' does not exist" in text and "working directory" in text


def test_directory(tmp_path: Path) -> None:
    assert f"{str(tmp_path)!r} is a directory" in message(tmp_path)


@pytest.mark.parametrize("content", ["", "  \n\n"])
def test_empty_file(tmp_path: Path, content: str) -> None:
    assert "ds.json' is empty" in message(write(tmp_path, content))


@pytest.mark.parametrize("content", [b"\x80\x02}q\x00", b"\x00\x01\x02", b"PK\x03\x04\xff\xfe"])
def test_binary_file(tmp_path: Path, content: bytes) -> None:
    assert "is not a text file" in message(write(tmp_path, content))


def test_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, "{}")

    def refuse(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert "cannot be read: Permission denied" in message(path)


@pytest.mark.parametrize(
    ("content", "line", "column"),
    [
        ('{"train_batch_size": 8 "fp16": {}}', 1, 24),
        ('{\n  // note\n  "train_batch_size": 8,\n  "fp16": {"enabled": true\n', 5, 1),
        ('{\n  "fp16": {"enabled": true}}\n}', 3, 1),
        ('{\n  "a": [1, 2\n}', 3, 1),
        ('{"a": NaN /* the relaxed parser takes the rest of the line for a text */}', 1, 74),
        ('{"a": 1, /* a comment without an end', 1, 10),
    ],
)
def test_broken_json_has_line_and_column(tmp_path: Path, content: str, line: int, column: int) -> None:
    text = message(write(tmp_path, content))
    assert "ds.json" in text and f"broken JSON at line {line}, column {column}" in text


@pytest.mark.parametrize("content", ["[1, 2]", '"text"', "3", "null"])
def test_top_level_must_be_an_object(tmp_path: Path, content: str) -> None:
    text = message(write(tmp_path, content))
    assert "must hold one object" in text or "broken JSON" in text


def test_duplicate_key_with_lines(tmp_path: Path) -> None:
    path = write(tmp_path, '{\n "train_batch_size": 1,\n "fp16": {"enabled": true,\n   "enabled": false}\n}')
    assert "the key 'fp16.enabled' is written 2 times (lines 3, 4)" in message(path)
    commented = write(tmp_path, '{ # c\n "train_batch_size": 1,\n "train_batch_size": 2}')
    assert "'train_batch_size' is written 2 times (lines 2, 3)" in message(commented)


def test_duplicate_key_in_base64() -> None:
    assert "'a' is written 2 times" in message(base64.urlsafe_b64encode(b'{"a": 1, "a": 2}').decode())


@pytest.mark.parametrize("source", [None, 3, ["a"], b"{}"])
def test_wrong_source_type(source: object) -> None:
    assert f"not {type(source).__name__}" in message(source)


def test_world_size_must_be_positive() -> None:
    assert "at least 1, not 0" in message({"train_batch_size": 1}, world_size=0)


def test_lines_of_nested_keys() -> None:
    lines = key_lines(COMMENTED)
    assert lines["train_batch_size"] == [3]
    assert lines["optimizer"] == [5]
    assert lines["optimizer.params.betas"] == [7]
    assert lines["zero_optimization.stage"] == [10]
    assert lines["zero_optimization.note_url"] == [11]
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
