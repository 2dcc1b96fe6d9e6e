"""Traces that ui.perfetto.dev and chrome://tracing open (the JSON form of the Trace Event Format)."""

import errno
import functools
import gzip
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO


class TraceFile:
    """Write a trace event by event, compressed as .gz; the file appears, whole, if the context ends without error."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._hidden = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        self._file: TextIO
        self._first = True

    def __enter__(self) -> "TraceFile":
        start: Any = functools.partial(gzip.open, compresslevel=5) if self.path.suffix == ".gz" else open
        self._file = start(self._hidden, "wt", encoding="utf-8")
        self._file.write('{"displayTimeUnit":"ms","traceEvents":[')
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            with self._file:
                self._file.write("\n]}\n")
            if error is None:
                os.replace(self._hidden, self.path)
        finally:
            self._hidden.unlink(missing_ok=True)

    def add(self, event: Mapping[str, Any]) -> None:
        self._file.write(("\n" if self._first else ",\n") + json.dumps(event, separators=(",", ":")))
        self._first = False

    def process(self, number: int, title: str, rows: Sequence[str], **facts: Any) -> None:
        """Add a process with that ``title`` and ``rows`` from the top; events name rows by position."""
        self.add({"ph": "M", "name": "process_name", "pid": number, "args": {"name": title}})
        self.add({"ph": "M", "name": "process_sort_index", "pid": number, "args": {"sort_index": number}})
        for order, name in enumerate(rows):
            row = {"ph": "M", "pid": number, "tid": order}
            self.add({**row, "name": "thread_name", "args": {"name": name}})
            self.add({**row, "name": "thread_sort_index", "args": {"sort_index": order}})
        if facts:
            self.add({"ph": "M", "name": "process_labels", "pid": number, "args": facts})

    def span(
        self, process: int, row: int, name: str, kind: str, begin_us: float, us: float, args: Mapping[str, Any]
    ) -> None:
        """Add an event that lasts: its begin in microseconds since the begin of the trace, and its duration."""
        event = {"ph": "X", "pid": process, "tid": row, "name": name, "cat": kind}
        self.add({**event, "ts": round(begin_us, 3), "dur": round(us, 3), **({"args": args} if args else {})})

    def instant(self, process: int, row: int, name: str, kind: str, at_us: float, args: Mapping[str, Any]) -> None:
        """Add an event at one moment."""
        event = {"ph": "i", "s": "t", "pid": process, "tid": row, "name": name, "cat": kind, "ts": round(at_us, 3)}
        self.add({**event, "args": args} if args else event)


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise OSError where a trace could not be written; makes the folder. Called long before a trace is written."""
    file = Path(path).absolute()
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    hidden = file.with_name(f".{file.name}.{os.getpid()}")
    hidden.touch()
    hidden.unlink()


def lanes(spans: Iterable[tuple[float, float]]) -> list[int]:
    """Return a lane for each (begin, end), in order of begins: the first lane free by then, of as many as needed."""
    free: list[float] = []
    taken = []
    for begin, end in spans:
        lane = next((i for i, until in enumerate(free) if until <= begin), len(free))
        free[lane : lane + 1] = [end]
        taken.append(lane)
    return taken
