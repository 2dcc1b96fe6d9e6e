"""Reading a configuration: from a dict, a relaxed-JSON file, or URL-safe base64 of JSON."""

import base64
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import hjson

from deepspeed.config.explain.lines import key_lines, plain_json
from deepspeed.errors import DeepSpeedConfigError


@dataclass(frozen=True)
class ConfigSource:
    """A configuration as handed over, before any key is judged.

    ``data`` is the caller's own dict, or the parsed one. ``name`` is how messages call it.
    ``lines`` maps dotted key paths to line numbers and is empty unless there is a text to point into.
    ``from_program`` is true for dicts and base64, which other programs write and decorate with keys of their own.
    """

    data: dict[str, Any]
    name: str
    from_program: bool
    lines: Mapping[str, list[int]] = field(default_factory=dict)


def _unique(pairs: list[tuple[str, Any]], text: str, name: str) -> dict[str, Any]:
    """An object of ``text`` from its ``pairs``; DeepSpeedConfigError when it holds a key twice."""
    out, names = dict(pairs), [key for key, _ in pairs]
    if len(out) < len(pairs):
        key = next(key for key in out if names.count(key) > 1)
        placed = (item for item in key_lines(text).items() if len(item[1]) > 1 and item[0].rpartition(".")[2] == key)
        path, lines = next(placed, (key, []))
        where = f"{len(lines)} times (lines {', '.join(map(str, lines))})" if lines else "twice in one block"
        raise DeepSpeedConfigError(f"{name}: the key {path!r} is written {where}. Keep one of them.")
    return out


def parse_text(text: str, name: str) -> dict[str, Any]:
    """Parse JSON or relaxed JSON (comments, trailing commas, bare keys).

    Raises DeepSpeedConfigError for empty text, repeated keys, broken syntax (with its place) and what is no object.
    """
    if not text.strip():
        raise DeepSpeedConfigError(f"{name} is empty. Write at least {{}} with the batch size keys.")
    unique = partial(_unique, text=text, name=name)
    try:
        try:
            data = json.loads(text, object_pairs_hook=unique)
        except json.JSONDecodeError:
            data = hjson.loads(text, object_pairs_hook=unique)
    except (hjson.HjsonDecodeError, IndexError) as relaxed:  # IndexError: a comment that does not end
        # The relaxed parser reads far past a missing comma before it stops; the strict one stops where the mistake is.
        error: Any = relaxed
        try:
            json.loads(plain_json(text))
        except json.JSONDecodeError as strict:
            error = strict
        where = f"broken JSON at line {error.lineno}, column {error.colno}: {error.msg}."
        raise DeepSpeedConfigError(f"{name}: {where}") from None
    except RecursionError:
        raise DeepSpeedConfigError(f"{name} is nested too deeply to be a configuration.") from None
    if not isinstance(data, dict):
        kind = type(data).__name__
        raise DeepSpeedConfigError(f"{name} must hold one object {{...}} at its top level, but holds a {kind}.")
    return data


def text_source(raw: bytes, name: str) -> ConfigSource:
    """The source whose text is ``raw``; messages call it ``name``."""
    position = ""
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        text, position = "\0", f" (byte {error.start} is not UTF-8)"
    if "\0" in text:
        raise DeepSpeedConfigError(f"{name} is not a text file{position}. Give a JSON file.")
    return ConfigSource(parse_text(text, name), name, from_program=False, lines=key_lines(text))


def _decode_base64(text: str) -> str:
    """The JSON object text inside ``text``; empty when it is not base64 of one."""
    try:
        raw = base64.b64decode(text.strip() + "=" * (-len(text.strip()) % 4), altchars=b"-_", validate=True)
        decoded = raw.decode("utf-8")
    except ValueError:
        return ""
    return decoded if decoded.lstrip().startswith("{") else ""


def read_source(source: Any) -> ConfigSource:
    """Read ``source`` (dict, path, or base64 text) without judging its keys.

    Raises DeepSpeedConfigError, naming the file, for everything that is not one readable object.
    """
    if isinstance(source, dict):
        return ConfigSource(source, "configuration dict", from_program=True)
    if not isinstance(source, str | os.PathLike):
        kind = type(source).__name__
        raise DeepSpeedConfigError(f"The configuration must be a dict, a file path or base64 text of JSON, not {kind}.")
    path, text, encoded = Path(source), os.fspath(source), "configuration in base64"
    if os.path.isdir(source) and text:
        raise DeepSpeedConfigError(f"configuration path {str(path)!r} is a directory. Name the JSON file inside it.")
    if os.path.exists(source):  # false for a long base64 text, which is no legal file name
        name = f"configuration file {str(path)!r}"
        try:
            raw = path.read_bytes()
        except OSError as error:
            raise DeepSpeedConfigError(f"{name} cannot be read: {error.strerror or error}.") from error
        return text_source(raw, name)
    if isinstance(source, str) and (decoded := _decode_base64(text)):
        return ConfigSource(parse_text(decoded, encoded), encoded, from_program=True)
    shown = text if len(text) <= 200 else text[:200] + "..."
    raise DeepSpeedConfigError(
        f"Configuration file {shown!r} does not exist (working directory {os.getcwd()}), "
        "and the text is not base64 of a JSON object either."
    )


def read_config_source(source: dict[str, Any] | str | os.PathLike[str]) -> dict[str, Any]:
    """The plain dict of a configuration: the very object for a dict, else the parsed file or base64 text."""
    return read_source(source).data
