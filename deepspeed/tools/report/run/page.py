"""The record of a run as one HTML page, which needs nothing else: no network, no script, no other file."""

import datetime
import statistics
from collections.abc import Iterable, Sequence
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from deepspeed.errors import counted
from deepspeed.monitor.program import size
from deepspeed.monitor.runfile import Record, Run
from deepspeed.tools.report.run.figures import Bars, Curve, Figure, draw, draw_bars

_STYLE = Path(__file__).with_name("page.css")
_PHASES = ("forward", "backward", "step")
# Of the monitor's names those that the record has by itself.
_SHOWN = ("lr", "train_loss", "loss_scale", "grad_norm", "memory_", "states_", "elapsed_time_ms_", "slow_rank")
_SHOWN_TIMES = ("communication_ms", "exposed_communication_ms")
_MIB = 2**20
_NOT_DRAWN = '<p class="bad">The figures are missing: they are drawn by matplotlib. pip install matplotlib</p>'
_MOST_ROWS, _MOST_RANKS, _MOST_METRICS = 200, 32, 24


def _points(steps: Iterable[Record], *names: str, factor: float = 1.0) -> list[tuple[float, float]]:
    """Return (update, value) where the value, by its path of names, is a number."""
    points = []
    for step in steps:
        value: Any = step
        for name in names:
            value = value.get(name) if isinstance(value, dict) else None
        if isinstance(value, (int, float)) and isinstance(step.get("step"), int):
            points.append((float(step["step"]), value * factor))
    return points


def numbers(steps: Iterable[Record], name: str) -> list[float]:
    """Return the values of ``name`` that are numbers."""
    return [value for _, value in _points(steps, name)]


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0


def figures(run: Run) -> list[Figure]:
    """Return figures of all curves that the record has values for."""
    steps, start = run.updates, run.of("start")[-1]
    saved = [(float(c["step"]), f"checkpoint: {c['seconds']:.2f} s") for c in run.of("checkpoint") if "step" in c]
    skips = [(float(step["step"]), "left out: not finite") for step in steps if step.get("skipped")]
    times = [Curve({"step": "update"}.get(n, n), _points(steps, f"{n}_ms")) for n in _PHASES]
    times += [Curve("outside (data, logs)", _points(steps, "other_ms"))]
    times += [Curve("of all: waits for other ranks", _points(steps, "wait_ms"), dashed=True)]
    sent = [Curve("under way", _points(steps, "communication_ms")), Curve("waited for", _points(steps, "wait_ms"))]
    made = [
        Figure("Time of a step", "ms", times, stacked=True, marks=saved),
        Figure("Communication: hidden where the curves differ", "ms", sent),
        Figure("Memory of rank 0 per tier, and the plan for its states", "MiB", _memory(steps, start)),
        Figure("Loss (mean of the micro-batches of rank 0)", "loss", [Curve("loss", _points(steps, "loss"))]),
        Figure("Norm of all gradients", "L2 norm", _norms(steps), log=True),
        Figure("Learning rate (first group)", "rate", [Curve("lr", _points(steps, "lr"))]),
        Figure("Loss scale", "scale", [Curve("loss scale", _points(steps, "loss_scale"))], log=True, marks=skips),
    ]
    uses = Curve("uses of units that were not here in time", _misses(steps))
    made.append(Figure("Fetched ahead: misses", "%", [uses]))
    return [figure for figure in [*made, *_metrics(steps)] if not figure.empty]


def _memory(steps: list[Record], start: Record) -> list[Curve]:
    lines = []
    names = {"device": "device", "device_peak": "device, peak", "host": "host (whole process)", "drive": "drive"}
    for tier, name in names.items():
        points = _points(steps, "memory", tier, factor=1 / _MIB)
        if any(value for _, value in points):
            lines.append(Curve(name, points))
    ends = [float(s["step"]) for s in (steps[0], steps[-1])] if steps else []
    for tier, nbytes in (start.get("plan") or {}).items():
        if nbytes and ends:
            lines.append(Curve(f"plan: states on {tier}", [(x, nbytes / _MIB) for x in ends], dashed=True))
    return lines


def _norms(steps: list[Record]) -> list[Curve]:
    before, after = (_points(steps, name) for name in ("grad_norm", "grad_norm_clipped"))
    return [Curve("before clipping", before), Curve("after clipping", after if after != before else [])]


def _misses(steps: list[Record]) -> list[tuple[float, float]]:
    hits, misses = (dict(_points(steps, f"prefetch_{name}")) for name in ("hits", "misses"))
    uses = {at: hits.get(at, 0.0) + missed for at, missed in misses.items()}
    return [(at, 100 * misses[at] / total) for at, total in uses.items() if total]


def _metrics(steps: list[Record]) -> list[Figure]:
    """Return figures of the monitor's other metrics."""
    names = sorted({name for step in steps for name in step.get("metrics") or {}})
    names = [n for n in names if not n.rpartition("/")[2].startswith(_SHOWN + _SHOWN_TIMES)][:_MOST_METRICS]
    return [Figure(name, name.rpartition("/")[2], [Curve(name, _points(steps, "metrics", name))]) for name in names]


def table(rows: Sequence[Sequence[str]], head: Sequence[str] = (), numbers: Sequence[int] = ()) -> str:
    """Return an HTML table of texts, escaped; the columns ``numbers`` end at their right edge."""

    def cell(tag: str, position: int, text: str) -> str:
        kind = ' class="n"' if position in numbers else ""
        return f"<{tag}{kind}>{escape(text)}</{tag}>"

    def line(cells: Sequence[str], tag: str) -> str:
        return f"<tr>{''.join(cell(tag, i, text) for i, text in enumerate(cells))}</tr>"

    return f"<table>{line(head, 'th') if head else ''}{''.join(line(row, 'td') for row in rows)}</table>"


def _when(seconds: Any) -> str:
    return datetime.datetime.fromtimestamp(float(seconds), datetime.timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


def facts(run: Run) -> list[tuple[str, str]]:
    """Return the run in a few rows."""
    start, steps = run.of("start")[-1], run.updates
    whole, waits = _median(numbers(steps, "total_ms")), _median(numbers(steps, "wait_ms"))
    flight = _median(numbers(steps, "communication_ms"))
    batch = start.get("batch") or [0, 0, 0]
    units = counted(start.get("units", 0), "unit")
    rate = f", {batch[0] / whole * 1e3:,.0f} samples/s" if whole else ""
    last = steps[-1] if steps else {}
    error = run.of("end")[-1].get("error") if run.over else None
    ended = f"has ended with {error}" if error else "has ended"
    state = ended if run.over else "goes on, or was killed: there is no last line"
    times = f", started {len(run.of('start'))} times" if len(run.of("start")) > 1 else ""
    rows = [
        ("model", f"{start.get('model')}, {start.get('parameters', 0):,} parameters in {units}"),
        ("ranks", f"{start.get('ranks')} ({start.get('device')}), ZeRO {start.get('zero')}, {start.get('dtype')}"),
        ("batch", f"{batch[0]} samples = {batch[1]} x {batch[2]} micro-batches x data-parallel ranks"),
        ("optimizer", str(start.get("optimizer"))),
        ("versions", f"deepspeed {start.get('version')}, torch {start.get('torch')}"),
        ("begun", f"{_when(start.get('time', 0))}{times}"),
        ("state", f"{state}; last update {last.get('step', '-')}, {_when(last.get('time', start.get('time', 0)))}"),
        ("step", f"{whole:.1f} ms (median){rate}"),
    ]
    if whole:
        hidden = f", of {flight:.1f} ms under way: {1 - waits / flight:.0%} hidden" if flight else ""
        rows.append(("waits for other ranks", f"{waits:.1f} ms a step, {waits / whole:.1%}{hidden}"))
    skipped = sum(int(step.get("skipped") or 0) for step in steps)
    rows += [("updates left out", str(skipped))] if skipped else []
    if odd := [step for step in steps if isinstance(step.get("loss"), str)]:  # what is not finite is a text
        rows.append(("loss not finite", f"{len(odd)} times, first at update {odd[0]['step']}: {odd[0]['loss']}"))
    rows += [("damaged lines of the record", str(run.damaged))] if run.damaged else []
    return rows


def rank_bars(run: Run) -> Bars | None:
    """Return bars of the work and waits of every rank, or of many ranks the slowest and the fastest."""
    lines = run.of("ranks")
    states = (lines[-1] if lines else run.ranks).get("ranks") or []
    rows = [(f"rank {s['rank']}", [tuple(s["work"]), tuple(s["wait"])]) for s in states]
    if len(rows) > _MOST_RANKS:
        rows = sorted(rows, key=lambda row: -row[1][0][0])
        rows = [*rows[: _MOST_RANKS - 4], *rows[-4:]]
    title = "Work and waits of each rank: median (and 95th percentile) of its last steps"
    return Bars(title, "ms a step", ("its own work", "waits for others"), rows) if len(rows) > 1 else None


def _checkpoints(run: Run) -> str:
    rows = [
        (
            *(str(c.get("step")), f"{c.get('seconds', 0):.3f} s", f"{c.get('until_named_s', 0):.3f} s"),
            *(size(c.get("bytes", 0)), "in the background" if c.get("in_background") else "", str(c.get("path"))),
        )
        for c in run.of("checkpoint")[-_MOST_ROWS:]
    ]
    head = ("update", "training stood still", "until it had its name", "size", "", "path")
    return table(rows, head, (0, 1, 2, 3)) if rows else '<p class="quiet">none</p>'


def other_warnings(run: Run) -> list[Record]:
    """Return all warnings but those of slow ranks, which have lines of their own."""
    slow = {line.get("text") for line in run.of("slow")}
    return [line for line in run.of("warning") if line.get("text") not in slow]


def _warnings(run: Run) -> str:
    slow = "".join(f'<p class="bad">{escape(str(line.get("text")))}</p>' for line in run.of("slow"))
    lines = other_warnings(run)
    rows = [(_when(w["time"]), str(w.get("level", "")), str(w.get("where", "")), str(w.get("text"))) for w in lines]
    more = f"<p>and {len(rows) - _MOST_ROWS} more</p>" if len(rows) > _MOST_ROWS else ""
    return slow + (table(rows[:_MOST_ROWS]) + more if rows else "" if slow else '<p class="quiet">none</p>')


def _drawn(run: Run) -> str:
    curves, bars = "".join(draw(figure, i) for i, figure in enumerate(figures(run))), rank_bars(run)
    ranks = f'<h2>Ranks</h2><div class="figures">{draw_bars(bars, 99)}</div>' if bars else ""
    over_time = (
        f'<h2>Over time</h2><div class="figures">{curves}</div>' if curves else "<p>No update has ended yet.</p>"
    )
    return over_time + ranks


def page(run: Run) -> str:
    title = escape(f"{run.of('start')[-1].get('model')} in {run.folder}")
    parts = [
        f"<h1>{title}</h1>{table(facts(run))}{_drawn(run) if find_spec('matplotlib') else _NOT_DRAWN}",
        f"<h2>Warnings</h2>{_warnings(run)}<h2>Checkpoints</h2>{_checkpoints(run)}",
    ]
    window = '<meta name="viewport" content="width=device-width"/>'
    head = f'<meta charset="utf-8"/>{window}<title>{title}</title><style>{_STYLE.read_text()}</style>'
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'
