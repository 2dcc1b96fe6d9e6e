"""Figures as SVG, drawn without any library: lines, areas and bars over a common axis, small and self-contained."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 640, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 14, 10, 38
_MOST = 500  # points of a line: of more the largest and smallest in as many pieces remain
COLORS = ("#2563eb", "#ea580c", "#16a34a", "#9333ea", "#dc2626", "#0891b2", "#854d0e", "#64748b")
_INK = "#111827"

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


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about ``count`` round numbers from ``low`` to ``high``."""
    span = (high - low) or abs(high) or 1.0
    rough = span / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * f for f in (1, 2, 5, 10) if power * f >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, first + 3 * count) if i * step <= high + step * 1e-6]


def short(value: float) -> str:
    """Format a number for an axis."""
    if value and not 1e-4 <= abs(value) < 1e5:
        digits, _, power = f"{value:.2e}".partition("e")
        return f"{float(digits):g}e{int(power)}"
    return f"{value:.6g}"


def _scale(low: float, high: float, begin: float, end: float, *, log: bool) -> Callable[[float], float]:
    if log:
        low, high = math.log10(low), math.log10(high)
    span = (high - low) or 1.0
    return lambda value: begin + (end - begin) * ((math.log10(value) if log else value) - low) / span


def _log_ticks(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    every = max(1, len(powers) // 6)
    for factors in ((1,), (1, 3), (1, 2, 3, 5, 7)):
        values = [f * 10.0**p for p in powers if p % every == 0 for f in factors if low <= f * 10.0**p <= high]
        if len(values) > 2:
            break
    return values


def draw(figure: Figure, number: int = 0) -> str:
    """Draw the figure as an ``svg`` element, with a legend below it."""
    lines = [line for line in (_stacked(figure.lines) if figure.stacked else figure.lines) if line.points]
    lines = [Curve(line.name, thinned(line.points), line.dashed) for line in lines]
    values = [y for line in lines for _, y in line.points]
    log = figure.log and min(values, default=0.0) > 0 and max(values) > 3 * min(values)
    low, high = _extent(values, zero=not log and (figure.stacked or min(values, default=0.0) >= 0))
    if log:
        low, high = min(values), max(values)
    across = [x for line in lines for x, _ in line.points]
    first, last = min(across, default=0.0), max(across, default=1.0)
    x = _scale(first, last, _LEFT, WIDTH - _RIGHT, log=False)
    y = _scale(low, high, HEIGHT - _BOTTOM, _TOP, log=log)
    parts = [*_axes(figure, x, y, (first, last), (low, high), log=log)]
    areas_first = sorted(reversed([*enumerate(lines)]), key=lambda pair: not figure.stacked or pair[1].dashed)
    for i, line in areas_first:
        color = _color(figure, i, line)
        path = " ".join(f"{x(px):.1f},{y(py):.1f}" for px, py in line.points)
        if figure.stacked and not line.dashed:
            path = f"{x(line.points[0][0]):.1f},{y(0):.1f} {path} {x(line.points[-1][0]):.1f},{y(0):.1f}"
            parts.append(f'<polygon points="{path}" fill="{color}"/>')  # covers what is above it
        else:
            dash, width = ' stroke-dasharray="6 4"' if line.dashed else "", 1.5
            if len(line.points) == 1:  # a dot
                path, width = f"{path} {path}", 6
            how = f'stroke-width="{width}" stroke-linecap="round"{dash}'
            parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" {how}/>')
    for at, word in figure.marks:
        if first <= at <= last:
            parts.append(
                f'<line x1="{x(at):.1f}" x2="{x(at):.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}" stroke="{_INK}" '
                f'stroke-dasharray="2 3"><title>{escape(word)}</title></line>'
            )
    return _framed(figure, parts, lines, number)


def _color(figure: Figure, position: int, line: Curve) -> str:
    return _INK if figure.stacked and line.dashed else COLORS[position % len(COLORS)]  # to be seen on any area


def _framed(figure: Figure, parts: Sequence[str], lines: Sequence[Curve], number: int) -> str:
    legend = "".join(
        f'<span class="key"><span class="{"dash" if line.dashed else "swatch"}" '
        f'style="border-color:{_color(figure, i, line)}"></span>{escape(line.name)}</span>'
        for i, line in enumerate(lines)
    )
    space = 'xmlns="http://www.w3.org/2000/svg"'
    head = f'<svg {space} viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="f{number}">'
    caption = f'<figcaption id="f{number}">{escape(figure.title)}</figcaption>'
    return f'<figure>{caption}{head}{"".join(parts)}</svg><div class="legend">{legend}</div></figure>'


def _extent(values: Sequence[float], *, zero: bool) -> tuple[float, float]:
    low, high = min(values, default=0.0), max(values, default=1.0)
    low = 0.0 if zero and low <= high / 2 else low
    room = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    return (low if low == 0 else low - room), high + room


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


def _axes(
    figure: Figure,
    x: Callable[[float], float],
    y: Callable[[float], float],
    across: tuple[float, float],
    upward: tuple[float, float],
    *,
    log: bool,
) -> Iterator[str]:
    text = 'font-family="sans-serif" font-size="11" fill="#374151"'
    for value in _log_ticks(*upward) if log else ticks(*upward):
        at = f"{y(value):.1f}"
        yield f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{at}" y2="{at}" stroke="#e5e7eb"/>'
        yield f'<text x="{_LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end" {text}>{short(value)}</text>'
    for value in ticks(*across, 8):
        if value == int(value):
            at = f"{x(value):.1f}"
            yield f'<text x="{at}" y="{HEIGHT - _BOTTOM + 18}" text-anchor="middle" {text}>{short(value)}</text>'
    bottom = HEIGHT - _BOTTOM
    yield f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{bottom}" y2="{bottom}" stroke="#9ca3af"/>'
    yield f'<text x="{WIDTH - _RIGHT}" y="{HEIGHT - 4}" text-anchor="end" {text}>{escape(figure.across)}</text>'
    middle = (_TOP + bottom) / 2
    turn = f'transform="rotate(-90 12 {middle:.0f})"'
    yield f'<text x="12" y="{middle:.0f}" text-anchor="middle" {turn} {text}>{escape(figure.unit)}</text>'


@dataclass
class Bars:
    """Rows of bars; each row: its name, and (value, end of a thin line beside the bar) for each of ``names``."""

    title: str
    unit: str
    names: tuple[str, ...]
    rows: list[tuple[str, list[tuple[float, float]]]]


def draw_bars(bars: Bars, number: int = 0) -> str:
    """Draw the bars as an ``svg`` element."""
    pitch, left, right = 13, 90, 130
    room = pitch * len(bars.names) + 7
    height = room * len(bars.rows) + 30
    most = max((max(v, end) for _, values in bars.rows for v, end in values), default=1.0) or 1.0
    x = _scale(0.0, most, left, WIDTH - right, log=False)
    text, parts = 'font-family="sans-serif" font-size="11" fill="#374151"', []
    for row, (name, values) in enumerate(bars.rows):
        top = row * room + 4
        parts.append(f'<text x="{left - 6}" y="{top + room / 2:.0f}" text-anchor="end" {text}>{escape(name)}</text>')
        for i, (value, end) in enumerate(values):
            at, middle = top + i * pitch, top + i * pitch + pitch / 2 - 1
            parts.append(
                f'<rect x="{left}" y="{at}" width="{x(value) - left:.1f}" height="{pitch - 2}" fill="{COLORS[i]}" '
                'fill-opacity="0.8"/>'
            )
            parts.append(f'<line x1="{x(value):.1f}" x2="{x(end):.1f}" y1="{middle}" y2="{middle}" stroke="#111827"/>')
            label = f"{short(float(f'{value:.3g}'))} ({short(float(f'{end:.3g}'))})"
            parts.append(f'<text x="{x(max(value, end)) + 4:.1f}" y="{middle + 4}" {text}>{label}</text>')
    parts.append(f'<text x="{WIDTH - 4}" y="{height - 8}" text-anchor="end" {text}>{escape(bars.unit)}</text>')
    figure = Figure(bars.title, bars.unit, [])
    return _framed(figure, parts, [Curve(name, []) for name in bars.names], number).replace(
        f'viewBox="0 0 {WIDTH} {HEIGHT}"', f'viewBox="0 0 {WIDTH} {height}"'
    )
