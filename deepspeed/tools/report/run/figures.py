"""Figures as inline SVG, drawn by matplotlib: lines, areas and bars over a common axis, small and self-contained."""

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib import import_module
from typing import Any

WIDTH, HEIGHT = 640, 240
_MOST = 500  # points of a line: of more the largest and smallest in as many pieces remain
COLORS = ("#2563eb", "#ea580c", "#16a34a", "#9333ea", "#dc2626", "#0891b2", "#854d0e", "#64748b")
_INK = "#111827"
_SETTINGS = {"svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans", "sans-serif"], "font.size": 11}
_SETTINGS |= {"text.color": "#374151", "axes.edgecolor": "#9ca3af"}
_SETTINGS |= {"axes.labelcolor": "#374151", "xtick.labelcolor": "#374151", "ytick.labelcolor": "#374151"}
# What an inline figure must not have: links out of it, and names that other figures have too.
_LEFT_OUT = (r"<metadata>.*?</metadata>", r' clip-path="[^"]*"', r' xmlns:xlink="[^"]*"', r'(?<=<g) id="(?!mark)[^"]*"')

Points = Sequence[tuple[float, float]]


@dataclass
class Curve:
    """Curve of a figure; ``dashed`` for a plan or a limit."""

    name: str
    points: Points
    dashed: bool = False


@dataclass
class Figure:
    """Curves over one axis; ``stacked``: as areas. ``marks``: moments with a word each. ``log``: if values allow it."""

    title: str
    unit: str
    lines: list[Curve]
    across: str = "update"
    stacked: bool = False
    log: bool = False
    marks: list[tuple[float, str]] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        """Return whether there is nothing to draw."""
        return not any(line.points for line in self.lines)


@dataclass
class Bars:
    """Rows of bars; each row: its name, and (value, end of a thin line beside the bar) for each of ``names``."""

    title: str
    unit: str
    names: tuple[str, ...]
    rows: list[tuple[str, list[tuple[float, float]]]]


def thinned(points: Points, most: int = _MOST) -> list[tuple[float, float]]:
    """Return at most about ``most`` points with the same extremes."""
    points = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    if len(points) <= most:
        return points
    stride = -(-2 * len(points) // most)
    kept = []
    for start in range(0, len(points), stride):
        piece = points[start : start + stride]
        kept += sorted({min(piece, key=lambda p: p[1]), max(piece, key=lambda p: p[1])})
    return kept


def short(value: float, _position: object = None) -> str:
    """Format a number for an axis, whose library gives its position too."""
    if value and not 1e-4 <= abs(value) < 1e5:
        digits, _, power = f"{value:.2e}".partition("e")
        return f"{float(digits):g}e{int(power)}"
    return f"{value:.6g}"


def _whole(value: float, _position: object) -> str:
    return f"{value:.0f}" if value == round(value) else ""


def draw(figure: Figure, number: int = 0) -> str:
    """Draw the figure as a ``figure`` element, with a legend below it. Raises ImportError without matplotlib."""
    lines = [line for line in (_stacked(figure.lines) if figure.stacked else figure.lines) if line.points]
    lines = [Curve(line.name, thinned(line.points), line.dashed) for line in lines]
    areas_first = sorted(reversed([*enumerate(lines)]), key=lambda pair: not figure.stacked or pair[1].dashed)
    # a dashed line is to be seen on any area
    colors = [_INK if figure.stacked and line.dashed else COLORS[i % len(COLORS)] for i, line in enumerate(lines)]
    marks = [(f"mark{number}-{i}", at, word) for i, (at, word) in enumerate(figure.marks)]

    def paint(axes: Any) -> None:
        for order, (position, line) in enumerate(areas_first):
            color, (x, y) = colors[position], zip(*line.points, strict=True)
            if figure.stacked and not line.dashed:
                axes.fill([x[0], *x, x[-1]], [0, *y, 0], color=color, zorder=2 + order)  # covers what is above it
            else:
                single = {"marker": "o", "markersize": 5} if len(x) == 1 else {}
                axes.plot(x, y, color=color, linestyle="--" if line.dashed else "-", zorder=2 + order, **single)
        _limit(figure, axes, [y for line in lines for _, y in line.points])
        first, last = axes.get_xlim()
        for name, at, _ in marks:
            if first <= at <= last:
                axes.axvline(at, color=_INK, linestyle=":", linewidth=1, gid=name, zorder=99)
        axes.grid(axis="y", color="#e5e7eb")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.xaxis.set_major_formatter(_whole)
        axes.yaxis.set_major_formatter(short)
        axes.set_xlabel(figure.across, loc="right")
        axes.set_ylabel(figure.unit)

    svg = _drawn(HEIGHT, number, paint)
    for name, _, word in marks:
        svg = svg.replace(f'<g id="{name}">', f"<g><title>{escape(word)}</title>")
    return _framed(figure.title, svg, [*zip(lines, colors, strict=True)], number)


def draw_bars(bars: Bars, number: int = 0) -> str:
    """Draw the bars as a ``figure`` element. Raises ImportError without matplotlib."""
    pitch = len(bars.names) + 0.5

    def paint(axes: Any) -> None:
        for i in range(len(bars.names)):
            places = [row * pitch + i for row in range(len(bars.rows))]
            values, ends = zip(*(pairs[i] for _, pairs in bars.rows), strict=True)
            axes.barh(places, values, 0.85, color=COLORS[i], alpha=0.8)
            axes.hlines(places, values, ends, color=_INK, linewidth=1)
            for place, value, end in zip(places, values, ends, strict=True):
                label = f" {short(float(f'{value:.3g}'))} ({short(float(f'{end:.3g}'))})"
                axes.text(max(value, end), place, label, verticalalignment="center")
        middles = [row * pitch + (len(bars.names) - 1) / 2 for row in range(len(bars.rows))]
        axes.set_yticks(middles, [name for name, _ in bars.rows])
        axes.set_xticks([])
        axes.set_xlabel(bars.unit, loc="right")
        axes.margins(y=0.01)
        axes.invert_yaxis()

    height = (13 * len(bars.names) + 7) * len(bars.rows) + 40
    legend = [(Curve(name, []), COLORS[i]) for i, name in enumerate(bars.names)]
    return _framed(bars.title, _drawn(height, number, paint), legend, number)


def _drawn(height: int, number: int, paint: Callable[[Any], None]) -> str:
    """Return what ``paint`` does to axes, as an ``svg`` element whose names no figure of another ``number`` has."""
    matplotlib, library = import_module("matplotlib"), import_module("matplotlib.figure")
    with matplotlib.rc_context({**_SETTINGS, "svg.hashsalt": str(number)}):
        canvas = library.Figure(figsize=(WIDTH / 72, height / 72), layout="constrained")
        axes = canvas.subplots()
        axes.spines[["left", "top", "right"]].set_visible(False)
        axes.tick_params(left=False, bottom=False)
        paint(axes)
        file = io.StringIO()
        canvas.savefig(file, format="svg", transparent=True)
    svg = file.getvalue()[file.getvalue().index("<svg") :].strip().replace("xlink:href", "href")
    for pattern in _LEFT_OUT:
        svg = re.sub(pattern, "", svg, flags=re.DOTALL)
    return svg.replace("<svg", f'<svg role="img" aria-labelledby="f{number}"', 1)


def _limit(figure: Figure, axes: Any, values: Sequence[float]) -> None:
    """Choose the scale of the values, and where it begins and ends."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    axes.margins(x=0)
    if figure.log and low > 0 and high > 3 * low:
        factors = (1, 2, 3, 5, 7) if high < 10 * low else (1, 3) if high < 100 * low else (1,)
        axes.set_yscale("log", subs=[])
        axes.yaxis.set_major_locator(import_module("matplotlib.ticker").LogLocator(subs=factors, numticks=8))
    elif (figure.stacked or low >= 0) and low <= high / 2:
        axes.set_ylim(0, 1.05 * high or 1.0)


def _framed(title: str, svg: str, lines: Sequence[tuple[Curve, str]], number: int) -> str:
    legend = "".join(
        f'<span class="key"><span class="{"dash" if line.dashed else "swatch"}" '
        f'style="border-color:{color}"></span>{escape(line.name)}</span>'
        for line, color in lines
    )
    caption = f'<figcaption id="f{number}">{escape(title)}</figcaption>'
    return f'<figure>{caption}{svg}<div class="legend">{legend}</div></figure>'


def _stacked(lines: list[Curve]) -> list[Curve]:
    """Stack each curve on those before it; dashed curves stay, and nothing is added for them."""
    sums: dict[float, float] = {}
    result = []
    for line in lines:
        if line.dashed:
            result.append(line)
            continue
        for px, py in line.points:
            sums[px] = sums.get(px, 0.0) + py
        if line.points:
            result.append(Curve(line.name, [(px, sums[px]) for px, _ in line.points]))
    return result
