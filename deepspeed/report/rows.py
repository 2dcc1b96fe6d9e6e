"""The shape of the report: sections of rows. A row may carry a doubt: why its value matters and what to do."""

import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

WIDTH = 110
VERDICT = "missing or doubtful"


class Row(NamedTuple):
    """One fact. ``doubt``: one sentence or two when the value is missing or doubtful, else empty."""

    name: str
    value: str
    doubt: str = ""


class Section(NamedTuple):
    """Rows under a title."""

    title: str
    rows: tuple[Row, ...]


Probe = Callable[[], Row | list[Row]]


def first_line(error: BaseException) -> str:
    """Class and first line of ``error``, for one row of a table."""
    line = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def gather(title: str, probes: dict[str, Probe]) -> Section:
    """Run the named ``probes``; one that fails becomes a row ``unknown (reason)``, whatever it raised."""
    rows: list[Row] = []
    for name, probe in probes.items():
        try:
            answer = probe()
        except Exception as error:
            answer = Row(name, f"unknown ({first_line(error)})")
        rows += [answer] if isinstance(answer, Row) else answer
    return Section(title, tuple(rows))


def doubts(sections: Iterable[Section]) -> list[Row]:
    """The rows that carry a doubt, in order."""
    return [row for section in sections for row in section.rows if row.doubt]


def as_json(sections: Sequence[Section], *, verdict: bool = True) -> dict[str, Any]:
    """Section title -> row name -> value; last the doubts, where wanted."""
    content = {section.title: {row.name: row.value for row in section.rows} for section in sections}
    return content | ({VERDICT: {row.name: row.doubt for row in doubts(sections)}} if verdict else {})


def _wrapped(head: str, text: str) -> list[str]:
    clean = text.encode("ascii", "backslashreplace").decode()
    lines = textwrap.wrap(clean, WIDTH, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False)
    return lines or [head.rstrip()]


def as_text(sections: Sequence[Section], *, verdict: bool = True) -> str:
    """The report as lines of at most 110 columns: a title and aligned rows per section; last the doubts."""
    column = min(34, max((len(row.name) for section in sections for row in section.rows), default=0))
    lines: list[str] = []
    for section in sections:
        lines += [section.title, "-" * len(section.title)]
        for row in section.rows:
            lines += _wrapped(f"{row.name:<{column}}  ", row.value)
        lines.append("")
    if verdict:
        lines += [VERDICT, "-" * len(VERDICT)]
        for row in doubts(sections):
            lines += _wrapped("  ", f"{row.name}: {row.doubt}")
        lines += [] if doubts(sections) else ["  nothing"]
    return "\n".join(lines).rstrip("\n") + "\n"


def size(nbytes: float) -> str:
    """``"23.4 GiB"``; bytes are scaled by 1024."""
    for unit in ("B", "KiB", "MiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} GiB"
