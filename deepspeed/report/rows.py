"""The shape of the report: sections of rows. A row may carry a doubt: why its value matters and what to do."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple


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


def gather(title: str, probes: Iterable[tuple[str, Probe]]) -> Section:
    """Run the named ``probes``; one that fails becomes a row ``unknown (reason)``, whatever it raised."""
    rows: list[Row] = []
    for name, probe in probes:
        try:
            found = probe()
        except Exception as error:
            found = Row(name, f"unknown ({first_line(error)})")
        rows += [found] if isinstance(found, Row) else found
    return Section(title, tuple(rows))


def doubts(sections: Iterable[Section]) -> list[Row]:
    """The rows that carry a doubt, in order."""
    return [row for section in sections for row in section.rows if row.doubt]


def as_json(sections: Iterable[Section]) -> dict[str, Any]:
    """Section title -> row name -> value."""
    return {section.title: {row.name: row.value for row in section.rows} for section in sections}


def size(nbytes: float) -> str:
    """``"23.4 GiB"``; bytes are scaled by 1024."""
    for unit in ("B", "KiB", "MiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} GiB"
