"""The shape of the report: titles with rows. A row may carry a doubt: why its value matters and what to do."""

import textwrap
from collections.abc import Callable, Mapping
from typing import NamedTuple

WIDTH = 110
VERDICT = "missing or doubtful"


class Row(NamedTuple):
    """One fact. ``doubt``: one sentence or two when the value is missing or doubtful, else empty."""

    name: str
    value: str
    doubt: str = ""


Probe = Callable[[], Row | list[Row]]
Report = Mapping[str, list[Row]]


def first_line(error: BaseException) -> str:
    """Class and first line of ``error``, for one row of a table."""
    line = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def gather(probes: Mapping[str, Probe]) -> list[Row]:
    """The rows of the named ``probes``; one that fails becomes a row ``unknown (reason)``, whatever it raised."""
    rows: list[Row] = []
    for name, probe in probes.items():
        try:
            answer = probe()
        except Exception as error:
            answer = Row(name, f"unknown ({first_line(error)})")
        rows += [answer] if isinstance(answer, Row) else answer
    return rows


def doubts(report: Report) -> dict[str, str]:
    """Name -> doubt of the rows that carry one, in order."""
    return {row.name: row.doubt for rows in report.values() for row in rows if row.doubt}


def _wrapped(head: str, text: str) -> list[str]:
    clean = text.encode("ascii", "backslashreplace").decode()
    lines = textwrap.wrap(clean, WIDTH, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False)
    return lines or [head.rstrip()]


def as_text(report: Report, *, verdict: bool = True) -> str:
    """The report as lines of at most 110 columns: a title and aligned rows per section; last the doubts."""
    column = min(34, max((len(row.name) for rows in report.values() for row in rows), default=0))
    lines: list[str] = []
    for title, rows in report.items():
        lines += [title, "-" * len(title)]
        lines += [line for row in rows for line in _wrapped(f"{row.name:<{column}}  ", row.value)] + [""]
    if verdict:
        lines += [VERDICT, "-" * len(VERDICT)]
        wrong = [line for name, doubt in doubts(report).items() for line in _wrapped("  ", f"{name}: {doubt}")]
        lines += wrong or ["  nothing"]
    return "\n".join(lines).rstrip("\n") + "\n"


def size(nbytes: float) -> str:
    """``"23.4 GiB"``; bytes are scaled by 1024."""
    for unit in ("B", "KiB", "MiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} GiB"
