"""Where each key of a relaxed-JSON text stands.

The JSON parsers give values without positions; error messages want the line. This scanner reads only
the structure of the text (nesting, keys, comments) and never fails: on text it does not understand it
simply knows fewer lines.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

_SKIP = re.compile(r"(?:[\s,]+|#[^\n]*|//[^\n]*|/\*.*?\*/)*", re.DOTALL)
_QUOTED = r"'''.*?'''|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'"
_KEY = re.compile(rf"({_QUOTED}|[^\s:,{{}}\[\]\"'][^\s:,{{}}\[\]]*)\s*:", re.DOTALL)
_LITERAL = r"(?:true|false|null|-?\d[\d.eE+-]*)(?=[ \t]*(?:[,}\]#\r\n]|//|/\*|\Z))"
_VALUE = re.compile(rf"{_QUOTED}|{_LITERAL}|[^\n]*", re.DOTALL)
_COMMENT = re.compile(r"\"(?:\\.|[^\"\\\n])*\"|#[^\n]*|//[^\n]*|/\*.*?\*/", re.DOTALL)
_TRAILING_COMMA = re.compile(r",(?=\s*[}\]])")


@dataclass
class _Frame:
    """One open object or list: its dotted path, and the key or index of the value that comes next."""

    path: str
    is_list: bool
    next: str | int | None

    def child(self) -> str:
        """Dotted path of the value that comes next."""
        return f"{self.path}.{self.next}" if self.path else str(self.next)

    def value_done(self) -> None:
        """Note that the value announced by the last key or position has been read."""
        self.next = self.next + 1 if isinstance(self.next, int) else None


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    return match.end() if match else at


def key_lines(text: str) -> dict[str, list[int]]:
    """Map each dotted key path of ``text`` to the 1-based lines on which it is written (several when repeated)."""
    lines: dict[str, list[int]] = {}
    at = _end(_SKIP, text, 0)
    at += text.startswith("{", at)
    stack = [_Frame("", is_list=False, next=None)]
    while stack and (at := _end(_SKIP, text, at)) < len(text):
        frame = stack[-1]
        if text[at] in "}]":
            at += 1
            stack.pop()
            if stack:
                stack[-1].value_done()
        elif frame.next is None:
            named = _KEY.match(text, at)
            if named is None:
                break
            key = named[1]
            frame.next = key[1:-1] if key[0] in "\"'" else key
            lines.setdefault(frame.child(), []).append(text.count("\n", 0, at) + 1)
            at = named.end()
        elif text[at] in "{[":
            stack.append(_Frame(frame.child(), text[at] == "[", 0 if text[at] == "[" else None))
            at += 1
        else:
            at = _end(_VALUE, text, at)
            frame.value_done()
    return lines


def line_of(lines: Mapping[str, list[int]], path: str) -> int | None:
    """The line of ``path``, or of the nearest enclosing key that is written in the text, or None."""
    while path and path not in lines:
        path = path.rpartition(".")[0]
    return lines[path][-1] if path else None


def plain_json(text: str) -> str:
    """``text`` with comments and trailing commas blanked out; every other character keeps its position."""

    def blank(match: re.Match[str]) -> str:
        return match[0] if match[0].startswith('"') else re.sub(r"[^\n]", " ", match[0])

    return _TRAILING_COMMA.sub(" ", _COMMENT.sub(blank, text))
