"""Where each key of a relaxed-JSON text stands.

The JSON parsers give values without positions; error messages want the line. This scanner reads only
the structure of the text (nesting, keys, comments) and never fails: on text it does not understand it
simply knows fewer lines.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_SKIP = re.compile(r"(?:[\s,]+|#[^\n]*|//[^\n]*|/\*.*?\*/)+", re.DOTALL)
_QUOTED = re.compile(r"'''.*?'''|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'", re.DOTALL)
_BARE_KEY = re.compile(r"[^\s:,{}\[\]\"'][^\s:,{}\[\]]*")
_COLON = re.compile(r"\s*:")
_LITERAL = re.compile(r"(?:true|false|null|-?\d[\d.eE+-]*)(?=[ \t]*(?:[,}\]#\r\n]|//|/\*|\Z))")
_REST_OF_LINE = re.compile(r"[^\n]*")
_COMMENT = re.compile(r"\"(?:\\.|[^\"\\\n])*\"|#[^\n]*|//[^\n]*|/\*.*?\*/", re.DOTALL)
_TRAILING_COMMA = re.compile(r",(?=\s*[}\]])")


@dataclass
class _Frame:
    """One open object or list: its dotted path, and for a list the index of the next element."""

    path: str
    is_list: bool
    index: int = 0
    key: str | None = None

    def child(self) -> str:
        """Dotted path of the value that comes next."""
        name = str(self.index) if self.is_list else (self.key or "")
        return f"{self.path}.{name}" if self.path else name

    def value_done(self) -> None:
        """Note that the value announced by the last key or position has been read."""
        self.index += 1
        self.key = None


@dataclass
class _Scan:
    text: str
    at: int = 0
    stack: list[_Frame] = field(default_factory=list)
    lines: dict[str, list[int]] = field(default_factory=dict)

    def take(self, pattern: re.Pattern[str]) -> str | None:
        match = pattern.match(self.text, self.at)
        if match is None:
            return None
        self.at = match.end()
        return match.group()

    def read_key(self, frame: _Frame) -> bool:
        start = self.at
        raw = self.take(_QUOTED)
        key = raw[1:-1] if raw else self.take(_BARE_KEY)
        if key is None or self.take(_COLON) is None:
            return False
        frame.key = key
        self.lines.setdefault(frame.child(), []).append(self.text.count("\n", 0, start) + 1)
        return True

    def read_value(self, frame: _Frame) -> None:
        char = self.text[self.at]
        if char in "{[":
            self.stack.append(_Frame(frame.child(), char == "["))
            self.at += 1
            return
        if self.take(_QUOTED) is None and self.take(_LITERAL) is None:
            self.take(_REST_OF_LINE)
        frame.value_done()


def key_lines(text: str) -> dict[str, list[int]]:
    """Map each dotted key path of ``text`` to the 1-based lines on which it is written (several when repeated)."""
    scan = _Scan(text)
    scan.take(_SKIP)
    if scan.at < len(text) and text[scan.at] == "{":
        scan.at += 1
    scan.stack.append(_Frame("", is_list=False))
    while scan.stack:
        scan.take(_SKIP)
        if scan.at >= len(text):
            break
        frame = scan.stack[-1]
        if text[scan.at] in "}]":
            scan.at += 1
            scan.stack.pop()
            if scan.stack:
                scan.stack[-1].value_done()
        elif frame.is_list or frame.key is not None:
            scan.read_value(frame)
        elif not scan.read_key(frame):
            break
    return scan.lines


def line_of(lines: Mapping[str, list[int]], path: str) -> int | None:
    """The line of ``path``, or of the nearest enclosing key that is written in the text, or None."""
    while path:
        if path in lines:
            return lines[path][-1]
        path = path.rpartition(".")[0]
    return None


def plain_json(text: str) -> str:
    """``text`` with comments and trailing commas blanked out; every other character keeps its position."""

    def blank(match: re.Match[str]) -> str:
        found = match.group()
        return found if found.startswith('"') else re.sub(r"[^\n]", " ", found)

    return _TRAILING_COMMA.sub(" ", _COMMENT.sub(blank, text))
