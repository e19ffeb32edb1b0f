"""Charts as SVG: no script, colours from the page's style sheet (`--c0` and on, see `page.py`), tooltips as titles.

All functions return markup; whatever text they are given is escaped.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 260
LEFT, RIGHT, TOP, BOTTOM = 58, 16, 14, 42
BANDS = 56  # places along the x axis that have a tooltip
COLOURS = 10
ROW = 26  # of a bar
LABELS = 150  # pixels, of bars
NAMES = 100  # pixels, of strips
TICK = (1.0, 2.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True, slots=True)
class Axis:
    """
    Attributes:
        label: with the unit.
        low, high: what is shown at least; None goes by the data.
        log: logarithmic; only values above 0 are shown.
        percent: values are shares.
    """

    label: str
    low: float | None = None
    high: float | None = None
    log: bool = False
    percent: bool = False

    def shown(self, value: float) -> str:
        return f"{value * 100:.3g} %" if self.percent else short(value)


@dataclass(frozen=True, slots=True)
class Line:
    """
    Attributes:
        points: (x, y) in order of x; y None is a gap.
        colour: one of `COLOURS`.
        steps: a value holds until the next.
        joined: the points are joined to a line.
        dots: a dot at each point, with its own tooltip.
        hollow: indices of dots that are not filled.
    """

    name: str
    points: Sequence[tuple[float, float | None]]
    colour: int = 0
    steps: bool = False
    joined: bool = True
    dots: bool = False
    dashed: bool = False
    hollow: frozenset[int] = frozenset()

    def value(self, x: float) -> float | None:
        """At `x`, as it is drawn; None outside."""
        i = bisect_right(self.points, x, key=lambda point: point[0]) - 1
        if i < 0 or (i == len(self.points) - 1 and x > self.points[-1][0]):
            return None
        before = self.points[i][1]
        if self.steps or i == len(self.points) - 1 or before is None or self.points[i + 1][1] is None:
            return before
        (x0, _), (x1, after) = self.points[i], self.points[i + 1]
        return before + ((after or 0.0) - before) * (x - x0) / (x1 - x0) if x1 > x0 else before


@dataclass(frozen=True, slots=True)
class Mark:
    """A line across the chart, at an x (or with `level` a y)."""

    at: float
    label: str
    colour: int | None = None
    level: bool = False


@dataclass(frozen=True, slots=True)
class Bar:
    """
    Attributes:
        low, high: whiskers; None has none.
        bound: a mark further out; None has none.
    """

    name: str
    value: float | None
    colour: int = 0
    low: float | None = None
    high: float | None = None
    bound: float | None = None


@dataclass(frozen=True, slots=True)
class Strip:
    """A row of coloured stretches: (from, to, CSS class, tooltip)."""

    name: str
    stretches: Sequence[tuple[float, float, str, str]]


def short(value: float | None) -> str:
    """A number for people, with three digits or so."""
    if value is None:
        return "–"
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.3g}{unit}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


@dataclass(frozen=True, slots=True)
class _Scale:
    """An axis with its bounds; positions in pixels."""

    axis: Axis
    low: float
    high: float
    begin: float
    end: float

    @classmethod
    def over(cls, axis: Axis, values: Iterable[float], begin: float, end: float) -> _Scale:
        found = [value for value in values if math.isfinite(value) and not (axis.log and value <= 0)]
        found += [value for value in (axis.low, axis.high) if value is not None]
        low, high = (min(found), max(found)) if found else (0.0, 1.0)
        if axis.log:
            low, high = low if low > 0 else 1e-3, high if high > 0 else 1.0
            if high < low * 1.5:
                low, high = low / 1.5, high * 1.5
        elif axis.low is None and low > 0 and low < high / 2:
            low = 0.0
        if high <= low:
            low, high = low - abs(low) * 0.1, high + abs(high) * 0.1 + (0 if high else 1.0)
        return cls(axis, low, high, begin, end)

    def at(self, value: float) -> float:
        if self.axis.log:
            value = max(value, self.low)
            part = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            part = (value - self.low) / (self.high - self.low)
        return self.begin + (self.end - self.begin) * min(max(part, 0.0), 1.0)

    def back(self, pixel: float) -> float:
        part = (pixel - self.begin) / (self.end - self.begin)
        if self.axis.log:
            return float(self.low * (self.high / self.low) ** part)
        return self.low + (self.high - self.low) * part

    def ticks(self) -> list[float]:
        apart = 60 if self.end > self.begin else 38  # pixels: numbers are wider than high
        count = max(2, int(abs(self.end - self.begin) / apart))
        if self.axis.log:
            return _log_ticks(self.low, self.high, count)
        size = 10 ** math.floor(math.log10((self.high - self.low) / count))
        step = next(size * n for n in TICK if (self.high - self.low) / (size * n) <= count)
        first = math.ceil(self.low / step - 1e-9)
        return [n * step for n in range(first, int(self.high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float, count: int) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1, 2, 5), (1, 3), (1,)):
        found = [d * 10.0**p for p in powers for d in digits if low <= d * 10.0**p <= high]
        if len(found) <= count + 1:
            return found
    return found[:: math.ceil(len(found) / count)]


# --- charts


def line_chart(
    lines: Sequence[Line], x: Axis, y: Axis, marks: Sequence[Mark] = (), *, width: int = WIDTH, left: int = LEFT
) -> str:
    """Lines over a common axis, with a legend above when there are several. "" when there is nothing to draw."""
    lines = [line for line in lines if line.points]
    if not lines:
        return ""
    xs = [px for line in lines for px, _ in line.points] + [mark.at for mark in marks if not mark.level]
    ys = [py for line in lines for _, py in line.points if py is not None]
    across = _Scale.over(x, xs, left, width - RIGHT)
    up = _Scale.over(y, [*ys, *(mark.at for mark in marks if mark.level)], HEIGHT - BOTTOM, TOP)
    parts = [*_axes(across, up, width, HEIGHT - BOTTOM)]
    parts += [_mark(mark, across, up) for mark in marks]
    joined = [line for line in lines if line.joined]
    parts += [_line(line, across, up) for line in joined]
    parts += _bands(joined, across, up)
    parts += [dot for line in lines if line.dots for dot in _dots(line, across, up)]
    return _legend(list(dict.fromkeys((line.name, line.colour) for line in lines))) + _svg(
        width, HEIGHT, y.label, parts
    )


def bar_chart(bars: Sequence[Bar], axis: Axis, *, bound: str = "") -> str:
    """Lying bars; "" when there is nothing to draw. `bound`: what the marks further out mean."""
    if not any(bar.value is not None for bar in bars):
        return ""
    height = len(bars) * ROW + TOP + BOTTOM
    far = [value for bar in bars for value in (bar.value, bar.high, bar.bound) if value is not None]
    across = _Scale.over(Axis(axis.label, low=0.0, high=axis.high, percent=axis.percent), far, LABELS, WIDTH - 60)
    parts = list(_x_axis(across, TOP, height - BOTTOM, WIDTH))
    for i, bar in enumerate(bars):
        parts.append(_bar(bar, across, TOP + i * ROW, bound))
    legend = f'<p class="legend"><span><i class="tick"></i>{escape(bound)}</span></p>' if bound else ""
    return legend + _svg(WIDTH, height, axis.label, parts)


def strip_chart(
    strips: Sequence[Strip], x: Axis, legend: Sequence[tuple[str, str]], *, width: int, left: int = NAMES
) -> str:
    """A row of stretches for each name. `legend`: (name, CSS class of the stretches)."""
    if not any(strip.stretches for strip in strips):
        return ""
    row = max(5, min(20, 640 // len(strips)))
    height = row * len(strips) + TOP + BOTTOM
    ends = [end for strip in strips for begin, end, _, _ in strip.stretches]
    across = _Scale.over(Axis(x.label, low=0.0, high=x.high), ends, left, width - RIGHT)
    parts = list(_x_axis(across, TOP, height - BOTTOM, width))
    every = math.ceil(11 / row)
    for i, strip in enumerate(strips):
        top = TOP + i * row
        if i % every == 0:
            parts.append(f'<text class="name" x="{left - 6}" y="{top + row / 2 + 3.5:.1f}">{escape(strip.name)}</text>')
        for begin, end, kind, title in strip.stretches:
            at, right = across.at(begin), across.at(end)
            parts.append(
                f'<rect class="{kind}" x="{at:.1f}" y="{top + 0.5}" width="{max(right - at, 0.5):.1f}" '
                f'height="{row - 1}"><title>{escape(title)}</title></rect>'
            )
    named = "".join(f'<span><i class="{kind}"></i>{escape(name)}</span>' for name, kind in legend)
    return f'<p class="legend">{named}</p>' + _svg(width, height, "instances over time", parts)


# --- parts of them


def _svg(width: int, height: int, label: str, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'


def _axes(across: _Scale, up: _Scale, width: int, bottom: float) -> Iterable[str]:
    yield from _x_axis(across, TOP, bottom, width)
    for tick in up.ticks():
        at = up.at(tick)
        yield f'<line class="grid" x1="{across.begin}" x2="{width - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
        yield f'<text class="y" x="{across.begin - 7}" y="{at + 3.5:.1f}">{up.axis.shown(tick)}</text>'
    x, y, label = across.begin - LEFT + 13, (TOP + bottom) / 2, escape(up.axis.label)
    yield f'<text class="label" x="{x}" y="{y}" transform="rotate(-90 {x} {y})">{label}</text>'


def _x_axis(across: _Scale, top: float, bottom: float, width: int) -> Iterable[str]:
    for tick in across.ticks():
        at = across.at(tick)
        yield f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{top}" y2="{bottom}"/>'
        yield f'<text class="x" x="{at:.1f}" y="{bottom + 15}">{across.axis.shown(tick)}</text>'
    yield f'<line class="axis" x1="{across.begin}" x2="{across.end}" y1="{bottom}" y2="{bottom}"/>'
    middle = (across.begin + across.end) / 2
    yield f'<text class="label" x="{middle}" y="{bottom + 33}">{escape(across.axis.label)}</text>'


def _mark(mark: Mark, across: _Scale, up: _Scale) -> str:
    kind = "mark" if mark.colour is None else "mark own"
    style = "" if mark.colour is None else f' style="--k:var(--c{mark.colour})"'
    title = f"<title>{escape(mark.label)}</title>"
    if mark.level:
        at = up.at(mark.at)
        text = f'<text class="note end" x="{across.end - 2}" y="{at - 4:.1f}">{escape(mark.label)}</text>'
        return (
            f'<line class="{kind}"{style} x1="{across.begin}" x2="{across.end}" y1="{at:.1f}" y2="{at:.1f}">{title}'
            f"</line>{text}"
        )
    at = across.at(mark.at)
    late = at > (across.begin + across.end) / 2
    text = (
        f'<text class="note{" end" if late else ""}" x="{at + (-4 if late else 4):.1f}" y="{up.begin - 6}">'
        f"{escape(mark.label)}</text>"
    )
    line = f'<line class="{kind}"{style} x1="{at:.1f}" x2="{at:.1f}" y1="{up.end}" y2="{up.begin}">{title}</line>'
    return line + (text if mark.colour is None else "")


def _line(line: Line, across: _Scale, up: _Scale) -> str:
    path: list[str] = []
    last: float | None = None
    for px, py in line.points:
        if py is None:
            last = None
            continue
        x, y = across.at(px), up.at(py)
        if last is None:
            path.append(f"M{x:.1f} {y:.1f}")
        elif line.steps:
            path.append(f"H{x:.1f}" + (f"V{y:.1f}" if y != last else ""))
        else:
            path.append(f"L{x:.1f} {y:.1f}")
        last = y
    kind = "line dashed" if line.dashed else "line"
    return f'<path class="{kind}" style="--k:var(--c{line.colour % COLOURS})" d="{"".join(path)}"/>'


def _dots(line: Line, across: _Scale, up: _Scale) -> Iterable[str]:
    for i, (px, py) in enumerate(line.points):
        if py is None:
            continue
        title = f"{line.name}: {up.axis.shown(py)} at {across.axis.shown(px)}{', given up' if i in line.hollow else ''}"
        kind = "dot hollow" if i in line.hollow else "dot"
        yield (
            f'<circle class="{kind}" style="--k:var(--c{line.colour % COLOURS})" cx="{across.at(px):.1f}" '
            f'cy="{up.at(py):.1f}" r="3.5"><title>{escape(title)}</title></circle>'
        )


def _bands(lines: Sequence[Line], across: _Scale, up: _Scale) -> Iterable[str]:
    """Hover areas, with a tooltip of all lines' values there."""
    wide = (across.end - across.begin) / BANDS
    for i in range(BANDS):
        left = across.begin + i * wide
        x = across.back(left + wide / 2)
        values = [(line.name, line.value(x)) for line in lines]
        told = [f"{name}: {up.axis.shown(value)}" for name, value in values if value is not None]
        if told:
            title = escape("\n".join([f"{across.axis.label} {across.axis.shown(x)}", *told]))
            yield (
                f'<rect class="band" x="{left:.1f}" y="{up.end}" width="{wide:.1f}" height="{up.begin - up.end}">'
                f"<title>{title}</title></rect>"
            )


def _bar(bar: Bar, across: _Scale, top: float, bound: str) -> str:
    middle = top + ROW / 2
    parts = [f'<text class="name" x="{LABELS - 8}" y="{middle + 4}">{escape(bar.name)}</text>']
    if bar.value is None:
        return parts[0] + f'<text class="value" x="{LABELS + 6}" y="{middle + 4}">–</text>'
    end = across.at(bar.value)
    title = f"{bar.name}: {across.axis.shown(bar.value)}"
    if bar.low is not None and bar.high is not None:
        title += f" ({across.axis.shown(bar.low)} to {across.axis.shown(bar.high)})"
    parts.append(
        f'<rect class="bar" style="--k:var(--c{bar.colour % COLOURS})" x="{LABELS}" y="{top + 5}" rx="2" '
        f'width="{max(end - LABELS, 0.5):.1f}" height="{ROW - 10}"><title>{escape(title)}</title></rect>'
    )
    right = end
    if bar.low is not None and bar.high is not None and bar.high > bar.low:
        low, right = across.at(bar.low), across.at(bar.high)
        parts.append(
            f'<path class="whisker" d="M{low:.1f} {middle}H{right:.1f}M{low:.1f} {middle - 4}v8'
            f'M{right:.1f} {middle - 4}v8"/>'
        )
    if bar.bound is not None:
        at = across.at(bar.bound)
        parts.append(
            f'<line class="bound" x1="{at:.1f}" x2="{at:.1f}" y1="{top + 2}" y2="{top + ROW - 2}">'
            f"<title>{escape(f'{bound}: {across.axis.shown(bar.bound)}')}</title></line>"
        )
    parts.append(f'<text class="value" x="{right + 6:.1f}" y="{middle + 4}">{across.axis.shown(bar.value)}</text>')
    return "".join(parts)


def _legend(entries: Sequence[tuple[str, int]]) -> str:
    if len(entries) < 2:
        return ""
    spans = "".join(
        f'<span><i style="background:var(--c{colour % COLOURS})"></i>{escape(name)}</span>' for name, colour in entries
    )
    return f'<p class="legend">{spans}</p>'
