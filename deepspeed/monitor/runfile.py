"""The record of a run: ``run.jsonl`` in a folder, one JSON object a line, appended to; written by rank 0.

Each line has ``kind`` and ``time`` (seconds since 1970). ``start`` comes first, and again when a job goes on: its
``format``, and what runs where. ``step``: the updates up to ``step``, ``steps`` of them since the last such line, with
means a step in milliseconds, how many of them were ``skipped``, and the last values of all else. ``checkpoint``,
``warning``, ``slow`` (a rank), ``metrics`` (what the monitor gets), ``ranks`` (how fast each is) and ``end`` are what
they say. ``ranks.json`` beside it is replaced: the state of every rank now.
"""

import contextlib
import fcntl
import json
import math
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepspeed.errors import UsageError

FORMAT = "deepspeed-run/1"
RECORDS, RANKS = "run.jsonl", "ranks.json"
_EVERY_LINE = 1000  # lines of steps that are written one for each step
_LEAST_S, _LINES = 0.2, 20_000  # later lines are as far apart as this, and as a run's age divided by that
_MOST_WARNINGS = 1000

Record = dict[str, Any]


def _clean(value: Any) -> Any:
    """Return ``value`` as strict JSON allows it: numbers that are not finite become texts, others are rounded."""
    if isinstance(value, dict):
        return {str(name): _clean(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(item) for item in value]
    if isinstance(value, float):
        if not math.isfinite(value):
            return str(value)
        return float(f"{value:.7g}") if abs(value) < 1e6 else round(value, 3)
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


class RunFile:
    """Append to the record in ``folder``, which is made. Raises UsageError where that fails.

    Lines that cannot be written later, as when a disk is full, are left out: ``fault`` is the first reason.
    """

    def __init__(self, folder: str | os.PathLike[str], facts: Record) -> None:
        self._folder, self._begun = Path(folder), time.monotonic()
        self.fault: OSError | None = None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._whole = _ends_with_a_line(self._folder / RECORDS)  # else a run was killed while it wrote
            self._file = open(self._folder / RECORDS, "ab", buffering=0)  # noqa: SIM115 - see ``close``
        except OSError as error:
            raise UsageError(f"observe.run {str(folder)!r} cannot be written: {error}. Name another folder") from error
        alone = _claim(self._file.fileno())
        self._lines = self._warnings = 0
        self._last_s, self._sums = -math.inf, _StepSums()
        self.write("start", format=FORMAT, **facts)
        if not alone:
            text = f"observe.run: another process or engine writes to {self._folder / RECORDS} too, and both get mixed"
            self.write("warning", level="WARNING", text=f"{text}. Name a folder for each")

    def write(self, kind: str, **facts: Any) -> None:
        """Write one line, which is on its way to the disk when this returns."""
        if kind == "warning":
            self._warnings += 1
            if self._warnings > _MOST_WARNINGS:
                return
        text = json.dumps(_clean({"kind": kind, "time": time.time(), **facts})) + "\n"
        line = (text if self._whole else "\n" + text).encode()
        try:
            written = self._file.write(line)
        except OSError as error:
            self.fault = self.fault or error
        else:
            self._whole = written == len(line)

    def step(self, means: Record, last: Record, sampled: Record | None = None) -> None:
        """Add an update: ``means``, and ``sampled`` ones of some updates, are averaged for the next line."""
        self._sums.add(means, last, sampled or {})
        now = time.monotonic()
        apart = 0.0 if self._lines < _EVERY_LINE else max(_LEAST_S, (now - self._begun) / _LINES)
        if now - self._last_s >= apart:
            self._last_s = now
            self._end_steps()

    def _end_steps(self) -> None:
        if self._sums.count:
            self._lines += 1
            sums, self._sums = self._sums, _StepSums()
            self.write("step", steps=sums.count, **sums.last, **sums.means())

    def ranks(self, state: Record) -> None:
        """Replace the file of the ranks' state."""
        hidden = self._folder / f".{RANKS}.{os.getpid()}"
        try:
            hidden.write_text(json.dumps(_clean(state)), encoding="utf-8")
            os.replace(hidden, self._folder / RANKS)
        except OSError as error:
            self.fault = self.fault or error
            with contextlib.suppress(OSError):
                hidden.unlink()

    def close(self, error: str = "") -> None:
        """Write the last lines and close the file; ``error``: what ended the run."""
        self._end_steps()
        self.write("end", **({"error": error} if error else {}))
        self._file.close()


class _StepSums:
    """Accumulate several steps into one line."""

    def __init__(self) -> None:
        self.count, self.last = 0, Record()
        self._totals, self._samples = dict[str, float](), dict[str, float]()
        self._sampled = 0  # of how many the samples are: one stands for those since the last, too

    def add(self, means: Record, last: Record, sampled: Record) -> None:
        self.count += 1
        skipped = int(self.last.get("skipped", 0)) + int(last.get("skipped", 0))
        self.last |= last | ({"skipped": skipped} if "skipped" in last else {})
        for name, value in means.items():
            self._totals[name] = self._totals.get(name, 0.0) + value
        for name, value in sampled.items():
            self._samples[name] = self._samples.get(name, 0.0) + value * (self.count - self._sampled)
        self._sampled = self.count if sampled else self._sampled

    def means(self) -> Record:
        means = {name: total / self.count for name, total in self._totals.items()}
        return means | {name: total / self._sampled for name, total in self._samples.items()}


def _claim(file: int) -> bool:
    """Lock the open ``file``; return False where another process or engine has done so, as far as the system knows."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return not isinstance(error, BlockingIOError)
    return True


def _ends_with_a_line(path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"
    return True


@dataclass
class Run:
    """Hold a record by kind, in order of time. ``damaged``: unreadable lines; ``place``: offset of the next line."""

    folder: Path
    by_kind: dict[str, list[Record]] = field(default_factory=dict)
    damaged: int = 0
    over: bool = False
    place: int = 0

    def of(self, kind: str) -> list[Record]:
        return self.by_kind.get(kind, [])

    @property
    def updates(self) -> list[Record]:
        """Return the lines of updates; where a job resumed from a checkpoint and repeated updates, the last ones."""
        kept: list[Record] = []
        for line in self.of("step"):
            if isinstance(number := line.get("step"), int):
                while kept and kept[-1]["step"] >= number:
                    kept.pop()
                kept.append(line)
        return kept

    @property
    def ranks(self) -> Record:
        """Return the state of every rank as last written; empty before that."""
        with contextlib.suppress(OSError, ValueError):
            state = json.loads((self.folder / RANKS).read_text(encoding="utf-8"))
            return state if isinstance(state, dict) else {}
        return {}

    def read_on(self) -> bool:
        """Take in what was appended; return whether there was anything. A line that is not complete yet waits."""
        with open(self.folder / RECORDS, "rb") as file:
            file.seek(self.place)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        for line in whole.splitlines():
            self._take(line)
        self.place += len(whole)
        return bool(whole)

    def _take(self, line: bytes) -> None:
        try:
            record = json.loads(line)
            kind = record["kind"]
        except (ValueError, TypeError, KeyError, RecursionError):
            self.damaged += bool(line.strip())
            return
        self.over = kind == "end"
        self.by_kind.setdefault(str(kind), []).append(record)


def read_run(folder: str | os.PathLike[str]) -> Run:
    """Read the record in ``folder``. UsageError, in a sentence, where there is none, or none of this format."""
    run = Run(Path(folder))
    asks = 'A run writes one with "observe": {"run": FOLDER} in its configuration'
    if not run.folder.is_dir():
        raise UsageError(f"{folder} is no folder. {asks}")
    if not (run.folder / RECORDS).is_file():
        raise UsageError(f"{folder} holds no record of a run ({RECORDS}). {asks}")
    run.read_on()
    starts = run.of("start")
    if not starts:
        text = "only a line that is not complete yet" if not run.damaged and run.place == 0 else "no line of a start"
        size = (run.folder / RECORDS).stat().st_size
        text = text if size else "nothing yet"
        raise UsageError(f"{run.folder / RECORDS} holds {text}: the run has just begun, or another program wrote it")
    if (stored := starts[0].get("format")) != FORMAT:
        raise UsageError(f"{run.folder / RECORDS} has the format {stored!r}; this release reads {FORMAT!r}")
    return run
