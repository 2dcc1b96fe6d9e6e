"""The record of a run and its page: whole lines, sentences for what is none, numbers that are those of the record, and
a page that stands alone.
"""

import gzip
import json
import math
import os
import pty
import re
import signal
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from deepspeed.errors import UsageError
from deepspeed.monitor.pace import Pace, PaceSpread, RankPace, slow_ranks, tail
from deepspeed.monitor.runfile import FORMAT, RECORDS, Run, RunFile, _StepSums, read_run
from deepspeed.profiling.timeline.board import Board
from deepspeed.profiling.timeline.collect import on_first_clock, rows_of
from deepspeed.profiling.timeline.spans import COLLECTIVES, PHASES, WAITS, MarkClock, StepSpans, union_ns
from deepspeed.profiling.timeline.tracefile import TraceFile, lanes
from deepspeed.tools.report.cli import main
from deepspeed.tools.report.run.figures import COLORS, Curve, Figure, draw, short, thinned
from deepspeed.tools.report.run.live import spark
from deepspeed.tools.report.run.page import facts, figures, page

FACTS = {"model": "Net <b>", "parameters": 10, "units": 2, "ranks": 2, "batch": [8, 2, 2], "device": "cpu"}
PLAN = {"device": 0, "host": 3 << 20, "drive": 0}
MOST_BYTES = 3_000_000
_SVG = "{http://www.w3.org/2000/svg}"


def _pace(rank: int, work: float, *, steps: int = 5) -> RankPace:
    return RankPace(rank, 10, steps, PaceSpread(work, 2 * work), PaceSpread(1.0, 2.0), "host")


def _run(folder: Path, updates: int = 40) -> Path:
    file = RunFile(folder, FACTS | {"plan": PLAN})
    for n in range(1, updates + 1):
        times = {"total_ms": 10.0 + n, "forward_ms": 3.0, "backward_ms": 5.0, "step_ms": 1.0, "other_ms": 1.0 + n}
        times |= {"wait_ms": 2.0, "communication_ms": 4.0, "prefetch_hits": 9.0, "prefetch_misses": 1.0}
        last = {"step": n, "loss": 1 / n, "grad_norm": 2.0, "grad_norm_clipped": 1.0, "lr": 0.1, "loss_scale": 2.0**n}
        file.step(times, last | {"memory": {"host": 5 << 20, "drive": 0}, "metrics": {"Train/mfu": 0.4}})
    file.write("checkpoint", step=7, seconds=0.5, until_named_s=1.5, bytes=1 << 20, path="/x/<y>", in_background=True)
    file.write("warning", level="WARNING", text="<script>alert(1)</script>", where="a.py:3")
    ranks = [{"rank": r, "step": 5, "work": [r + 1.0, r + 2.0], "wait": [1, 2], "host": "h"} for r in (0, 1)]
    file.write("slow", rank=1, times=2.0, text="rank 1 (h) is slow")
    file.write("ranks", ranks=ranks, slow={"1": 2.0})
    file.ranks({"time": 0.0, "of": 3, "ranks": ranks, "slow": {"1": 2.0}})
    file.close()
    return folder


def _recorded(folder: Path, updates: list[dict[str, Any]]) -> Run:
    file = RunFile(folder, FACTS)
    for last in updates:
        file.step({"total_ms": 9.0, "forward_ms": 4.0, "backward_ms": 5.0}, last)
    file.close()
    return read_run(folder)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are not drawn, which takes seconds; the numbers of their curves are collected."""
    monkeypatch.setattr("deepspeed.tools.report.run.page.draw", lambda figure, *_: "")


def test_a_rank_whose_own_work_takes_longer_is_slow_and_one_that_others_delay_is_not() -> None:
    paces = {0: _pace(0, 10), 1: _pace(1, 10), 2: _pace(2, 13), 3: _pace(3, 11)}
    assert [s.pace.rank for s in slow_ranks(paces, ranks=4, factor=1.2, steps=5)] == [2]
    assert not slow_ranks(paces, ranks=5, factor=1.2, steps=5), "a rank has not told of itself"
    assert not slow_ranks(paces | {3: _pace(3, 11, steps=4)}, ranks=4, factor=1.2, steps=5), "too soon"
    two = slow_ranks({0: _pace(0, 10), 1: _pace(1, 30)}, ranks=2, factor=1.2, steps=5)
    assert [(s.pace.rank, s.times) for s in two] == [(1, 3.0)], "of two the faster one is the measure"
    assert "rank 1 (host) is slow" in two[0].text() and "3.00 times" in two[0].text()


def test_pace_is_of_the_last_steps() -> None:
    pace = Pace(20)
    for n in range(100):
        pace.add(float(n), 1.0)
    assert pace.steps == 20 and pace.work == PaceSpread(89.5, 98.0)
    assert tail([3.0, 1.0, 2.0], 0.5) == 2.0 and tail([]) == 0.0 and tail([4.0]) == 4.0


def test_a_step_is_its_phases_and_the_rest_and_overlapping_waits_count_once() -> None:
    step = StepSpans(MarkClock(), 0, 4)
    step.add(PHASES, "forward", 1_000_000, 4_000_000)
    step.add(WAITS, "a", 1_000_000, 3_000_000)
    step.add(WAITS, "b", 2_000_000, 3_500_000)
    step.add(COLLECTIVES, "all_gather", 500_000, 3_000_000)
    step.add(COLLECTIVES, "no room", 0, 1)
    step.end = 10_000_000
    times = step.summary()
    assert step.known() and step.left_out == 1
    assert (times["total_ms"], times["forward_ms"], times["other_ms"]) == (10.0, 3.0, 7.0)
    assert (times["wait_ms"], times["communication_ms"]) == (2.5, 3.0)
    assert union_ns([]) == 0 and union_ns([(0, 2), (1, 3), (5, 6)]) == 4


class _Device:
    """A clock of a device that has come as far as ``at``; its marks are numbers of its own."""

    def __init__(self) -> None:
        self.at = 0.0

    def known(self, mark: float) -> bool:
        return mark <= self.at

    def between_ns(self, begin: float, end: float) -> int:
        assert max(begin, end) <= self.at, "the device has not been there yet"
        return round((end - begin) * 1e6)

    mark = sync = None


def test_spans_of_a_device_are_read_once_it_has_passed_them() -> None:
    clock = _Device()
    step = StepSpans(clock, 1.0, 9)  # type: ignore[arg-type]
    step.add(WAITS, "gather", 2.0, 4.0)
    step.end = 5.0
    assert not step.known()
    clock.at = 5.0
    assert step.known() and step.summary()["wait_ms"] == 2.0
    step.add(COLLECTIVES, "on a side stream", 3.0, 6.0)
    assert not step.known(), "a side stream is behind"
    clock.at = 6.0
    rows = [*rows_of([step], clock, (1.0, 7_000_000), ((1_000, 0), (1_000, 1)))]  # type: ignore[arg-type]
    assert rows[1][2:4] == (7_999_000, 2_000_000), "one millisecond after the base, by the first rank's clock"


def test_clocks_that_drift_are_compared_at_both_ends() -> None:
    assert on_first_clock(1_000, (100, 0), (100, 2_000)) == 900
    assert on_first_clock(1_000, (100, 0), (200, 2_000)) == 850
    assert on_first_clock(1_000, (100, 5), (100, 5)) == 900


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_a_trace_appears_whole_or_not_at_all(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with pytest.raises(ZeroDivisionError), TraceFile(path) as file:
        file.process(0, "rank 0", ["a"])
        raise ZeroDivisionError
    assert not [*tmp_path.iterdir()]
    with TraceFile(path) as file:
        file.process(0, "rank 0", ["a", "b"])
        file.span(0, 1, "x", "kind", 1.5, 2.0, {"bytes": 3})
        file.instant(0, 0, "y", "kind", 1.0, {})
        assert not path.exists()
    assert [p.name for p in tmp_path.iterdir()] == [name]
    content = path.read_bytes()
    events = json.loads(gzip.decompress(content) if name.endswith("gz") else content)["traceEvents"]
    assert [e["name"] for e in events if e["ph"] != "M"] == ["x", "y"]
    assert events[-2] | {"ts": 1.5, "dur": 2.0, "args": {"bytes": 3}} == events[-2]


def test_what_overlaps_gets_a_row_of_its_own() -> None:
    assert lanes([(0, 2), (1, 3), (2, 4), (5, 6)]) == [0, 1, 0, 0]


def test_the_record_keeps_every_update_of_a_short_run_and_averages_later_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deepspeed.monitor.runfile._EVERY_LINE", 10)
    monkeypatch.setattr("deepspeed.monitor.runfile._LEAST_S", 3600.0)
    steps = read_run(_run(tmp_path / "a", 40)).of("step")
    assert [s["step"] for s in steps[:10]] == [*range(1, 11)] and len(steps) == 11
    assert steps[10]["steps"] == 30 and steps[10]["step"] == 40
    assert steps[10]["total_ms"] == pytest.approx(10 + sum(range(11, 41)) / 30)


def test_a_killed_run_leaves_a_record_that_a_later_one_goes_on_with(tmp_path: Path, undrawn: None) -> None:
    path = _run(tmp_path) / RECORDS
    whole = path.read_bytes()
    path.write_bytes(whole[:-30])
    run = read_run(tmp_path)
    assert not run.over and not run.damaged and len(run.of("step")) == 40
    _run(tmp_path, 2)
    run = read_run(tmp_path)
    assert run.over and run.damaged == 1 and len(run.of("start")) == 2 and len(run.of("step")) == 42
    assert "started 2 times" in page(run) and "damaged lines" in page(run)


def test_a_record_is_followed_line_by_line(tmp_path: Path) -> None:
    path = _run(tmp_path) / RECORDS
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:3]))
    run = read_run(tmp_path)
    path.write_bytes(b"".join(lines[:5]) + lines[5][:9])
    assert run.read_on() and len(run.of("step")) == 4
    path.write_bytes(b"".join(lines))
    assert run.read_on() and len(run.of("step")) == 40 and run.over and not run.read_on() and not run.damaged


@pytest.mark.parametrize(
    "content, sentence",
    [
        (None, "holds no record of a run"),
        (b"", "holds nothing yet"),
        (b'{"kind": "start", "for', "a line that is not complete yet"),
        (b'{"a": 1}\n', "no line of a start"),
        (b"\x00\xff\n", "no line of a start"),
        (b'{"kind": "start", "format": "else/9"}\n', "the format 'else/9'"),
        (b"[" * 100_000 + b"\n", "no line of a start"),
    ],
)
def test_what_is_no_record_is_said_in_a_sentence(
    tmp_path: Path, content: bytes | None, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / RECORDS).write_bytes(content)
    with pytest.raises(UsageError, match=re.escape(sentence)):
        read_run(tmp_path)
    for words in (["run", str(tmp_path)], ["run", str(tmp_path), "--follow"], ["--job", str(tmp_path)]):
        assert main(words) == 2
        error = capsys.readouterr().err
        assert sentence in error and "Traceback" not in error
    assert main(["run", str(tmp_path / "none")]) == 2
    assert "is no folder" in capsys.readouterr().err


ODD_LINES: list[dict[str, object]] = [
    {"kind": "start", "format": FORMAT, "batch": "many", "parameters": "x"},
    {"kind": "start", "format": FORMAT, "plan": 5, "time": "now"},
    {"kind": "checkpoint", "step": "first", "seconds": "long"},
    {"kind": "warning"},
    {"kind": "ranks", "ranks": [{"rank": 0}, 7]},
    {"kind": "step", "step": 41, "metrics": 5, "memory": [1], "loss": {}, "skipped": "yes"},
    {"kind": "slow"},
    {"kind": "step", "step": 41, "time": 1e300},
]


def test_lines_of_another_schema_are_shown_or_said_in_a_sentence(
    tmp_path: Path, undrawn: None, capsys: pytest.CaptureFixture[str]
) -> None:
    record = _run(tmp_path) / RECORDS
    whole = record.read_bytes()
    for line in ODD_LINES:
        record.write_bytes(before := whole + json.dumps(line).encode() + b"\n")
        (tmp_path / "ranks.json").write_text(json.dumps({"ranks": [line], "of": "x", "slow": 3}))
        for words in (["run", str(tmp_path)], ["run", str(tmp_path), "--follow"], ["--job", str(tmp_path)]):
            status, error = main(words), capsys.readouterr().err
            assert status == 0 or (status == 2 and "lines that no run of this release writes" in error), line
            assert "Traceback" not in error
        assert record.read_bytes() == before


def test_a_record_that_cannot_be_read_is_said_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / RECORDS).symlink_to("/proc/self/mem")  # whose first bytes nobody may read, root neither
    assert main(["run", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("ds_report run: [Errno") and error.count("\n") == 1


def test_what_was_written_before_a_kill_is_shown(
    tmp_path: Path, undrawn: None, capsys: pytest.CaptureFixture[str]
) -> None:
    code = f"""
import os, signal
from deepspeed.monitor.runfile import RunFile
file = RunFile({str(tmp_path)!r}, {FACTS!r})
for n in range(1, 8):
    file.step({{"total_ms": 5.0}}, {{"step": n, "loss": 1.0}})
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    assert main(["run", str(tmp_path)]) == 0
    text = (tmp_path / "report.html").read_text()
    assert "goes on, or was killed: there is no last line; last update 7" in text and "5.0 ms (median)" in text


def test_a_run_that_is_followed_is_left_with_ctrl_c(tmp_path: Path) -> None:
    file = RunFile(tmp_path, FACTS)  # goes on
    file.step({"total_ms": 5.0}, {"step": 1, "loss": 1.0})
    terminal, behind = pty.openpty()
    command = [sys.executable, "-m", "deepspeed.tools.report.cli", "run", str(tmp_path), "--follow"]
    process = subprocess.Popen(command, stdout=behind, stderr=subprocess.PIPE)
    os.close(behind)
    shown = b""
    while b"goes on" not in shown:
        shown += os.read(terminal, 4096)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert process.stderr is not None and process.stderr.read() == b"ds_report run: interrupted\n"
    process.stderr.close()
    os.close(terminal)
    file.close()


def test_a_folder_that_cannot_be_written_is_said_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"observe\.run .*cannot be written.*another folder"):
        RunFile(tmp_path / "file" / "x", {})


class _Strict(HTMLParser):
    """Every element is closed, in order, and nothing is fetched or run."""

    VOID = ("meta",)

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        assert tag not in ("script", "link", "img", "iframe"), tag
        outside = [v for k, v in attrs if k not in ("xmlns",) and v and re.search(r"https?:|//|url\(", v)]
        assert not outside, outside
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.handle_starttag(tag, attrs)
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, tag


def _fill(path: ElementTree.Element) -> str:
    return path.attrib["style"].partition("fill: ")[2].partition(";")[0]


def _svgs(text: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]


def test_the_page_stands_alone_and_shows_what_the_record_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = read_run(_run(tmp_path))
    assert main(["run", str(tmp_path)]) == 0
    text = (tmp_path / "report.html").read_text()
    lines = capsys.readouterr().out.splitlines()
    assert str(tmp_path / "report.html") in lines[-1], "after the run in a few lines"
    assert [line.split()[0] for line in lines[:2]] == ["model", "ranks"]
    parser = _Strict()
    parser.feed(text)
    parser.close()
    assert not parser.open and {"html", "svg", "path", "text", "table", "figcaption"} <= parser.seen
    assert len(text.encode()) < MOST_BYTES, "curves of a long run are thinned"
    style = text.partition("<style>")[2].partition("</style>")[0]
    for rule in re.findall(r"(?:svg|figure|body)[^{}]*\{([^}]*)\}", style):
        least = [int(n) for n in re.findall(r"min-width:(\d+)px", rule)]
        assert not least or max(least) <= 320, f"wider than a phone: {rule}"
    assert "@media(max-width" in style, "labels are larger there, as the whole figure is smaller"
    assert "<script" not in text and "&lt;script&gt;" in text and "Net &lt;b&gt;" in text
    titles = [figure.title for figure in figures(run)]
    assert [title.partition(" ")[0] for title in titles] == [
        *("Time", "Communication:", "Memory", "Loss", "Norm", "Learning", "Loss", "Fetched", "Train/mfu")
    ]
    assert len(_svgs(text)) == len(titles) + 1, "and the ranks"
    for word in ("rank 1 (h) is slow", "30.5 ms (median)", "0.500 s", "1.500 s", "1 MiB", "50% hidden", "has ended"):
        assert word in text, word
    assert "plan: states on host" in text
    assert text.count("<title>checkpoint: 0.50 s</title>") == 1, "the word of a mark"


def test_a_page_without_updates_says_so_and_one_without_the_library_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "No update has ended yet" in page(_recorded(tmp_path / "empty", []))
    run = read_run(_run(tmp_path))
    monkeypatch.setattr("deepspeed.tools.report.run.page.find_spec", lambda name: None)
    text = page(run)
    assert "pip install matplotlib" in text and "<svg" not in text and "30.5 ms (median)" in text


def test_a_page_that_cannot_be_written_says_what_to_name(
    tmp_path: Path, undrawn: None, capsys: pytest.CaptureFixture[str]
) -> None:
    _run(tmp_path)
    assert main(["run", str(tmp_path), "--out", str(tmp_path / "none" / "a.html")]) == 2
    assert "the page cannot be written" in (said := capsys.readouterr().err) and "--out FILE" in said


def test_a_phase_that_an_update_has_not_is_none_of_its_time(tmp_path: Path) -> None:
    file = RunFile(tmp_path, FACTS)
    file._last_s = time.monotonic() + 60  # no line for a while
    for n, times in enumerate(({"total_ms": 2.0, "wait_ms": 1.0}, {"total_ms": 4.0}), 1):
        file.step(times, {"step": n})
    file.close()
    (line,) = read_run(tmp_path).of("step")
    assert (line["steps"], line["total_ms"], line["wait_ms"]) == (2, 3.0, 0.5)


def test_follow_and_job_show_a_run_on_no_terminal_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _run(tmp_path)
    assert main(["run", str(tmp_path), "--follow"]) == 0
    shown = capsys.readouterr().out
    for word in ("Net <b>", "gradient norm", "last 50", "memory of rank 0", "! rank 1 (h) is slow"):
        assert word in shown, word
    assert main(["--job", str(tmp_path)]) == 0
    job = capsys.readouterr().out.splitlines()
    assert job[2].split()[0] == "1" and "SLOW: 2.00 x the median rank" in job[2], "the slowest first"
    assert "ranks that have not told of themselves yet: 1" in job[4]
    (tmp_path / "ranks.json").unlink()
    assert main(["--job", str(tmp_path)]) == 0
    assert "no rank has told of itself yet" in capsys.readouterr().out


def test_curves_keep_their_extremes_and_axes_have_round_numbers() -> None:
    points = [(float(i), 1.0 + (i == 7777)) for i in range(10_000)]
    kept = thinned(points)
    assert len(kept) <= 500 and max(y for _, y in kept) == 2.0 and sorted(kept) == kept
    even = draw(Figure("even", "x", [Curve("a", [(120_000.0, 0.0), (120_004.0, 10.0)])]))
    words = [element.text for element in _svgs(even)[0].iter(f"{_SVG}text")]
    assert words == ["120000", "120001", "120002", "120003", "120004", "update", *map(str, range(0, 11, 2)), "x"]
    flat = draw(Figure("flat", "x", [Curve("a", [(1.0, 3.0), (2.0, 3.0)])]))
    single = draw(Figure("one", "x", [Curve("a", [(1.0, 0.0)])]))
    rising = draw(Figure("log", "x", [Curve("a", [(1.0, 1e-3), (2.0, 1e3)])], log=True))
    assert all(len(_svgs(text)) == 1 and "nan" not in text for text in (flat, single, rising))
    assert spark([1, 2, 3], 2) == " @"
    assert [*map(short, (100_000, 150_000, 1.2e-5, -2e7, 0, 5e-4))] == ["1e5", "1.5e5", "1.2e-5", "-2e7", "0", "0.0005"]
    for low in (1e-9, 0.021, 0.9, 2.1, 3.4, 5.1, 7e5):
        (svg,) = _svgs(draw(Figure("log", "x", [Curve("a", [(1.0, low), (2.0, 3.01 * low)])], log=True)))
        assert len([*svg.iter(f"{_SVG}text")]) > 5, "two of the values, and their unit"


def test_updates_made_again_after_a_restart_are_shown_once(tmp_path: Path) -> None:
    for numbers in (range(1, 7), range(4, 9)):  # it goes on from a checkpoint of update 3
        run = _recorded(tmp_path, [{"step": n, "loss": 1.0} for n in numbers])
    assert [line["step"] for line in run.updates] == [*range(1, 9)]
    time = figures(run)[0]
    assert time.title == "Time of a step" and [x for x, _ in time.lines[0].points] == [*range(1, 9)]


def test_a_line_of_updates_of_which_a_share_is_noted_is_the_mean_of_all() -> None:
    """Each noted one stands for those before it that are not: else the first ones, which are slow and all noted, would
    be most of the mean. A phase that an update does not have took no time of it.
    """
    sums = _StepSums()
    for n in range(1, 101):
        noted = n <= 10 or n % 10 == 0
        wait = 50.0 if n <= 10 else 1.0
        phases = {"total_ms": wait + 1.0} | ({"forward_ms": 4.0} if n % 2 else {})
        sums.add(phases, {"step": n}, {"wait_ms": wait, "sent_bytes": 8.0} if noted else {})
    means = sums.means()
    assert means == {"total_ms": 6.9, "forward_ms": 2.0, "wait_ms": 5.9, "sent_bytes": 8.0}


def test_areas_of_many_points_lie_on_top_of_each_other() -> None:
    """Each curve keeps other points of its own; their sums must not be of those that happen to be the same."""
    curves = [Curve(name, [(float(n), 4.0 + n * k % 7 / 100) for n in range(5000)]) for name, k in (("a", 3), ("b", 5))]
    (svg,) = _svgs(draw(Figure("t", "ms", curves, stacked=True)))
    areas = [path.attrib["d"] for path in svg.iter(f"{_SVG}path") if _fill(path) in COLORS]
    tops = [[float(y) for _, y in re.findall(r"[ML] (\S+) (\S+)", area)][1:-2] for area in areas]
    lower, upper = sorted(tops, key=max, reverse=True)
    assert max(lower) - min(lower) < 5 and max(upper) - min(upper) < 5, "no curve falls onto another"
    assert min(lower) - max(upper) > 50


def test_a_line_within_areas_lies_on_top_of_them() -> None:
    areas = [Curve(name, [(1.0, 4.0), (2.0, 4.0)]) for name in "ab"]
    (svg,) = _svgs(draw(Figure("t", "ms", [*areas, Curve("c", [(1.0, 3.0), (2.0, 3.0)], dashed=True)], stacked=True)))
    drawn = [path for path in svg.iter(f"{_SVG}path") if _fill(path) in COLORS or "dasharray" in path.attrib["style"]]
    assert [_fill(path) in COLORS for path in drawn] == [True, True, False]


def test_a_disk_that_is_full_for_a_while_costs_lines_and_not_the_run(tmp_path: Path) -> None:
    file = RunFile(tmp_path, FACTS)
    disk, full = file._file, open("/dev/full", "wb", buffering=0)  # noqa: SIM115 - closed below
    file._file = full
    file.step({"total_ms": 1.0}, {"step": 1})
    assert isinstance(file.fault, OSError) and "space" in str(file.fault)
    file._file = disk
    file.step({"total_ms": 1.0}, {"step": 2})
    file.close()
    full.close()
    run = read_run(tmp_path)
    assert [line["step"] for line in run.of("step")] == [2] and run.over and not run.damaged


def test_a_line_written_in_part_spoils_no_other(tmp_path: Path) -> None:
    file = RunFile(tmp_path, FACTS)
    disk = file._file

    class Short:
        def write(self, line: bytes) -> int:
            return disk.write(line[:9])

    file._file = Short()  # type: ignore[assignment]
    file.step({"total_ms": 1.0}, {"step": 1})
    file._file = disk
    file.step({"total_ms": 1.0}, {"step": 2})
    file.close()
    run = read_run(tmp_path)
    assert [line["step"] for line in run.of("step")] == [2] and run.damaged == 1 and run.over


def test_two_processes_or_engines_with_one_folder_are_warned_of(tmp_path: Path) -> None:
    first = RunFile(tmp_path, FACTS)
    RunFile(tmp_path, FACTS).close()
    code = f"from deepspeed.monitor.runfile import RunFile; RunFile({str(tmp_path)!r}, {{}}).close()"
    subprocess.run([sys.executable, "-c", code], check=True)
    first.close()
    texts = [line["text"] for line in read_run(tmp_path).of("warning")]
    assert len(texts) == 2 and all("another process or engine writes" in text for text in texts)
    RunFile(tmp_path, FACTS).close()
    assert len(read_run(tmp_path).of("warning")) == 2, "one that has ended is no other"


def test_updates_that_were_left_out_are_all_counted_and_a_loss_that_is_none_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deepspeed.monitor.runfile._EVERY_LINE", 0)
    updates = [{"step": n, "skipped": n % 2 == 0, "loss": math.nan} for n in range(1, 11)]
    rows = dict(facts(_recorded(tmp_path, updates)))
    assert rows["updates left out"] == "5"
    assert "first at update" in rows["loss not finite"] and rows["loss not finite"].endswith("nan")


def test_no_update_of_many_short_ones_is_lost(tmp_path: Path) -> None:
    file = RunFile(tmp_path, FACTS)
    board = Board(None, rank=0, ranks=1, file=file, factor=1.2, steps=20, drive_bytes=lambda: 0)
    for n in range(1, 501):  # faster than the thread looks
        step = StepSpans(MarkClock(), n, 4)
        step.end, step.number = n + 1, n
        board.put(step, {})
    board.close()
    lines = read_run(tmp_path).of("step")
    assert sum(line["steps"] for line in lines) == 500 and lines[-1]["step"] == 500
