"""Where each key of a relaxed-JSON text stands.

The JSON parsers give values without positions; error messages want the line. This scanner reads only the structure of
the text (nesting, keys, comments) and never fails: on text it does not understand it simply knows fewer lines.
"""

import re
from collections.abc import Container, Mapping

_SKIP = re.compile(r"(?:[\s,]+|#[^\n]*|//[^\n]*|/\*.*?\*/)*", re.DOTALL)
_QUOTED = r"'''.*?'''|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'"
_KEY = re.compile(rf"({_QUOTED}|[^\s:,{{}}\[\]\"'][^\s:,{{}}\[\]]*)\s*:", re.DOTALL)
_LITERAL = r"(?:true|false|null|-?\d[\d.eE+-]*)(?=[ \t]*(?:[,}\]#\r\n]|//|/\*|\Z))"
_VALUE = re.compile(rf"{_QUOTED}|{_LITERAL}|[^\n]*", re.DOTALL)
_COMMENT = re.compile(r"\"(?:\\.|[^\"\\\n])*\"|#[^\n]*|//[^\n]*|/\*.*?\*/", re.DOTALL)
_TRAILING_COMMA = re.compile(r",(?=\s*[}\]])")


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
    """``path``, or the nearest block around it, that is in ``names``; empty when none is."""
    while path and path not in names:
        path = path.rpartition(".")[0]
    return path


def line_of(lines: Mapping[str, list[int]], path: str) -> int | None:
    """The line of ``path``, or of the nearest enclosing key that is written in the text, or None."""
    written = enclosing(path, lines)
    return lines[written][-1] if written else None


def plain_json(text: str) -> str:
    """``text`` with comments and trailing commas blanked out; every other character keeps its position."""

    def blank(match: re.Match[str]) -> str:
        return match[0] if match[0].startswith('"') else re.sub(r"[^\n]", " ", match[0])

    return _TRAILING_COMMA.sub(" ", _COMMENT.sub(blank, text))
