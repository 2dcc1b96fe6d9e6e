"""A run in the terminal: as lines of text, drawn anew while it goes on."""

import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from deepspeed.monitor.program import columns, say, size
from deepspeed.monitor.runfile import Record, Run
from deepspeed.tools.report.run.page import facts, numbers, other_warnings

_BARS = " .:-=+*#%@"
_LAST = 50  # updates that medians are of
_SHOWN_RANKS, _SHOWN_WARNINGS = 16, 4
_CLEAR = "\x1b[H\x1b[J"
_GLANCE_S = 1.0


def spark(values: Sequence[float], width: int) -> str:
    """Return the last ``width`` values as characters, from light (the least) to dark."""
    values = values[-width:]
    low, high = min(values, default=0.0), max(values, default=0.0)
    room = (high - low) or 1.0
    return "".join(_BARS[round((value - low) / room * (len(_BARS) - 1))] for value in values)


def ranks_table(state: Record, now: float) -> list[str]:
    """Return a table of how fast each rank is, slowest first; ``state`` as in ``ranks.json``."""
    rows: list[tuple[str, ...]] = [("rank", "host", "update", "work", "p95", "waits", "p95", "memory", "", "")]
    slow = state.get("slow") or {}
    states: list[dict[str, Any]] = sorted(state.get("ranks") or [], key=lambda s: -s["work"][0])
    for s in states[:_SHOWN_RANKS]:
        memory = s.get("memory") or {}
        times = [f"{value:.1f} ms" for value in (*s["work"], *s["wait"])]
        bytes_ = size(memory.get("device_peak", memory.get("host", 0)))
        word = f"SLOW: {slow[str(s['rank'])]:.2f} x the median rank" if str(s["rank"]) in slow else ""
        rows.append((str(s["rank"]), str(s.get("host", "")), str(s["step"]), *times, bytes_, "", word))
    lines = columns(rows, left=2)
    if len(states) > _SHOWN_RANKS:
        lines.append(f"and {len(states) - _SHOWN_RANKS} ranks that do less work")
    if missing := int(state.get("of", len(states))) - len(states):
        lines.append(f"ranks that have not told of themselves yet: {missing}")
    age = now - float(state.get("time", now))
    return [*lines, f"as of {age:.0f} s ago" if age >= 2 else "now"]


def job_text(run: Run) -> str:
    state = run.ranks
    if not state.get("ranks"):
        return f"{run.folder}: no rank has told of itself yet"
    return "\n".join([f"{run.of('start')[-1].get('model')} in {run.folder}", *ranks_table(state, time.time())])


def view(run: Run, width: int) -> str:
    """Return one picture of the run."""
    steps = run.updates
    lines = [f"{name:<24}{value}"[:width] for name, value in facts(run)]
    recent = steps[-_LAST:]
    for name, title, unit in (
        ("total_ms", "step", "ms"),
        ("wait_ms", "waits for other ranks", "ms"),
        ("loss", "loss", ""),
        ("grad_norm", "gradient norm", ""),
        ("lr", "learning rate", ""),
    ):
        if values := numbers(steps, name):
            middle = statistics.median_high(numbers(recent, name) or [0.0])
            words = f"last {values[-1]:.5g} {unit}, median of {len(recent)} {middle:.5g} {unit}"
            lines.append(f"{title:<24}{words:<44} {spark(values, max(8, width - 72))}")
    if steps and (memory := steps[-1].get("memory")):
        lines.append(f"{'memory of rank 0':<24}" + ", ".join(f"{tier} {size(n)}" for tier, n in memory.items() if n))
    if len((state := run.ranks).get("ranks") or []) > 1:
        lines += ["", *ranks_table(state, time.time())]
    for line in [*run.of("slow"), *other_warnings(run)][-_SHOWN_WARNINGS:]:
        lines.append(f"! {line.get('text')}".replace("\n", " ")[:width])
    return "\n".join(lines)


def follow(run: Run) -> int:
    """Show the run until it ends or Ctrl-C; without a terminal, once."""
    terminal = sys.stdout.isatty()
    while True:
        width = shutil.get_terminal_size().columns
        say((_CLEAR if terminal else "") + view(run, width))
        sys.stdout.flush()
        if run.over or not terminal:
            return 0
        time.sleep(_GLANCE_S)
        run.read_on()
