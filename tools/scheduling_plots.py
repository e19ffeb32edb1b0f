"""Plots of docs/scheduling.md: the charts of `penstock sim`'s pages, each as an SVG file that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from penstock.sim.page import STYLE
from penstock.sim.report import KEPT, TIME, figure_of, task_lines
from penstock.sim.svg import COLOURS, WIDTH, Axis, Bar, Line, Mark, bar_chart, line_chart
from tools.scheduling_results import Measured

EDGE = 16  # pixels around a chart
LETTER, ENTRY, LEGEND_ROW = 6.2, 26, 18  # pixels: of a letter, of a legend's entry beside its name, of a row of them
SHARE = Axis("share of requests", low=0.0, high=1.0, percent=True)


def plots(measured: Measured) -> Iterator[tuple[str, str, str]]:
    """(file name, what it shows, content) of each plot that there is something for."""
    stem = "-".join([measured.scenario, *measured.changed.split()])
    if len(measured.rates) > 1:
        yield f"{stem}.rates.svg", "attainment over rates", _by_rate(measured)
    if measured.rates:
        yield from _staircases(measured, stem)
        return
    title = figure_of(measured.document)[1]
    if ranking := _ranking(measured, title):
        yield f"{stem}.svg", title, ranking
    if probes := _probes(measured):
        yield f"{stem}.attainment.svg", "attainment over rates", probes


def _ranking(measured: Measured, title: str) -> str:
    colours = _colours(measured)
    bars = []
    for name, row in measured.policies.items():
        low, high = row.get("spread") or (None, None)
        bars.append(Bar(name, row.get(measured.field), colours[name], low, high, row.get("bound_rate")))
    bound = "nobody can do better" if any(bar.bound is not None for bar in bars) else ""
    chart = bar_chart(bars, Axis(title), bound=bound)

    return _file(f"{measured.scenario}: {title}", chart, tick=bound) if chart else ""


def _probes(measured: Measured) -> str:
    """Whole simulations that the search made with its first seed."""
    colours, lines = _colours(measured), []
    for name in _own_layout(measured):
        whole = [p for p in measured.policies[name].get("probes") or [] if p["share"] == 1]
        ours = sorted(
            (p for p in whole if p["seed"] == whole[0]["seed"] and p["attainment"] is not None),
            key=lambda p: p["rate"],
        )
        hollow = frozenset(i for i, p in enumerate(ours) if not p["complete"])
        lines.append(Line(name, [(p["rate"], p["attainment"]) for p in ours], colours[name], dots=True, hollow=hollow))
    target = measured.document["target"]
    x = Axis("offline requests/s" if measured.document.get("vary") == "offline" else "requests/s")
    marks = [Mark(target, f"target {target:.0%}", level=True)]
    y = Axis("share of requests", high=1.0, percent=True)
    title = f"{measured.scenario}: attainment over rates"
    return _lines(title, lines, x, y, marks, note="hollow: given up early, the share is of what was over by then")


def _by_rate(measured: Measured) -> str:
    colours = _colours(measured)
    lines = [
        Line(name, [(r, measured.at(name, r).get("attainment")) for r in measured.rates], colours[name], dots=True)
        for name in _own_layout(measured)
    ]
    target = measured.document["target"]
    marks = [Mark(target, f"target {target:.0%}", level=True)]
    return _lines(f"{measured.scenario}: attainment over rates", lines, Axis("requests/s"), SHARE, marks)


def _staircases(measured: Measured, stem: str) -> Iterator[tuple[str, str, str]]:
    """What becomes of tasks when others join, at the greatest rate."""
    for name in measured.policies:
        lines = task_lines(measured.at(name, max(measured.rates)).get("tasks_over_time"))
        if lines:
            title = f"{name} at {max(measured.rates):g} requests/s, by arrival"
            yield f"{stem}.{name}.svg", title, _lines(f"{measured.scenario}: {title}", lines, TIME, KEPT, ())


def _own_layout(measured: Measured) -> list[str]:
    """Variants to draw as lines: all while there are colours, else those on the scenario's own layout."""
    names = list(measured.policies)
    return names if len(names) <= COLOURS else [name for name in names if "@" not in name] or names[:COLOURS]


def _colours(measured: Measured) -> dict[str, int]:
    """The same for a policy in all of its layouts."""
    policies = dict.fromkeys(name.partition("@")[0] for name in measured.policies)
    each = len(measured.policies) <= COLOURS
    numbers = {policy: i % COLOURS for i, policy in enumerate(policies)}
    return {name: i if each else numbers[name.partition("@")[0]] for i, name in enumerate(measured.policies)}


# --- a chart as a file


def _lines(title: str, lines: Sequence[Line], x: Axis, y: Axis, marks: Sequence[Mark], note: str = "") -> str:
    lines = [line for line in lines if line.points]
    chart = line_chart(lines, x, y, marks)
    return _file(title, chart, [(line.name, line.colour) for line in lines], note=note) if chart else ""


def _file(title: str, chart: str, legend: Sequence[tuple[str, int]] = (), *, tick: str = "", note: str = "") -> str:
    """
    Args:
        chart: markup of `sim.svg`; its legend, which is not SVG, is left out for ours.
        legend: (name, colour).
        tick: what the marks across bars mean.
    """
    begin = chart.index("<svg")
    height = float(chart[begin:].split('viewBox="', 1)[1].split('"', 1)[0].split()[3])
    inside = chart[chart.index(">", begin) + 1 : chart.rindex("</svg>")]
    head, top = [f'<text class="title" x="0" y="12">{escape(title)}</text>'], 24.0
    if note:
        head.append(f'<text x="0" y="{top + 4}">{escape(note)}</text>')
        top += LEGEND_ROW
    if tick:
        head.append(f'<rect class="ink" x="0" y="{top - 6}" width="3" height="13"/>')
        head.append(f'<text x="10" y="{top + 4}">{escape(tick)}</text>')
        top += LEGEND_ROW
    at = 0.0
    for name, colour in legend:
        wide = ENTRY + LETTER * len(name)
        if at and at + wide > WIDTH:
            at, top = 0.0, top + LEGEND_ROW
        head.append(f'<rect style="fill:var(--c{colour})" x="{at:.1f}" y="{top - 5}" width="11" height="11" rx="3"/>')
        head.append(f'<text x="{at + 16:.1f}" y="{top + 4}">{escape(name)}</text>')
        at += wide
    top += LEGEND_ROW if legend else 0.0
    wide, high = WIDTH + 2 * EDGE, round(height + top + 2 * EDGE)
    style = (
        f"{STYLE}svg {{ width: {wide}px; height: {high}px; font-family: system-ui, sans-serif; }}\n"
        "svg text.title { font-size: 13px; font-weight: 600; fill: var(--ink); } .ink { fill: var(--ink); }\n"
        ".back { fill: var(--card); stroke: var(--rule); }\n"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}" height="{high}" '
        f'role="img" aria-label="{escape(title)}"><style>{style}</style>'
        f'<rect class="back" x="0.5" y="0.5" width="{wide - 1}" height="{high - 1}" rx="10"/>'
        f'<g transform="translate({EDGE} {EDGE})">{"".join(head)}'
        f'<g transform="translate(0 {top:g})">{inside}</g></g></svg>\n'
    )
