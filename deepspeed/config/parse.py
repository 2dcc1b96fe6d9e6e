"""Reading a configuration: from a dict, a relaxed-JSON file, or URL-safe base64 of JSON.

The JSON parsers give values without positions, and error messages want the line of each key. A scanner reads only the
structure of the text (nesting, keys, comments); what it does not understand has no line, and is no failure.
"""

import base64
import json
import os
import re
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import hjson

from deepspeed.errors import DeepSpeedConfigError

_SKIP = re.compile(r"(?:[\s,]+|#[^\n]*|//[^\n]*|/\*.*?\*/)*", re.DOTALL)
_QUOTED = r"'''.*?'''|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'"
_KEY = re.compile(rf"({_QUOTED}|[^\s:,{{}}\[\]\"'][^\s:,{{}}\[\]]*)\s*:", re.DOTALL)
_LITERAL = r"(?:true|false|null|-?\d[\d.eE+-]*)(?=[ \t]*(?:[,}\]#\r\n]|//|/\*|\Z))"
_VALUE = re.compile(rf"{_QUOTED}|{_LITERAL}|[^\n]*", re.DOTALL)
_COMMENT = re.compile(r"\"(?:\\.|[^\"\\\n])*\"|#[^\n]*|//[^\n]*|/\*.*?\*/", re.DOTALL)
_TRAILING_COMMA = re.compile(r",(?=\s*[}\]])")


@dataclass(frozen=True)
class ConfigSource:
    """Hold a configuration as handed over, with no key judged. ``data``: the caller's own dict, or the parsed one."""

    data: dict[str, Any]
    name: str  # in messages
    from_program: bool  # a dict or base64, which other programs write and decorate with keys of their own
    lines: Mapping[str, list[int]] = field(default_factory=dict)  # of dotted key paths, where there is a text


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    return match.end() if match else at


def key_lines(text: str) -> dict[str, list[int]]:
    """Map each dotted key path of ``text`` to the 1-based lines on which it is written (several when repeated)."""
    lines: dict[str, list[int]] = {}
    at = _end(_SKIP, text, 0)
    at += text.startswith("{", at)
    # of every open block: the beginning of its paths, and the key or index of the value that comes next
    blocks: list[tuple[str, str | int | None]] = [("", None)]
    while blocks and (at := _end(_SKIP, text, at)) < len(text):
        prefix, name = blocks[-1]
        if text[at] not in "}]" and name is None:
            named = _KEY.match(text, at)
            if named is None:
                break
            name = named[1][1:-1] if named[1][0] in "\"'" else named[1]
            lines.setdefault(f"{prefix}{name}", []).append(text.count("\n", 0, at) + 1)
            blocks[-1], at = (prefix, name), named.end()
        elif text[at] in "{[":
            blocks.append((f"{prefix}{name}.", 0 if text[at] == "[" else None))
            at += 1
        else:
            if text[at] in "}]":
                blocks.pop()
                at += 1
            else:
                at = _end(_VALUE, text, at)
            if blocks:  # the value that its last key or position announced has been read
                prefix, name = blocks.pop()
                blocks.append((prefix, name + 1 if isinstance(name, int) else None))
    return lines


def enclosing(path: str, names: Container[str]) -> str:
    """Return ``path``, or the nearest block around it, that is in ``names``; empty when none is."""
    while path and path not in names:
        path = path.rpartition(".")[0]
    return path


def line_of(lines: Mapping[str, list[int]], path: str) -> int | None:
    """Return the line of ``path``, or of the nearest enclosing key that is written in the text, or None."""
    written = enclosing(path, lines)
    return lines[written][-1] if written else None


def plain_json(text: str) -> str:
    """Blank out comments and trailing commas of ``text``; every other character keeps its position."""
    blanked = _COMMENT.sub(lambda hit: hit[0] if hit[0][0] == '"' else re.sub(r"[^\n]", " ", hit[0]), text)
    return _TRAILING_COMMA.sub(" ", blanked)


def _unique(pairs: list[tuple[str, Any]], text: str, name: str) -> dict[str, Any]:
    """Build an object of ``text`` from its ``pairs``; raise DeepSpeedConfigError when it holds a key twice."""
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

    Raises DeepSpeedConfigError for empty text, repeated keys, broken syntax (with its place) and text of no object.
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
    """Parse the text in ``raw`` into a source that messages call ``name``; raise DeepSpeedConfigError on failure."""
    position = ""
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        text, position = "\0", f" (byte {error.start} is not UTF-8)"
    if "\0" in text:
        raise DeepSpeedConfigError(f"{name} is not a text file{position}. Give a JSON file.")
    return ConfigSource(parse_text(text, name), name, from_program=False, lines=key_lines(text))


def _decode_base64(text: str) -> str:
    """Decode ``text`` from base64 into the text of a JSON object; return "" when it is no such thing."""
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
    named = {".", os.sep} & set(shown)  # as no base64 is
    raise DeepSpeedConfigError(
        f"Configuration file {shown!r} does not exist (working directory {os.getcwd()})"
        + ("." if named else ", and the text is not base64 of a JSON object either.")
    )


def read_config_source(source: dict[str, Any] | str | os.PathLike[str]) -> dict[str, Any]:
    """Return the plain dict of a configuration: the very object for a dict, else the parsed file or base64 text."""
    return read_source(source).data
